"""Tests that a run without any gradient fails with the reason."""

import json
import time
from pathlib import Path

import pytest

import grpo
from config.schema.errors import RunError
from tests.script_runner import compose_run_config, read_metrics, run_script
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun

SMALL = ("env.num_envs=4", "env.repeats=4", "train.checkpoint_frequency=0")
TRUNCATED = (*SMALL, "inference_model.max_tokens=1")


def test_an_alarm_comes_after_five_steps_and_the_exit_code_is_2(tmp_path: Path) -> None:
    output = run_script("grpo.py", tmp_path, *TRUNCATED, "train.total_dialog_turns=128").output
    reason = (
        "All 4 groups had equal rewards (mean 0.00), 100% of the completions were truncated at 1 tokens. "
        "Remedy: raise inference_model.max_tokens; "
    )
    assert output.count(f"alarm: optimizer steps 1 to 5 had no gradient from rewards or a teacher. {reason}") == 1
    assert (
        f"error: nothing was learned: none of 8 optimizer steps had a gradient that came from rewards. {reason}"
        in output
    )
    assert "Traceback" not in output
    log = (tmp_path / "grpo.log").read_text()
    assert "alarm: optimizer steps 1 to 5 had no gradient" in log and "failed: 8 optimizer steps" in log
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"
    assert len(read_metrics(tmp_path)) == 8 and list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("env.reward=tests.rewards:never_right",), r"All 4 groups had equal rewards \(mean 0\.00\)"),
        (
            ("env.reward=tests.rewards:never_a_number", "env.max_error_rate=1.0"),
            "100% of the completions could not be scored",
        ),
        (
            ("policy=dapo", "policy.filter_attempts=1", "policy.filter_range=[0.98,0.99]"),
            "no completion was in the loss",
        ),
        (("policy.kl_coef=1.0", "env.reward=tests.rewards:never_right"), "equal rewards"),
    ],
)
def test_every_way_to_learn_nothing(more: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    config = compose_run_config(*SMALL, "train.total_dialog_turns=32", *more)
    with pytest.raises(RunError, match=f"(?i)nothing was learned: none of 2 optimizer steps.*{reason}"):
        run_job(config, tmp_path, grpo.train, LockstepRun)


def test_the_overlapped_schedule_raises_the_alarm_too(tmp_path: Path) -> None:
    ended = run_script("grpo_async.py", tmp_path, *TRUNCATED, "train.total_dialog_turns=96")
    assert ended.returncode == 1
    assert "alarm: optimizer steps 1 to 5 had no gradient" in ended.output
    assert "error: nothing was learned: none of 6 optimizer steps" in ended.output


def test_an_interrupted_run_is_not_blamed(tmp_path: Path) -> None:
    def stop_and_train(working: LockstepRun) -> None:
        working.stop.is_requested = True
        grpo.train(working)

    config = compose_run_config(*TRUNCATED, "train.total_dialog_turns=64")
    assert run_job(config, tmp_path, stop_and_train, LockstepRun) == "interrupted"


def test_a_resumed_run_is_judged_by_all_of_its_steps(tmp_path: Path) -> None:
    """A resumed run does not fail if its first part had a gradient."""
    first = compose_run_config(*SMALL, "train.total_dialog_turns=32")
    run_job(first, tmp_path, grpo.train, LockstepRun)
    checkpoint = next(tmp_path.glob("checkpoints/*"))
    again = compose_run_config(*TRUNCATED, "train.total_dialog_turns=64", f"train.resume={checkpoint}")
    assert run_job(again, tmp_path, grpo.train, LockstepRun) == "finished"
    assert [row["optimizer_step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert read_metrics(tmp_path)[2]["reward/zero_variance_groups"] == 1.0


def test_elapsed_time_and_tokens_go_on_where_a_run_is_resumed(tmp_path: Path) -> None:
    began = time.time()
    run_job(compose_run_config(*SMALL, "train.total_dialog_turns=32"), tmp_path, grpo.train, LockstepRun)
    checkpoint = next(tmp_path.glob("checkpoints/*"))
    again = compose_run_config(*SMALL, "train.total_dialog_turns=48", f"train.resume={checkpoint}")
    run_job(again, tmp_path, grpo.train, LockstepRun)
    metrics = read_metrics(tmp_path)
    lengths = [16 * row["length/response_mean"] for row in metrics]
    assert [row["tokens/total"] for row in metrics] == [sum(lengths[: i + 1]) for i in range(3)]
    elapsed = [row["time/elapsed_s"] for row in metrics]
    assert elapsed == sorted(elapsed) and elapsed[2] > elapsed[1] > 0
    written = [row["time/unix_s"] for row in metrics]
    assert began <= written[0] <= written[1] <= written[2] <= time.time()
