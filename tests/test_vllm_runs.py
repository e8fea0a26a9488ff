"""The scripts on the real vLLM (its CPU build) in float32: in process, with an adapter, and as Ray actors."""

from pathlib import Path
from typing import Any

import pytest

import grpo
from grpo_utils import run
from plan.machine import installed_vllm
from tests.scripts import configured, finish, rows, start

pytestmark = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
SMALL = ("env.num_envs=8", "env.repeats=8", "train.total_dialog_turns=192", "inference_model.backend=vllm")
ADAPTER = ("train_model.lora.enabled=true", "inference_model.lora=adapter", "optimizer.lr=1e-2")
TWO_ENGINES = ("inference_model.num_devices=2", "ray.enabled=true", "train.max_policy_age=1")


@pytest.mark.parametrize("more", [(), ADAPTER], ids=["full weights", "adapter"])
def test_three_iterations_in_one_process(more: tuple[str, ...], tmp_path: Path) -> None:
    run(configured(*SMALL, *more), tmp_path, grpo.train)
    metrics = rows(tmp_path)
    check(metrics)
    assert all(row["mismatch/max"] < 1e-3 for row in metrics)


def test_three_iterations_with_two_ray_engines_overlapped(tmp_path: Path) -> None:
    """As a user starts it."""
    process = start("grpo_async.py", tmp_path, *SMALL, *TWO_ENGINES)
    output = finish(process)
    assert process.returncode == 0, output
    check(rows(tmp_path))


def check(metrics: list[dict[str, Any]]) -> None:
    assert [row["policy_version"] for row in metrics] == [0.0, 1.0, 2.0]
    for row in metrics:
        assert row["canary/max_abs_diff"] < 1e-3
        assert row["grad_norm"] > 0
        assert row["length/response_mean"] > 1
