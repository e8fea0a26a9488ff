"""Tests of `train.on_alarm` and of the output of `run=diagnostics`."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from config.run_folder.checkpoints import checkpoints
from config.schema.errors import ConfigError
from tests.diagnostics.short_runs import run_quickstart
from tests.reports.synthetic_run import RunSpec, write_run_folder
from tests.script_runner import call_script, read_metrics, run_script
from torchgrpo.monitoring.diagnostics import diagnose
from torchgrpo.monitoring.events import read_events
from torchgrpo.run.jobs.diagnostics import format_diagnosis

NO_GRADIENT = ("env.num_envs=4", "env.repeats=4", "inference_model.max_tokens=1", "train.total_dialog_turns=112")
"""Seven steps without a gradient: an alarm at the fifth."""
TRUNCATED = ("env.num_envs=4", "env.repeats=4", "inference_model.max_tokens=2", "train.total_dialog_turns=112")
"""Seven steps with truncated completions: warnings."""


def checkpoint_iterations(run_dir: Path) -> list[int]:
    return [int(path.name.split("_")[1]) for path in checkpoints(run_dir)]


@pytest.mark.parametrize(
    ("choice", "steps", "expected"), [("log", 7, [7]), ("checkpoint", 7, [7, 5]), ("stop", 5, [5])]
)
def test_on_alarm_logs_writes_a_checkpoint_or_stops(
    choice: str, steps: int, expected: Sequence[int], tmp_path: Path
) -> None:
    error = run_quickstart(tmp_path, *NO_GRADIENT, f"train.on_alarm={choice}")
    assert len(read_metrics(tmp_path)) == steps and checkpoint_iterations(tmp_path) == expected
    assert error is not None  # nothing was learned
    assert ("train.on_alarm=stop" in error) == (choice == "stop")


def test_stop_exits_with_1_and_a_resumed_run_is_not_stopped_again(tmp_path: Path) -> None:
    process = run_script("grpo.py", tmp_path, *NO_GRADIENT, "train.on_alarm=stop")
    output = process.output
    assert process.returncode == 1 and "Traceback" not in output
    assert "error: train.on_alarm=stop: an alarm ended the run after writing a checkpoint.\nalarm: optimizer" in output
    assert "train.resume=auto" in output
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"
    resumed_output = run_script("grpo.py", tmp_path, *NO_GRADIENT, "train.on_alarm=stop", "train.resume=auto").output
    assert "error: nothing was learned: none of 7 optimizer steps" in resumed_output
    alarms = [event for event in read_events(tmp_path) if event["event"] == "alarm"]
    assert [event["rule"] for event in alarms].count("no_gradient") == 1


def test_warnings_do_not_stop_a_run(tmp_path: Path) -> None:
    run_quickstart(tmp_path, *TRUNCATED, "train.on_alarm=stop")
    assert {finding.severity for finding in diagnose(tmp_path)} == {"warning"}
    assert len(read_metrics(tmp_path)) == 7


def test_job_prints_findings_with_steps_cause_example_and_setting(tmp_path: Path) -> None:
    run_quickstart(tmp_path, *TRUNCATED)
    done = call_script("grpo.py", "run=diagnostics", f"run_dir={tmp_path}", f"hydra.run.dir={tmp_path}/unused")
    assert done.returncode == 0 and done.stderr == ""
    first, *paragraphs = done.stdout.rstrip().split("\n\n")
    assert "rules over 7 optimizer steps and 0 evaluations" in first
    (truncation,) = [text for text in paragraphs if text.startswith("warning: truncation, optimizer steps 5 to 7\n")]
    share = read_metrics(tmp_path)[4]["length/truncated"]
    assert f"\n  length/truncated is {share:.3g} at optimizer step 5 (above 0.1 in 5 rows)\n" in truncation
    assert "\n  for example: group " in truncation and "(length, reward " in truncation
    assert truncation.endswith(
        "remedy: raise inference_model.max_tokens, for episodes env.max_episode_tokens, or request shorter answers"
    )
    assert not (tmp_path / "unused").exists()


def test_episodes_illustrate_their_findings(tmp_path: Path) -> None:
    """The failed environment is shown by its error, and the cut episode by its text."""
    run = write_run_folder(tmp_path / "run", RunSpec(steps=8, evaluate=0, episodes=True))
    paragraphs = {text.split()[1].strip(","): text for text in format_diagnosis(run).split("\n\n")[1:]}
    failed = paragraphs["environment_errors"]
    assert "KeyError: 'board'" in failed and "(error, reward 0)" in failed
    assert "'40 41' (deadline, reward 0" in paragraphs["episode_deadline"]
    assert "'I multiply. mul 84'" in paragraphs["malformed_calls"]


def test_running_run_without_a_problem(tmp_path: Path) -> None:
    """Diagnoses a folder with a partial last row, no ledger and no summary."""
    run_quickstart(tmp_path, "env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=48", "logging.rollouts_gb=0")
    (tmp_path / "summary.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"optimizer_step": 4, "reward/me')
    assert format_diagnosis(tmp_path).startswith("no findings: ")
    assert "rules over 3 optimizer steps and 0 evaluations" in format_diagnosis(tmp_path)


def test_error_names_a_folder_without_a_run(tmp_path: Path) -> None:
    done = call_script("grpo.py", "run=diagnostics", f"run_dir={tmp_path}", f"hydra.run.dir={tmp_path}/unused")
    assert done.returncode == 2 and f"run_dir={tmp_path}: not the folder of a run" in done.stderr
    with pytest.raises(ConfigError, match="the folder has no settings of a run"):
        diagnose(tmp_path)
