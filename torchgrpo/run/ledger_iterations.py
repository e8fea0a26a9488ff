"""Reads recorded groups by iteration from a run's ledger, and checks that a ledger exists."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from config.schema.errors import ConfigError
from envs.group import Group
from torchgrpo.monitoring.ledger_record import group_from_record
from torchgrpo.monitoring.ledger_storage import ledger_files, read_records


@dataclass(frozen=True)
class RecordedIteration:
    """Groups of one iteration, as the ledger recorded them.

    records: ledger lines of the groups, in the order in which the learner received the groups. groups: the same groups.
    """

    number: int
    records: list[dict[str, Any]]
    groups: list[Group]

    @property
    def trained_at(self) -> int | None:
        """Policy version that trained on the groups; None in lockstep. See `GroupFate.trained_at`."""
        version: int = self.records[0]["trained_at"]
        return None if version < 0 else version


def require_ledger(run_dir: Path) -> None:
    """Raises ConfigError unless a run's folder holds a ledger."""
    if not ledger_files(run_dir):
        raise ConfigError(
            f"run_dir={run_dir}: the folder has no rollouts/: the run had logging.rollouts_gb=0, or has "
            "finished no iteration yet"
        )


def find_iteration_of_step(run_dir: Path, step: int) -> int:
    """Returns the number of the iteration that an optimizer step belongs to.

    Raises:
        ConfigError: no group of the ledger was trained on in that step.
    """
    require_ledger(run_dir)
    steps: set[int] = set()
    for record in read_records(run_dir, "train"):
        if step in record["optimizer_steps"]:
            number: int = record["iteration"]
            return number
        steps.update(record["optimizer_steps"])
    recorded = f"those from {min(steps)} to {max(steps)}" if steps else "none"
    raise ConfigError(f"replay.step={step}: the ledger of {run_dir} holds no such optimizer step, but {recorded}")


def read_iterations(run_dir: Path, after: int, until: int) -> Iterator[RecordedIteration]:
    """Yields the iterations after `after`, up to and including `until`, reading the ledger lazily.

    Raises:
        ConfigError: the ledger lacks one of them.
    """
    expected = after + 1
    for number, of_iteration in groupby(read_records(run_dir, "train"), key=itemgetter("iteration")):
        if number <= after:
            continue
        if number != expected:
            break
        yield parse_iteration(list(of_iteration))
        if number == until:
            return
        expected += 1
    raise ConfigError(
        f"{run_dir}: the ledger does not hold iteration {expected}, and no later checkpoint exists from which "
        f"iteration {until} could be replayed; raise logging.rollouts_gb, or set train.keep_checkpoints=0 to "
        "keep all checkpoints"
    )


def parse_iteration(records: Sequence[dict[str, Any]]) -> RecordedIteration:
    """Builds an iteration from all of its ledger lines.

    A group that dynamic sampling replaced is linked from its replacement, as `Group.replaces`.
    """
    replaced = {record["group_id"]: record for record in records if record["fate"] == "replaced"}

    def group_with_replaced(record: dict[str, Any]) -> Group:
        group, before = group_from_record(record), replaced.get(record["replaces"])
        group.replaces = None if before is None else group_with_replaced(before)
        return group

    trained = [record for record in records if record["fate"] == "trained"]
    return RecordedIteration(records[0]["iteration"], trained, [group_with_replaced(record) for record in trained])
