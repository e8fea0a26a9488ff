"""What an alarm does to a run, and what `run=doctor` prints of it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from config.run_folder.checkpoints import checkpoints
from config.schema.errors import ConfigError
from tests.doctor.running import run
from tests.scripts import called, ran, rows
from torchgrpo.monitoring.doctor import diagnose
from torchgrpo.monitoring.events import read_events
from torchgrpo.run.jobs.doctor import examine

CUT = ("env.num_envs=4", "env.repeats=4", "inference_model.max_tokens=1", "train.total_dialog_turns=112")
"""Seven steps that teach nothing: an alarm at the fifth."""
WORRIED = ("env.num_envs=4", "env.repeats=4", "inference_model.max_tokens=2", "train.total_dialog_turns=112")
"""Seven steps with cut answers: warnings."""


def saved(run_dir: Path) -> list[int]:
    return [int(path.name.split("_")[1]) for path in checkpoints(run_dir)]


@pytest.mark.parametrize(
    ("choice", "steps", "expected"), [("say", 7, [7]), ("checkpoint", 7, [7, 5]), ("stop", 5, [5])]
)
def test_an_alarm_does_what_on_alarm_says(
    choice: str, steps: int, expected: Sequence[int], tmp_path: Path
) -> None:
    error = run(tmp_path, *CUT, f"train.on_alarm={choice}")
    assert len(rows(tmp_path)) == steps and saved(tmp_path) == expected
    assert error is not None  # nothing was learned
    assert ("train.on_alarm=stop" in error) == (choice == "stop")


def test_a_run_that_an_alarm_ends_exits_with_1_and_goes_on_without_being_ended_again(tmp_path: Path) -> None:
    process = ran("grpo.py", tmp_path, *CUT, "train.on_alarm=stop")
    said = process.output
    assert process.returncode == 1 and "Traceback" not in said
    assert (
        "error: train.on_alarm=stop: an alarm has ended the run, with a checkpoint.\nalarm: optimizer" in said
    )
    assert "train.resume=auto" in said
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"
    again = ran("grpo.py", tmp_path, *CUT, "train.on_alarm=stop", "train.resume=auto").output
    assert "error: nothing was learned: none of 7 optimizer steps" in again
    alarms = [event for event in read_events(tmp_path) if event["event"] == "alarm"]
    assert [event["rule"] for event in alarms].count("nothing_taught") == 1


def test_warnings_stop_nothing(tmp_path: Path) -> None:
    run(tmp_path, *WORRIED, "train.on_alarm=stop")
    assert {finding.severity for finding in diagnose(tmp_path)} == {"warning"}
    assert len(rows(tmp_path)) == 7


def test_the_job_prints_findings_with_steps_cause_example_and_knob(tmp_path: Path) -> None:
    run(tmp_path, *WORRIED)
    done = called("grpo.py", "run=doctor", f"run_dir={tmp_path}", f"hydra.run.dir={tmp_path}/unused")
    assert done.returncode == 0 and done.stderr == ""
    first, *told = done.stdout.rstrip().split("\n\n")
    assert "rules over 7 optimizer steps and 0 evaluations" in first
    (truncation,) = [
        text for text in told if text.startswith("warning: truncation, optimizer steps 5 to 7\n")
    ]
    share = rows(tmp_path)[4]["length/truncated"]
    assert f"\n  length/truncated is {share:.3g} at optimizer step 5 (above 0.1 in 5 rows)\n" in truncation
    assert "\n  for example: group " in truncation and "(length, reward " in truncation
    assert truncation.endswith("what helps: raise inference_model.max_tokens, or ask for shorter answers")
    assert not (tmp_path / "unused").exists()


def test_a_run_that_goes_on_and_one_that_is_well(tmp_path: Path) -> None:
    """Its last row is half written, its ledger is gone, and it has no summary."""
    run(tmp_path, "env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=48", "logging.rollouts_gb=0")
    (tmp_path / "summary.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"optimizer_step": 4, "reward/me')
    assert examine(tmp_path).startswith("nothing to worry about: ")
    assert "rules over 3 optimizer steps and 0 evaluations" in examine(tmp_path)


def test_folders_that_hold_no_run_are_named(tmp_path: Path) -> None:
    done = called("grpo.py", "run=doctor", f"run_dir={tmp_path}", f"hydra.run.dir={tmp_path}/unused")
    assert done.returncode == 2 and f"run_dir={tmp_path}: no run's folder" in done.stderr
    with pytest.raises(ConfigError, match="no run has left its settings there"):
        diagnose(tmp_path)
