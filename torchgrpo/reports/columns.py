"""What the ledger says of every group and completion, as columns of numbers: one pass, without texts.

rollouts/*.jsonl.zst ──columns_of──▶ Columns ──selection, histograms, evaluations──▶ the report
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from torchgrpo.monitoring.ledger_storage import ledger_files, lines_of, parsed

FATES = ("trained", "replaced", "stale", "evaluated")
FINISHES = ("stop", "length", "abort")
OUTCOMES = ("scored", "invalid", "error")
CHOSEN, IN_LOSS = 1, 2
READ_BYTES = 400_000_000
"""Of training's files, compressed: about 20 s of reading. The ledger may hold more (`logging.rollouts_gb`)."""


def number_of(name: Any, numbers: dict[Any, int]) -> int:
    """The number of a name, which are counted in the order in which they are first seen."""
    return numbers.setdefault(name, len(numbers))


@dataclass(frozen=True)
class Columns:
    """Every group and completion of a run.

    groups: one entry a group, in the ledger's order: `set` (number in `sets`; 0 is training), `iteration`, `step` (the
        first optimizer step that trained on it; -1: none), `fate`, `prompt` and `source` (numbers in `prompts` and
        `sources`), `team` (in `teams`), `id`, `first` and `count` (its completions), `begun`, `drawn`, `judged`
        (seconds since 1970).
    completions: one entry each: `group`, `score`, `success`, `length` (tokens), `characters`, `age` (versions; NaN:
        not trained on), `advantage` (mean over its tokens; NaN), `finish`, `outcome`, `flags`.
    teams: the engines that drew a group, by name.
    """

    groups: dict[str, np.ndarray]
    completions: dict[str, np.ndarray]
    sets: list[str]
    prompts: list[str]
    sources: list[str]
    teams: list[tuple[str, ...]]

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
    "set": "i", "iteration": "i", "step": "i", "fate": "b", "prompt": "i", "source": "i", "team": "i", "id": "q",
    "first": "i", "count": "i", "begun": "d", "drawn": "d", "judged": "d",
}  # fmt: skip
_COMPLETION = {
    "group": "i", "score": "f", "success": "f", "length": "i", "characters": "i", "age": "f", "advantage": "f",
    "finish": "b", "outcome": "b", "flags": "b",
}  # fmt: skip


def read_files(run_dir: Path, limit: int = READ_BYTES) -> list[Path]:
    """The files of a run's ledger that a report is made of: all, or so many of training that they stay within `limit`,
    evenly over the run, its first and its last among them."""
    files = ledger_files(run_dir)
    training = [file for file in files if not file.evaluated]
    # Of a file that is not closed yet: what it will be about.
    size = sum(file.path.stat().st_size // (1 if file.path.suffix == ".zst" else 3) for file in training)
    if size > limit:
        count = max(2, int(len(training) * limit / size))
        places = np.linspace(0, len(training) - 1, count).round().astype(int)
        kept = {training[place].path for place in places}
        files = [file for file in files if file.evaluated or file.path in kept]
    return [file.path for file in files]


def columns_of(files: Sequence[Path]) -> Columns:
    groups: dict[str, array[Any]] = {name: array(kind) for name, kind in _GROUP.items()}
    completions: dict[str, array[Any]] = {name: array(kind) for name, kind in _COMPLETION.items()}
    sets: dict[str, int] = {"": 0}
    prompts: dict[str, int] = {}
    sources: dict[str, int] = {}
    teams: dict[tuple[str, ...], int] = {}
    for line in chain.from_iterable(map(lines_of, files)):
        record = parsed(line)
        steps = record["optimizer_steps"]
        team = tuple(sorted({one["engine"] for one in record["completions"]}))
        values = (
            number_of(record["set"], sets),
            record["iteration"],
            steps[0] if steps else -1,
            FATES.index(record["fate"]),
            number_of(record["prompt_id"], prompts),
            number_of(record["source"], sources),
            number_of(team, teams),
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
    of_groups, of_completions = (
        {name: np.array(column) for name, column in each.items()} for each in (groups, completions)
    )
    return Columns(of_groups, of_completions, list(sets), list(prompts), list(sources), list(teams))


def _completion(group: int, one: dict[str, Any], record: dict[str, Any]) -> tuple[float, ...]:
    verdict, versions, trained_at = one["verdict"], one["policy_versions"], record["trained_at"]
    age = advantage = float("nan")
    if is_seen(one):  # in lockstep, which counts no versions (-1), all tokens are of age 0
        age = 0.0 if trained_at < 0 else trained_at - sum(versions) / len(versions)
        advantage = mean_advantage(one["advantage"])
    return (
        group,
        verdict["score"],
        verdict["success"],
        len(one["token_ids"]),
        len(one["text"]),
        age,
        advantage,
        FINISHES.index(one["finish_reason"]),
        OUTCOMES.index(verdict["outcome"]),
        CHOSEN * one["chosen"] + IN_LOSS * one["in_loss"],
    )


def is_seen(one: dict[str, Any]) -> bool:
    """Whether a step of the learner has seen a completion, so that its advantage means something."""
    return len(one["log_ratio"]) > 0


def mean_advantage(advantage: Any) -> float:
    """The mean of an advantage, one number or one a token; 0 without tokens."""
    return sum(advantage) / max(1, len(advantage)) if isinstance(advantage, list) else advantage
