"""Reads the groups and completions of the ledger as columns of numbers, without texts.

rollouts/*.jsonl.zst ──read_columns──▶ Columns ──selection, histograms, evaluations──▶ report
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from torchgrpo.monitoring.ledger_storage import ledger_files, parse_record, read_lines

FATES = ("trained", "replaced", "stale", "evaluated")
FINISH_REASONS = ("stop", "length", "abort", "turns", "deadline", "error")
OUTCOMES = ("scored", "invalid", "error")
CHOSEN, IN_LOSS = 1, 2
"""Bits of the column `flags`."""
MAX_READ_BYTES = 400_000_000
"""Maximum compressed bytes of training files that a report reads. The ledger may have more."""


def index_of(name: Any, numbers: dict[Any, int]) -> int:
    """Returns the index of a name; a new name gets the next index."""
    return numbers.setdefault(name, len(numbers))


@dataclass(frozen=True)
class Columns:
    """Columns of all groups and completions of a run.

    groups: one entry per group, in the order of the ledger: `set` (index in `sets`; 0 is training),
    `iteration`,
        `step` (first optimizer step that trained on the group; -1: none), `fate` (index in FATES), `prompt`,
        `source` and `engine_set` (indices in `prompts`, `sources` and `engine_sets`), `id`, `first` and `count`
        (first completion and number of completions), `started_at`, `sampled_at` and `scored_at` (seconds since
        1970).
    completions: one entry per completion: `group`, `score`, `success`, `length` (tokens), `characters`, `age`
    (policy
        versions; NaN without training), `advantage` (mean over the tokens; NaN without training), `finish`,
        `outcome` (indices in FINISH_REASONS and OUTCOMES), `flags` (bits CHOSEN and IN_LOSS).
    engine_sets: names of the engines that sampled a group.
    """

    groups: dict[str, np.ndarray]
    completions: dict[str, np.ndarray]
    sets: list[str]
    prompts: list[str]
    sources: list[str]
    engine_sets: list[tuple[str, ...]]

    @property
    def is_training(self) -> np.ndarray:
        """Mask of completions that were sampled for training: bool [completions]."""
        return np.asarray(self.groups["set"][self.completions["group"]] == 0)

    @property
    def has_score(self) -> np.ndarray:
        """Mask of completions whose reward raised no error: bool [completions]."""
        return np.asarray(self.completions["outcome"] != OUTCOMES.index("error"))

    def mean_of_groups(self, column: str, mask: np.ndarray) -> np.ndarray:
        """Returns the mean of a column over the masked completions of each group.

        Returns float [groups]; NaN for a group without masked completions.
        """
        groups, size = self.completions["group"][mask], len(self.groups["id"])
        sums = np.bincount(groups, weights=self.completions[column][mask], minlength=size)
        counts = np.bincount(groups, minlength=size)
        return np.asarray(np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0))


_GROUP_TYPES = {
    "set": "i", "iteration": "i", "step": "i", "fate": "b", "prompt": "i", "source": "i", "engine_set": "i", "id": "q",
    "first": "i", "count": "i", "started_at": "d", "sampled_at": "d", "scored_at": "d",
}  # fmt: skip
_COMPLETION_TYPES = {
    "group": "i", "score": "f", "success": "f", "length": "i", "characters": "i", "age": "f", "advantage": "f",
    "finish": "b", "outcome": "b", "flags": "b",
}  # fmt: skip


def select_ledger_files(run_dir: Path, limit: int = MAX_READ_BYTES) -> list[Path]:
    """Returns the ledger files that a report reads: at most `limit` bytes for training.

    If the training files are larger, the selection is even over the run and includes the first and the last file.
    """
    files = ledger_files(run_dir)
    training = [file for file in files if not file.eval_set]
    # A file that is not compressed yet counts with its estimated compressed size.
    size = sum(file.path.stat().st_size // (1 if file.path.suffix == ".zst" else 3) for file in training)
    if size > limit:
        count = max(2, int(len(training) * limit / size))
        indices = np.linspace(0, len(training) - 1, count).round().astype(int)
        selected_paths = {training[index].path for index in indices}
        files = [file for file in files if file.eval_set or file.path in selected_paths]
    return [file.path for file in files]


def read_columns(files: Sequence[Path]) -> Columns:
    """Reads the columns of ledger files."""
    groups: dict[str, array[Any]] = {name: array(kind) for name, kind in _GROUP_TYPES.items()}
    completions: dict[str, array[Any]] = {name: array(kind) for name, kind in _COMPLETION_TYPES.items()}
    sets: dict[str, int] = {"": 0}
    prompts: dict[str, int] = {}
    sources: dict[str, int] = {}
    engine_sets: dict[tuple[str, ...], int] = {}
    for line in chain.from_iterable(map(read_lines, files)):
        record = parse_record(line)
        steps = record["optimizer_steps"]
        engines = tuple(sorted({one["engine"] for one in record["completions"]}))
        values = (
            index_of(record["set"], sets),
            record["iteration"],
            steps[0] if steps else -1,
            FATES.index(record["fate"]),
            index_of(record["prompt_id"], prompts),
            index_of(record["source"], sources),
            index_of(engines, engine_sets),
            record["group_id"],
            len(completions["group"]),
            len(record["completions"]),
            record["started_at"],
            record["sampled_at"],
            record["scored_at"],
        )
        number = len(groups["id"])
        for column, value in zip(groups.values(), values, strict=True):
            column.append(value)
        for one in record["completions"]:
            for column, value in zip(completions.values(), _completion_values(number, one, record), strict=True):
                column.append(value)
    group_arrays, completion_arrays = (
        {name: np.array(column) for name, column in each.items()} for each in (groups, completions)
    )
    return Columns(group_arrays, completion_arrays, list(sets), list(prompts), list(sources), list(engine_sets))


def _completion_values(group: int, completion: dict[str, Any], record: dict[str, Any]) -> tuple[float, ...]:
    verdict, versions = completion["verdict"], completion["policy_versions"]
    trained_at = record["trained_at"]
    age = advantage = float("nan")
    if has_token_values(completion):  # in lockstep trained_at is -1, and all tokens have age 0
        age = 0.0 if trained_at < 0 else trained_at - sum(versions) / len(versions)
        advantage = mean_advantage(completion)
    return (
        group,
        verdict["score"],
        verdict["success"],
        len(completion["token_ids"]),
        len(completion["text"]),
        age,
        advantage,
        FINISH_REASONS.index(completion["finish_reason"]),
        OUTCOMES.index(verdict["outcome"]),
        CHOSEN * completion["chosen"] + IN_LOSS * completion["in_loss"],
    )


def has_token_values(completion: dict[str, Any]) -> bool:
    """Whether an optimizer step trained on a completion, so its advantage is known."""
    return len(completion["log_ratio"]) > 0


def mean_advantage(completion: dict[str, Any]) -> float:
    """Returns the mean advantage of a completion over its sampled tokens; 0 without any."""
    advantage = completion["advantage"]
    if not isinstance(advantage, list):
        return float(advantage)
    num_sampled = sum(completion["sampled_mask"] or [True] * len(advantage))
    return float(sum(advantage) / max(1, num_sampled))
