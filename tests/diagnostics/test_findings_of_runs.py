"""Tests of the diagnostics on training runs, during the run and afterwards."""

from pathlib import Path
from types import ModuleType

import pytest

import grpo
import grpo_async
from tests.diagnostics.short_runs import run_quickstart
from tests.script_runner import read_metrics
from torchgrpo.monitoring.diagnostics import diagnose
from torchgrpo.monitoring.events import read_events

HELD_OUT = ("eval.sets={held_out:{dataset:arithmetic,n:4,limit:48,reward:null}}", "eval.frequency=20")
MISLEADING_REWARD = (
    *("env.num_envs=8", "env.repeats=8", "optimizer.lr=1e-3", "train.total_dialog_turns=2304"),
    "env.reward=tests.diagnostics.rewards:form_alone",
)


@pytest.mark.parametrize(
    "script", [pytest.param(grpo, id="lockstep"), pytest.param(grpo_async, id="overlapped", marks=pytest.mark.long)]
)
def test_run_that_learns_has_no_finding(script: ModuleType, tmp_path: Path) -> None:
    """Checks that 25 quickstart steps with evaluations have no finding but `info`."""
    run_quickstart(tmp_path, "train.total_dialog_turns=6400", *HELD_OUT, script=script)
    assert len([row for row in read_metrics(tmp_path) if "reward/mean" in row]) == 25
    assert [finding for finding in diagnose(tmp_path) if finding.severity != "info"] == []


@pytest.mark.long
def test_alarm_events_equal_the_findings_of_the_folder(tmp_path: Path) -> None:
    """Trains on a reward for the form alone, which makes the policy unlearn sums."""
    run_quickstart(tmp_path, *MISLEADING_REWARD, *HELD_OUT)
    findings = [(finding.rule, finding.first_step, finding.line) for finding in diagnose(tmp_path)]
    alarms = [event for event in read_events(tmp_path) if event["event"] == "alarm"]
    logged = [(event["rule"], event["optimizer_step"], event["text"]) for event in alarms]
    assert sorted(logged) == sorted(findings)
    assert {name for name, *_ in findings} >= {"component_hacked", "evaluation_drop", "kl_high", "zero_variance"}
