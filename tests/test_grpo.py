"""Tests the lockstep script end to end: metrics, files, kills, Ctrl-C."""

import json
import random
import signal
from pathlib import Path

import psutil
import pytest
import torch

import grpo
from config.run_folder.checkpoints import checkpoint_path
from tests.processes import is_alive
from tests.recorded_runs import assert_same_run
from tests.script_runner import (
    QUICK,
    ROOT,
    call_script,
    compose_run_config,
    read_metrics,
    start_script,
    wait_for_output,
    wait_until,
)
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.build_run import build_run
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.checkpoint import load_checkpoint

SMALL = ("env.num_envs=4", "env.repeats=4")
METRICS_BY_GROUP = {
    "reward": "mean std accuracy zero_variance_groups",
    "advantage": "mean std",
    "kl": "ref inference",
    "length": "response_mean response_max truncated",
    "loss": "objective kl entropy clip_fraction_low clip_fraction_high",
    "time": "collect_s optimize_s push_s",
    "throughput": "tokens_per_s completions_per_s",
}
METRICS = {"ess", "entropy", "grad_norm", "lr", "policy_version"}


def test_a_short_run_logs_every_metric_and_leaves_checkpoints(tmp_path: Path) -> None:
    config = compose_run_config(*SMALL, "train.total_dialog_turns=64", "train.checkpoint_frequency=2", "train.epochs=2")
    run_job(config, tmp_path, grpo.train, LockstepRun)
    metrics = read_metrics(tmp_path)
    assert [row["optimizer_step"] for row in metrics] == list(range(1, 9))
    named = {f"{group}/{name}" for group, names in METRICS_BY_GROUP.items() for name in names.split()}
    assert named | METRICS <= set(metrics[0])
    assert metrics[0]["kl/ref"] == pytest.approx(0.0, abs=1e-5)
    assert metrics[0]["ess"] == pytest.approx(1.0, abs=1e-4)
    assert [row["policy_version"] for row in metrics] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(row["age/max"] == 0 for row in metrics)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_000002", "checkpoint_000004"]
    assert '"outcome": "finished"' in (tmp_path / "summary.json").read_text()


def test_an_iteration_is_trained_on_in_steps_of_whole_groups(tmp_path: Path) -> None:
    """Every group is trained on once per epoch, two groups in each step.

    4 groups of 4 completions in an iteration, 8 completions in a step.
    """
    config = compose_run_config(*SMALL, "train.total_dialog_turns=32", "train.optim_batch_size=8", "train.epochs=2")
    group_ids: list[torch.Tensor] = []

    class GroupRecorder(LockstepRun):
        def learn(self, minibatch: Rollout) -> None:
            group_ids.append(minibatch.batch.group_id.view(2, 4))
            super().learn(minibatch)

    run_job(config, tmp_path, grpo.train, GroupRecorder)
    assert [row["optimizer_step"] for row in read_metrics(tmp_path)] == list(range(1, 9))
    epochs = torch.stack(group_ids).view(4, 4, 4)
    assert (epochs == epochs[..., :1]).all()
    assert [sorted(epoch[:, 0].tolist()) for epoch in epochs] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_without_kl_no_reference_is_loaded(tmp_path: Path) -> None:
    working = build_run(compose_run_config(*SMALL, "policy.kl_coef=0"), tmp_path, LockstepRun)
    assert working.learner.worker.reference is None
    working.close("finished")


def test_mixed_precision_lora_and_accumulation_run(tmp_path: Path) -> None:
    config = compose_run_config(
        *SMALL,
        "train.total_dialog_turns=32",
        "train.mixed_precision=bf16",
        "train_model.lora.enabled=true",
        "train.gradient_accumulation_steps=2",
    )
    run_job(config, tmp_path, grpo.train, LockstepRun)
    assert len(read_metrics(tmp_path)) == 2


def mean_rewards(tmp_path: Path, schedule: type[LockstepRun]) -> tuple[float, float]:
    """Returns mean rewards of the first and the last five of 30 quickstart iterations."""
    config = compose_run_config("train.total_dialog_turns=7680", "env.num_envs=32", "env.repeats=8")
    run_job(config, tmp_path, grpo.train, schedule)
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path)]
    return rewards[0], sum(rewards[-5:]) / 5


def test_reward_rises(tmp_path: Path) -> None:
    before, after = mean_rewards(tmp_path, LockstepRun)
    assert before <= 0.4
    assert after >= 0.75


@pytest.mark.long
def test_with_shuffled_rewards_it_does_not(tmp_path: Path) -> None:
    """With rewards permuted within every batch the reward does not rise."""
    chance = random.Random(0)

    class ShuffledRun(LockstepRun):
        def advantage(self, rollout: Rollout) -> None:
            rows = len(rollout.batch)
            rollout.batch.next = rollout.batch.next[chance.sample(range(rows), rows)]
            super().advantage(rollout)

    before, after = mean_rewards(tmp_path, ShuffledRun)
    assert after < before + 0.1


RESUME_SETTINGS = (*SMALL, "train.total_dialog_turns=160", "train.checkpoint_frequency=1", "train.keep_checkpoints=0")


