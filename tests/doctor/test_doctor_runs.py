"""Real runs: two that learn give no reason to worry, one that is led astray is told of, live and afterwards."""

from pathlib import Path
from types import ModuleType

import pytest

import grpo
import grpo_async
from tests.doctor.running import run
from tests.scripts import rows
from torchgrpo.monitoring.doctor import diagnose
from torchgrpo.monitoring.events import read_events

HELD_OUT = ("eval.sets={held_out:{dataset:arithmetic,n:4,limit:48,reward:null}}", "eval.frequency=20")
ASTRAY = (
    *("env.num_envs=8", "env.repeats=8", "optimizer.lr=1e-3", "train.total_dialog_turns=2304"),
    "env.reward=tests.doctor.rewards:form_alone",
)


@pytest.mark.parametrize(
    "script",
    [pytest.param(grpo, id="lockstep"), pytest.param(grpo_async, id="overlapped", marks=pytest.mark.long)],
)
def test_a_run_that_learns_is_no_reason_to_worry(script: ModuleType, tmp_path: Path) -> None:
    """The quickstart with 25 of its 120 steps, evaluated: nothing but where the time went is said of it."""
    run(tmp_path, "train.total_dialog_turns=6400", *HELD_OUT, script=script)
    assert len([row for row in rows(tmp_path) if "reward/mean" in row]) == 25
    assert [finding for finding in diagnose(tmp_path) if finding.severity != "info"] == []


@pytest.mark.long
def test_what_was_said_live_is_what_is_found_afterwards(tmp_path: Path) -> None:
    """A run that is paid for form unlearns to add."""
    run(tmp_path, *ASTRAY, *HELD_OUT)
    found = [(finding.rule, finding.first_step, finding.line) for finding in diagnose(tmp_path)]
    alarms = [event for event in read_events(tmp_path) if event["event"] == "alarm"]
    said = [(event["rule"], event["optimizer_step"], event["text"]) for event in alarms]
    assert sorted(said) == sorted(found)
    assert {name for name, *_ in found} >= {"part_hacked", "evaluation_falls", "kl_far", "zero_variance"}
