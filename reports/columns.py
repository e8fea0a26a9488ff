"""What the ledger says of every group and completion, as columns of numbers: one pass, without texts.

rollouts/*.jsonl.zst ──columns_of──▶ Columns ──selection, histograms, evaluations──▶ the report
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from monitoring.ledger_files import ledger_files, lines_of

FATES = ("trained", "replaced", "stale", "evaluated")
FINISHES = ("stop", "length", "abort")
OUTCOMES = ("scored", "invalid", "error")
CHOSEN, IN_LOSS = 1, 2
_NONE = float("nan")


@dataclass
class Names:
    """Words and their numbers, in the order in which they were first seen."""

    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def all(self) -> list[str]:
        return list(self.numbers)


@dataclass(frozen=True)
class Columns:
    """Every group and completion of a run.

    groups: one entry a group, in the ledger's order: `set` (number in `sets`; 0 is training), `iteration`, `step` (the
        first optimizer step that trained on it; -1: none), `fate`, `prompt` and `source` (numbers in `prompts` and
        `sources`), `id`, `first` and `count` (its completions), `begun`, `drawn`, `judged` (seconds since 1970).
    completions: one entry each: `group`, `score`, `success`, `length` (tokens), `characters`, `age` (versions; NaN:
        not trained on), `advantage` (mean over its tokens; NaN), `finish`, `outcome`, `flags`.
    """

    groups: dict[str, np.ndarray]
    completions: dict[str, np.ndarray]
    sets: list[str]
    prompts: list[str]
    sources: list[str]

    @property
    def training(self) -> np.ndarray:
        """bool [completions]: not of an evaluation."""
        return np.asarray(self.groups["set"][self.completions["group"]] == 0)

    @property
    def judged(self) -> np.ndarray:
        """bool [completions]: neither a failed judging."""
        return np.asarray(self.completions["outcome"] != OUTCOMES.index("error"))

    def mean_of_groups(self, column: str, counted: np.ndarray) -> np.ndarray:
        """float [groups]: the mean of a column over those completions of each that count; NaN where none does."""
        groups, size = self.completions["group"][counted], len(self.groups["id"])
        sums = np.bincount(groups, weights=self.completions[column][counted], minlength=size)
        counts = np.bincount(groups, minlength=size)
        return np.asarray(np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0))


_GROUP = {
    "set": "i", "iteration": "i", "step": "i", "fate": "b", "prompt": "i", "source": "i", "id": "q", "first": "i",
    "count": "i", "begun": "d", "drawn": "d", "judged": "d",
}  # fmt: skip
_COMPLETION = {
    "group": "i", "score": "f", "success": "f", "length": "i", "characters": "i", "age": "f", "advantage": "f",
    "finish": "b", "outcome": "b", "flags": "b",
}  # fmt: skip


def ledger_lines(run_dir: Path) -> Iterator[bytes]:
    """One line for each group that a run's folder holds, the oldest first."""
    for file in ledger_files(run_dir):
        yield from lines_of(file.path)


def columns_of(run_dir: Path) -> Columns:
    """Read a run's whole ledger once."""
    groups: dict[str, array[Any]] = {name: array(kind) for name, kind in _GROUP.items()}
    completions: dict[str, array[Any]] = {name: array(kind) for name, kind in _COMPLETION.items()}
    sets, prompts, sources = Names({"": 0}), Names(), Names()
    for line in ledger_lines(run_dir):
        record = orjson.loads(line)
        steps = record["optimizer_steps"]
        values = (
            sets.of(record["set"]),
            record["iteration"],
            steps[0] if steps else -1,
            FATES.index(record["fate"]),
            prompts.of(record["prompt_id"]),
            sources.of(record["source"]),
            record["group_id"],
            len(completions["group"]),
            len(record["completions"]),
            record["begun"],
            record["drawn"],
            record["judged"],
        )
        number = len(groups["id"])
        for column, value in zip(groups.values(), values, strict=True):
            column.append(value)
        for one in record["completions"]:
            for column, value in zip(completions.values(), _completion(number, one, record), strict=True):
                column.append(value)
    return Columns(_arrays(groups), _arrays(completions), sets.all(), prompts.all(), sources.all())


def _completion(group: int, one: dict[str, Any], record: dict[str, Any]) -> tuple[float, ...]:
    return (
        group,
        one["score"],
        one["success"],
        len(one["tokens"]),
        len(one["text"]),
        _age(one["versions"], record["trained_at"]),
        mean_advantage(one["advantage"]),
        FINISHES.index(one["finish_reason"]),
        OUTCOMES.index(one["outcome"]),
        CHOSEN * one["chosen"] + IN_LOSS * one["in_loss"],
    )


def _age(versions: list[list[int]], trained_at: int | None) -> float:
    """Mean over the tokens."""
    if trained_at is None or not versions:
        return _NONE
    if len(versions) == 1:
        return trained_at - versions[0][0]
    return trained_at - sum(version * count for version, count in versions) / sum(
        count for _, count in versions
    )


def mean_advantage(advantage: Any) -> float:
    """Of one number, or of one a token; NaN where there is none."""
    if isinstance(advantage, list):
        return sum(advantage) / len(advantage) if advantage else _NONE
    return _NONE if advantage is None else advantage


def _arrays(columns: "dict[str, array[Any]]") -> dict[str, np.ndarray]:
    return {name: np.array(column) for name, column in columns.items()}
