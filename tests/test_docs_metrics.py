"""README.md explains every number that a run logs."""

import re
from pathlib import Path

import grpo
import grpo_async
from grpo_utils import run
from tests.scripts import ROOT, configured, rows

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
COUNTED = re.compile(r"(age/histogram/|ess/age_)\d+")


def test_every_metric_is_explained(tmp_path: Path) -> None:
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    explained = {name for line in table for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}
    for script in (grpo, grpo_async):
        folder = tmp_path / script.__name__
        folder.mkdir()
        run(configured(*SMALL), folder, script.train)
        logged = {name for row in rows(folder) for name in row}
        general = {COUNTED.sub(r"\1K", name.replace("reward/accuracy", "reward/PART")) for name in logged}
        assert general - explained == set()
