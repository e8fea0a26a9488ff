"""The scripts on the real vLLM (its CPU build) in float32: in process, with an adapter, and as Ray actors."""

from pathlib import Path
from typing import Any

import pytest

import grpo
from tests.scripts import configured, finish, ran, rows, start
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep

pytestmark = [pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")]
SMALL = ("env.num_envs=8", "env.repeats=8", "train.total_dialog_turns=192", "inference_model.backend=vllm")
ADAPTER = ("train_model.lora.enabled=true", "inference_model.lora=adapter", "optimizer.lr=1e-2")
TWO_ENGINES = ("inference_model.num_devices=2", "ray.enabled=true", "train.max_policy_age=1")


@pytest.mark.parametrize("more", [(), ADAPTER], ids=["full weights", "adapter"])
@pytest.mark.long
def test_three_iterations_in_one_process(more: tuple[str, ...], tmp_path: Path) -> None:
    run_job(configured(*SMALL, *more), tmp_path, grpo.train, Lockstep)
    metrics = rows(tmp_path)
    check(metrics)
    assert all(row["mismatch/max"] < 1e-3 for row in metrics)


@pytest.mark.long
def test_three_iterations_with_two_ray_engines_overlapped(tmp_path: Path) -> None:
    process = start("grpo_async.py", tmp_path, *SMALL, *TWO_ENGINES)
    output = finish(process)
    assert process.returncode == 0, output
    check(rows(tmp_path))
    check_engine_log(tmp_path, output)


@pytest.mark.long
def test_three_iterations_overlapped_in_one_process(tmp_path: Path) -> None:
    """With the threads that a user's machine has: the learner leaves some of them to the engine."""
    two = ("env", "OMP_NUM_THREADS=2")
    process = start("grpo_async.py", tmp_path, *SMALL, "train.max_policy_age=1", enter=two)
    output = finish(process)
    assert process.returncode == 0, output
    check(rows(tmp_path))
    check_engine_log(tmp_path, output)


def check(metrics: list[dict[str, Any]]) -> None:
    assert [row["policy_version"] for row in metrics] == [0.0, 1.0, 2.0]
    assert 0 < max(row["weight_check/largest"] for row in metrics if "weight_check/largest" in row) < 1e-3
    for row in metrics:
        assert row["grad_norm"] > 0
        assert row["length/response_mean"] > 1


NOISE = ("INFO", "WARNING", "FutureWarning", "NUMA", "safetensors", "Triton")


def check_engine_log(run_dir: Path, output: str) -> None:
    """What vLLM prints as it starts is in a file, and not among the run's own lines."""
    printed = (run_dir / "engine.log").read_text()
    assert any(word in printed for word in NOISE), printed
    for line in printed.splitlines():
        assert not line.strip() or line not in output, line
    for word in NOISE:
        assert word not in output, output


def test_why_vllm_did_not_start_reaches_the_user(tmp_path: Path) -> None:
    process = ran("grpo.py", tmp_path / "run", *SMALL, "inference_model.quantization=nonsense")
    assert process.returncode == 2, process.output
    assert process.output.count("error: ") == 1
    assert "vLLM could not start" in process.output
    assert "nonsense" in process.output
