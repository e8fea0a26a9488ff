"""The rollouts of a report: every group as numbers, the chosen completions with their texts, some with their tokens."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from torchgrpo.monitoring.ledger_storage import lines_of, parsed
from torchgrpo.reports.columns import FATES, FINISHES, OUTCOMES, Columns, is_seen, number_of
from torchgrpo.reports.curves import rounded
from torchgrpo.reports.pieces import Pieces
from torchgrpo.reports.selection import LONGEST_TEXT, Selection

MOST_GROUPS = 60_000
"""With their numbers; of a longer run every so many, and those of which a text is shown."""
PROMPT_BYTES = 2_000_000
"""Of all texts of prompts."""
LONGEST_PROMPT, SHORTEST_PROMPT = 4000, 200
"""Characters of a message that are shown at most, whatever the budget; and at least."""


def rollouts(
    files: Sequence[Path],
    columns: Columns,
    steps: np.ndarray,
    chosen: Selection,
    pieces: Pieces | None,
    no_pieces: str,
) -> dict[str, Any]:
    """What the browser of rollouts shows.

    files: those that the columns are of. steps: int [groups]. pieces: cuts a completion into tokens; None, and
    `no_pieces` says why not.
    """
    wanted: dict[int, list[int]] = {}
    for number in chosen.completions.tolist():
        wanted.setdefault(int(columns.completions["group"][number]), []).append(number)
    shown, of_page = _groups(columns, steps, sorted(wanted))
    # Characters of each message, so that those of all prompts fit in the budget.
    prompts = {int(columns.groups["prompt"][group]) for group in wanted}
    limit = min(LONGEST_PROMPT, max(SHORTEST_PROMPT, PROMPT_BYTES // max(1, len(prompts))))
    book = _Book(columns, chosen, pieces, of_page, limit)
    if wanted:
        last = max(wanted)
        for group, line in enumerate(chain.from_iterable(map(lines_of, files))):
            if group in wanted:
                book.add(parsed(line), wanted[group])
            if group == last:
                break
    flips = [
        {"to_right": flip.to_right, "set": flip.set, "prompt": flip.prompt, "first": book.place[flip.first],
         "last": book.place[flip.last]}
        for flip in chosen.flips
    ]  # fmt: skip
    return {
        "groups": shown,
        "completions": book.rows,
        "tokens": book.tokens,
        "texts": list(book.texts),
        "prompts": book.prompts,
        "sets": columns.sets,
        "sources": columns.sources,
        "fates": FATES,
        "finishes": FINISHES,
        "outcomes": OUTCOMES,
        "flips": flips,
        "of": {
            "groups": len(columns.groups["id"]),
            "completions": len(columns.completions["group"]),
            "flips": chosen.all_flips,
        },
        "no_tokens": no_pieces,
    }


def _groups(
    columns: Columns, steps: np.ndarray, wanted: list[int]
) -> tuple[dict[str, list[Any]], dict[int, int]]:
    """The groups' columns, and where in them each group is."""
    count = len(columns.groups["id"])
    kept = np.arange(0, count, max(1, -(-count // MOST_GROUPS)))
    kept = np.union1d(kept, np.array(wanted, dtype=np.int64))
    groups = columns.groups
    score, success = (columns.mean_of_groups(name, columns.judged)[kept] for name in ("score", "success"))
    length = columns.mean_of_groups("length", np.ones(len(columns.completions["group"]), dtype=bool))[kept]
    shown: dict[str, list[Any]] = {
        name: groups[name][kept].tolist()
        for name in ("set", "iteration", "fate", "prompt", "source", "count")
    }
    shown["id"] = [str(each) for each in groups["id"][kept].tolist()]  # larger than a number of JavaScript
    shown["step"] = steps[kept].tolist()
    for name, values in (("score", score), ("success", success), ("length", length)):
        shown[name] = [rounded(value) if np.isfinite(value) else None for value in values.tolist()]
    return shown, {int(group): place for place, group in enumerate(kept.tolist())}


class _Book:
    """Collects the chosen completions, line by line of the ledger.

    rows: columns, one entry a completion. tokens: by the number of the row. prompts: by the number of the prompt.
    """

    def __init__(
        self, columns: Columns, chosen: Selection, pieces: Pieces | None, of_page: dict[int, int], limit: int
    ) -> None:
        self.columns, self.chosen, self.pieces = columns, chosen, pieces
        self.of_page, self.limit = of_page, limit
        names = (
            "group", "sample", "score", "success", "length", "age", "advantage", "finish", "outcome", "flags", "text",
            "cut", "parts",
        )  # fmt: skip
        self.rows: dict[str, list[Any]] = {name: [] for name in names}
        self.tokens: dict[int, dict[str, Any]] = {}
        self.texts: dict[str, int] = {}
        self.prompts: dict[int, dict[str, Any]] = {}
        self.place: dict[int, int] = {}

    def add(self, record: dict[str, Any], numbers: list[int]) -> None:
        """The completions of these numbers, which are of this group."""
        group = int(self.columns.completions["group"][numbers[0]])
        prompt = int(self.columns.groups["prompt"][group])
        if prompt not in self.prompts:
            answer = record["answer"]
            told = answer if isinstance(answer, str) else orjson.dumps(answer).decode()
            self.prompts[prompt] = {
                "id": record["prompt_id"],
                "row": record["row"],
                "messages": [
                    [message["role"], number_of(shortened(message["content"], self.limit), self.texts)]
                    for message in record["messages"]
                ],
                "answer": shortened(told, self.limit),
            }
        first = int(self.columns.groups["first"][group])
        for number in numbers:
            one = record["completions"][number - first]
            columns, place = self.columns.completions, len(self.rows["group"])
            self.place[number] = place
            values: dict[str, Any] = {}
            for name in ("score", "success", "age", "advantage"):
                value = float(columns[name][number])
                values[name] = rounded(value) if np.isfinite(value) else None
            values |= {name: int(columns[name][number]) for name in ("length", "finish", "outcome", "flags")}
            values |= {
                "group": self.of_page[group],
                "sample": one["sample"],
                "text": one["text"][:LONGEST_TEXT],
            }
            values["cut"] = max(0, len(one["text"]) - LONGEST_TEXT)
            values["parts"] = {part: rounded(score) for part, score in one["verdict"]["parts"].items()}
            for name, column in self.rows.items():
                column.append(values[name])
            if number in self.chosen.with_tokens and self.pieces is not None:
                self.tokens[place] = token_values(one, self.pieces)


def token_values(one: dict[str, Any], pieces: Pieces) -> dict[str, Any]:
    """{"pieces", and where they are known "advantage", "log_ratio", "entropy", "sampled"}, one entry a token.

    advantage: one number where all tokens have the same.
    """
    values: dict[str, Any] = {"pieces": pieces(one["token_ids"])}
    if is_seen(one):
        for name in ("advantage", "log_ratio", "entropy"):
            value = one[name]
            values[name] = [short(each) for each in value] if isinstance(value, list) else short(value)
    if one["sampled"]:
        values["sampled"] = [int(own) for own in one["sampled"]]
    return values


def short(value: float) -> float:
    """To three digits; what rounds to zero is zero."""
    return 0 if abs(value) < 5e-4 else rounded(float(f"{value:.3g}"))


def shortened(text: str, limit: int) -> str:
    """At most so many characters, and how many there are more."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} characters more)"
