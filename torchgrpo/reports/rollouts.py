"""Data of the rollout browser: columns of groups, and texts and tokens of selected completions."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from torchgrpo.monitoring.ledger_storage import parse_record, read_lines
from torchgrpo.reports.chats import chat_data, truncate_text
from torchgrpo.reports.completion_selection import MAX_TEXT_LENGTH, Selection
from torchgrpo.reports.curves import round_number
from torchgrpo.reports.ledger_columns import FATES, FINISH_REASONS, OUTCOMES, Columns, has_token_values, index_of
from torchgrpo.reports.token_strings import TokenDecoder

MAX_GROUPS = 60_000
"""Maximum number of groups; a longer run has every n-th group, and the groups of the shown texts."""
PROMPT_TEXT_BUDGET = 2_000_000
"""Number of characters divided among the prompts. Prompts of several messages may exceed their share."""
MAX_MESSAGE_LENGTH, MIN_MESSAGE_LENGTH = 4000, 200
"""Bounds of the number of characters to which a message is truncated."""


def rollout_data(
    files: Sequence[Path],
    columns: Columns,
    steps: np.ndarray,
    selection: Selection,
    token_decoder: TokenDecoder | None,
    missing_decoder_reason: str,
) -> dict[str, Any]:
    """Returns the data of the rollout browser.

    files: ledger files of the columns. steps: int [groups], the optimizer step of each group. token_decoder:
    None if there is none; then `missing_decoder_reason` has the reason.
    """
    completions_by_group: dict[int, list[int]] = {}
    for number in selection.completions.tolist():
        completions_by_group.setdefault(int(columns.completions["group"][number]), []).append(number)
    groups, group_indices = _group_data(columns, steps, sorted(completions_by_group))
    # A message has at most the share of one prompt in the budget, within bounds.
    prompts = {int(columns.groups["prompt"][group]) for group in completions_by_group}
    limit = min(MAX_MESSAGE_LENGTH, max(MIN_MESSAGE_LENGTH, PROMPT_TEXT_BUDGET // max(1, len(prompts))))
    collector = _CompletionCollector(columns, selection, token_decoder, group_indices, limit)
    if completions_by_group:
        last = max(completions_by_group)
        for group, line in enumerate(chain.from_iterable(map(read_lines, files))):
            if group in completions_by_group:
                collector.add(parse_record(line), completions_by_group[group])
            if group == last:
                break
    flips = [
        {"to_right": flip.to_right, "set": flip.set, "prompt": flip.prompt, "first": collector.row_numbers[flip.first],
         "last": collector.row_numbers[flip.last]}
        for flip in selection.flips
    ]  # fmt: skip
    return {
        "groups": groups,
        "completions": collector.rows,
        "tokens": collector.tokens,
        "chats": collector.chats,
        "texts": list(collector.texts),
        "prompts": collector.prompts,
        "sets": columns.sets,
        "sources": columns.sources,
        "fates": FATES,
        "finish_reasons": FINISH_REASONS,
        "outcomes": OUTCOMES,
        "flips": flips,
        "totals": {
            "groups": len(columns.groups["id"]),
            "completions": len(columns.completions["group"]),
            "flips": selection.num_flips,
        },
        "missing_tokens_reason": missing_decoder_reason,
    }


def _group_data(
    columns: Columns, steps: np.ndarray, required_groups: list[int]
) -> tuple[dict[str, list[Any]], dict[int, int]]:
    """Returns the columns of the shown groups, and the index of each group there."""
    count = len(columns.groups["id"])
    selected = np.arange(0, count, max(1, -(-count // MAX_GROUPS)))
    selected = np.union1d(selected, np.array(required_groups, dtype=np.int64))
    groups = columns.groups
    score, success = (columns.mean_of_groups(name, columns.has_score)[selected] for name in ("score", "success"))
    length = columns.mean_of_groups("length", np.ones(len(columns.completions["group"]), dtype=bool))[selected]
    data: dict[str, list[Any]] = {
        name: groups[name][selected].tolist() for name in ("set", "iteration", "fate", "prompt", "source", "count")
    }
    data["id"] = [str(each) for each in groups["id"][selected].tolist()]  # may exceed the integers of JavaScript
    data["step"] = steps[selected].tolist()
    for name, values in (("score", score), ("success", success), ("length", length)):
        data[name] = [round_number(value) if np.isfinite(value) else None for value in values.tolist()]
    return data, {int(group): index for index, group in enumerate(selected.tolist())}


class _CompletionCollector:
    """Collects the selected completions from the records of the ledger.

    rows: columns with one entry per completion. tokens: values of the tokens, by row number. chats: turns of episodes,
    by row number; such a completion has an empty text. prompts: by prompt index. texts: index of each text.
    row_numbers: row number of each collected completion.
    """

    def __init__(
        self,
        columns: Columns,
        selection: Selection,
        token_decoder: TokenDecoder | None,
        group_indices: dict[int, int],
        max_message_length: int,
    ) -> None:
        self.columns, self.selection, self.token_decoder = columns, selection, token_decoder
        self.group_indices, self.max_message_length = group_indices, max_message_length
        names = (
            "group", "sample", "score", "success", "length", "age", "advantage", "finish", "outcome", "flags", "text",
            "num_cut_characters", "components",
        )  # fmt: skip
        self.rows: dict[str, list[Any]] = {name: [] for name in names}
        self.tokens: dict[int, dict[str, Any]] = {}
        self.chats: dict[int, dict[str, Any]] = {}
        self.texts: dict[str, int] = {}
        self.prompts: dict[int, dict[str, Any]] = {}
        self.row_numbers: dict[int, int] = {}

    def add(self, record: dict[str, Any], numbers: list[int]) -> None:
        """Adds completions of one group by their numbers. record: the group's record."""
        group = int(self.columns.completions["group"][numbers[0]])
        prompt = int(self.columns.groups["prompt"][group])
        if prompt not in self.prompts:
            answer = record["answer"]
            reference = answer if isinstance(answer, str) else orjson.dumps(answer).decode()
            self.prompts[prompt] = {
                "id": record["prompt_id"],
                "row": record["row"],
                "messages": [
                    [message["role"], index_of(truncate_text(message["content"], self.max_message_length), self.texts)]
                    for message in record["messages"]
                ],
                "answer": truncate_text(reference, self.max_message_length),
            }
        first = int(self.columns.groups["first"][group])
        for number in numbers:
            completion = record["completions"][number - first]
            columns, row = self.columns.completions, len(self.rows["group"])
            self.row_numbers[number] = row
            values: dict[str, Any] = {}
            for name in ("score", "success", "age", "advantage"):
                value = float(columns[name][number])
                values[name] = round_number(value) if np.isfinite(value) else None
            values |= {name: int(columns[name][number]) for name in ("length", "finish", "outcome", "flags")}
            text = completion["text"]
            if completion["turns"] or completion["error"]:
                text, self.chats[row] = "", chat_data(completion)
            values |= {
                "group": self.group_indices[group],
                "sample": completion["sample"],
                "text": text[:MAX_TEXT_LENGTH],
            }
            values["num_cut_characters"] = max(0, len(text) - MAX_TEXT_LENGTH)
            components = completion["verdict"]["components"]
            values["components"] = {name: round_number(value) for name, value in components.items()}
            for name, column in self.rows.items():
                column.append(values[name])
            if number in self.selection.with_tokens and self.token_decoder is not None:
                self.tokens[row] = token_data(completion, self.token_decoder)


def token_data(completion: dict[str, Any], token_decoder: TokenDecoder) -> dict[str, Any]:
    """Returns the strings of a completion's tokens and the known values of each token.

    The keys are "strings", and if known "advantage", "log_ratio", "entropy", "sampled". "advantage" is one
    number if all tokens have the same advantage.
    """
    values: dict[str, Any] = {"strings": token_decoder(completion["token_ids"])}
    if has_token_values(completion):
        for name in ("advantage", "log_ratio", "entropy"):
            value = completion[name]
            values[name] = [round_to_3(each) for each in value] if isinstance(value, list) else round_to_3(value)
    if completion["sampled_mask"]:
        values["sampled"] = [int(is_sampled) for is_sampled in completion["sampled_mask"]]
    return values


def round_to_3(value: float) -> float:
    """Rounds to three significant digits, and values near zero to 0."""
    return 0 if abs(value) < 5e-4 else round_number(float(f"{value:.3g}"))
