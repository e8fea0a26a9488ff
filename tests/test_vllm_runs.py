"""Runs of both scripts with the CPU build of vLLM in float32."""

from pathlib import Path
from typing import Any

import pytest

import grpo
from tests.script_runner import compose_run_config, read_metrics, run_script, start_script, wait_for_output
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun

pytestmark = [pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")]
SMALL = ("env.num_envs=8", "env.repeats=8", "train.total_dialog_turns=192", "inference_model.backend=vllm")
ADAPTER = ("train_model.lora.enabled=true", "inference_model.lora=adapter", "optimizer.lr=1e-2")
TWO_ENGINES = ("inference_model.num_devices=2", "ray.enabled=true", "train.max_policy_age=1")


@pytest.mark.parametrize("more", [(), ADAPTER], ids=["full weights", "adapter"])
@pytest.mark.long
def test_three_iterations_in_one_process(more: tuple[str, ...], tmp_path: Path) -> None:
    run_job(compose_run_config(*SMALL, *more), tmp_path, grpo.train, LockstepRun)
    metrics = read_metrics(tmp_path)
    check_metrics(metrics)
    assert all(row["logprob_diff/max"] < 1e-3 for row in metrics)


@pytest.mark.long
def test_three_iterations_with_two_ray_engines_overlapped(tmp_path: Path) -> None:
    process = start_script("grpo_async.py", tmp_path, *SMALL, *TWO_ENGINES)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    check_metrics(read_metrics(tmp_path))
    check_engine_log(tmp_path, output)


@pytest.mark.long
def test_three_iterations_overlapped_in_one_process(tmp_path: Path) -> None:
    """The learner leaves some of the process's threads to the engine."""
    two_threads = ("env", "OMP_NUM_THREADS=2")
    process = start_script("grpo_async.py", tmp_path, *SMALL, "train.max_policy_age=1", enter=two_threads)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    check_metrics(read_metrics(tmp_path))
    check_engine_log(tmp_path, output)


def check_metrics(metrics: list[dict[str, Any]]) -> None:
    assert [row["policy_version"] for row in metrics] == [0.0, 1.0, 2.0]
    assert 0 < max(row["weight_check/max"] for row in metrics if "weight_check/max" in row) < 1e-3
    for row in metrics:
        assert row["grad_norm"] > 0
        assert row["length/response_mean"] > 1


VLLM_WORDS = ("INFO", "WARNING", "FutureWarning", "NUMA", "safetensors", "Triton")


def check_engine_log(run_dir: Path, output: str) -> None:
    """Checks that the output of vLLM is in engine.log and not in the run's output."""
    engine_log = (run_dir / "engine.log").read_text()
    assert any(word in engine_log for word in VLLM_WORDS), engine_log
    for line in engine_log.splitlines():
        assert not line.strip() or line not in output, line
    for word in VLLM_WORDS:
        assert word not in output, output


def test_an_error_at_the_start_of_vllm_reaches_the_user(tmp_path: Path) -> None:
    process = run_script("grpo.py", tmp_path / "run", *SMALL, "inference_model.quantization=nonsense")
    assert process.returncode == 2, process.output
    assert process.output.count("error: ") == 1
    assert "vLLM could not start" in process.output
    assert "nonsense" in process.output
