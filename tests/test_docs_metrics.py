"""docs/metrics.md explains every number that a run logs."""

import re
from pathlib import Path

import grpo
import grpo_async
from monitoring.doctor.bounds import BOUNDS
from run.jobs import run_job
from tests.scripts import ROOT, SCHEDULE_OF, configured, rows

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
COUNTED = re.compile(r"(age/histogram/|ess/age_)\d+")


def table() -> list[tuple[set[str], str]]:
    """The rows of the table of metrics: names, and when to worry."""
    text = (ROOT / "docs" / "metrics.md").read_text().partition("| metric | meaning | worry when |")[2]
    found = []
    for line in text.partition("\n\n")[0].splitlines()[2:]:
        names, _, worry = (cell.strip() for cell in line.strip("|").split("|"))
        found.append((set(re.findall(r"`([^`]+)`", names)), worry))
    return found


def test_every_worry_is_watched_and_every_bound_is_explained() -> None:
    worries = {worry: names for names, worry in table() if worry}
    watched = {rule.when: set(rule.metrics) for rule in BOUNDS}
    assert worries.keys() == watched.keys()
    for worry, metrics in watched.items():
        assert metrics <= worries[worry], worry


def test_every_metric_is_explained(tmp_path: Path) -> None:
    explained = {name for names, _ in table() for name in names}
    for script in (grpo, grpo_async):
        folder = tmp_path / script.__name__
        folder.mkdir()
        run_job(configured(*SMALL), folder, script.train, SCHEDULE_OF[script])
        logged = {name for row in rows(folder) for name in row}
        general = {COUNTED.sub(r"\1K", name.replace("reward/accuracy", "reward/PART")) for name in logged}
        assert general - explained == set()
