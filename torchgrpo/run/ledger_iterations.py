"""The iterations of a run as its ledger holds them: what `run=replay` gives to a learner once more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from config.schema.errors import ConfigError
from envs.group import Group
from torchgrpo.monitoring.ledger_line import group_of
from torchgrpo.monitoring.ledger_storage import ledger_files, read_records


@dataclass(frozen=True)
class Iteration:
    """What one iteration trained on.

    records: lines of the ledger, in the order in which the learner was given their groups. groups: the same.
    """

    number: int
    records: list[dict[str, Any]]
    groups: list[Group]

    @property
    def trained_at(self) -> int | None:
        """As `Fate.trained_at`."""
        version: int = self.records[0]["trained_at"]
        return None if version < 0 else version


def has_ledger(run_dir: Path) -> None:
    """Raises ConfigError where a run's folder holds no ledger."""
    if not ledger_files(run_dir):
        raise ConfigError(
            f"run_dir={run_dir}: there is no rollouts/ in this folder: the run had logging.rollouts_gb=0, or has "
            "ended no iteration yet"
        )


def iteration_of_step(run_dir: Path, step: int) -> int:
    """The number of the iteration of an optimizer step.

    Raises:
        ConfigError: no group of the ledger was trained on in that step.
    """
    has_ledger(run_dir)
    seen: set[int] = set()
    for record in read_records(run_dir, "train"):
        if step in record["optimizer_steps"]:
            number: int = record["iteration"]
            return number
        seen.update(record["optimizer_steps"])
    held = f"those from {min(seen)} to {max(seen)}" if seen else "none"
    raise ConfigError(f"step={step}: the ledger of {run_dir} holds no such optimizer step, but {held}")


def recorded_iterations(run_dir: Path, after: int, until: int) -> Iterator[Iteration]:
    """Those after one and up to another, each when it is asked for.

    Raises:
        ConfigError: one of them is not there.
    """
    expected = after + 1
    for number, of_iteration in groupby(read_records(run_dir, "train"), key=itemgetter("iteration")):
        if number <= after:
            continue
        if number != expected:
            break
        yield iteration_of(list(of_iteration))
        if number == until:
            return
        expected += 1
    raise ConfigError(
        f"{run_dir}: the ledger does not hold iteration {expected}, and there is no checkpoint after it to begin from; "
        f"what is to be replayed is in iteration {until} (logging.rollouts_gb bounds the ledger, "
        "train.keep_checkpoints=0 keeps all checkpoints)"
    )


def iteration_of(records: Sequence[dict[str, Any]]) -> Iteration:
    """Of all lines of one iteration; groups that were replaced come back behind those that took their place."""
    replaced = {record["group_id"]: record for record in records if record["fate"] == "replaced"}

    def whole(record: dict[str, Any]) -> Group:
        group, before = group_of(record), replaced.get(record["in_place_of"])
        group.in_place_of = None if before is None else whole(before)
        return group

    trained = [record for record in records if record["fate"] == "trained"]
    return Iteration(records[0]["iteration"], trained, [whole(record) for record in trained])