def killed_run(folder: Path) -> Path:
    """Returns the folder of a run killed between its third and its last checkpoint."""
    for number in range(20):  # on a busy machine a run may end before the kill
        run_dir = folder / f"broken_{number}"
        killed = start_script("grpo.py", run_dir, *RESUME_SETTINGS)
        wait_until(checkpoint_path(run_dir, 3).exists, killed)
        killed.send_signal(signal.SIGKILL)
        if killed.wait() == -signal.SIGKILL and not checkpoint_path(run_dir, 10).exists():
            return run_dir
    raise AssertionError("every run ended before it was killed")


def test_killed_and_resumed_is_bit_identical_to_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted, resumed = tmp_path / "whole", killed_run(tmp_path)
    run_job(compose_run_config(*RESUME_SETTINGS), uninterrupted, grpo.train, LockstepRun)
    run_job(compose_run_config(*RESUME_SETTINGS, "train.resume=auto"), resumed, grpo.train, LockstepRun)
    assert "resumed from" in capsys.readouterr().err
    assert_same_run(resumed, uninterrupted, 10)


def test_a_full_disk_is_one_message_and_what_is_there_is_whole(tmp_path: Path) -> None:
    """A full disk gives one message, and complete files stay.

    The second checkpoint's tensors are a link to /dev/full, where every write fails for lack of space.
    """
    run_dir, script = tmp_path / "run", tmp_path / "with_a_full_disk.py"
    folder = run_dir / "checkpoints"
    script.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport torchgrpo.training.worker as learner\n"
        "write = learner.write_tensors\n"
        "def write_tensors(folder, tensors, group):\n"
        "    if '000002' in str(folder):\n"
        "        folder.mkdir()\n"
        "        os.symlink('/dev/full', folder / '__0_0.distcp')\n"
        "    write(folder, tensors)\n"
        "learner.write_tensors = write_tensors\n"
        "runpy.run_path('grpo.py', run_name='__main__')\n"
    )
    process = start_script(str(script), run_dir, *SMALL, "train.checkpoint_frequency=1")
    output = wait_for_output(process)
    assert process.returncode == 2, output
    assert f"error: {run_dir}: no space is left to write the run's folder" in output
    assert "Traceback" not in output
    assert [path.name for path in folder.iterdir()] == ["checkpoint_000001"]
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"


def test_ctrl_c_finishes_the_iteration_and_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    process = start_script(
        "grpo.py", tmp_path, *SMALL, "train.total_dialog_turns=1600000", "train.checkpoint_frequency=0"
    )
    wait_until(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert "interrupted" in output
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    done = load_checkpoint(checkpoint)["iteration"]
    assert read_metrics(tmp_path)[-1]["optimizer_step"] == done
    _, survivors = psutil.wait_procs(children, timeout=300)  # children end after their parent
    assert not [child for child in survivors if is_alive(child.pid)]


def test_under_lora_the_base_is_the_reference(tmp_path: Path) -> None:
    """Under LoRA the base model without adapter gives the reference log-probs."""
    from torchgrpo.training.reference_model import ReferenceModel

    working = build_run(compose_run_config(*SMALL, "train_model.lora.enabled=true"), tmp_path, LockstepRun)
    batch, learner = working.collect().batch, working.learner
    assert learner.worker.reference is not None
    (log_prob,) = learner.worker.reference.log_prob([batch])
    visit = learner.worker.scorer.model.disable_adapter
    (shared_log_prob,) = ReferenceModel(learner.worker.scorer, scoring_context=visit).log_prob([batch])
    torch.testing.assert_close(log_prob, shared_log_prob, atol=1e-6, rtol=0)
    working.close("finished")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config-name", "grpo_quickstart", "train.epoch=2"], "did you mean train.epochs"),
        (["--config-name", "grpo_quickstart", "+inference_model.min_pp=0.1"], "min_pp: no such configuration key"),
        (["--config-name", "grpo_quickstart", "env.repeats=1"], "policy.baseline=none"),
        (["--config-name", "grpo_quickstart", "env.dataset=nonsense"], "no such task; choose one of "),
        (["--config-name", "grpo_quickstart", "train.resume=nowhere"], "train.resume=nowhere: no such folder"),
        (["--config-name", "grpo_quickstart", "model.name=nowhere/at-all"], "local folder"),
        ([], "--config-name grpo_quickstart"),
    ],
)
def test_bad_input_is_one_message_and_nothing_half_written(arguments: list[str], expected: str, tmp_path: Path) -> None:
    result = call_script("grpo.py", *arguments, f"hydra.run.dir={tmp_path / 'run'}")
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert "Error executing job" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_multirun_sweeps(tmp_path: Path) -> None:
    command = [
        *("--config-name", "grpo_quickstart", "--multirun", f"hydra.sweep.dir={tmp_path}", *QUICK, *SMALL),
        *("optimizer.lr=1e-4,1e-5", "policy.kl_coef=0.01,0.1"),
        *("optimizer.warmup_steps=0", "train.total_dialog_turns=32"),
    ]
    result = call_script("grpo.py", *command)
    assert result.returncode == 0, result.stderr
    assert [read_metrics(tmp_path / str(job))[0]["lr"] for job in range(4)] == [1e-4, 1e-4, 1e-5, 1e-5]
    assert all((tmp_path / str(job) / ".hydra" / "config.yaml").exists() for job in range(4))
    assert len({read_metrics(tmp_path / str(job))[1]["loss/kl"] for job in range(4)}) == 4, "both keys reach the loss"
