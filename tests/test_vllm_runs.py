"""The scripts on the real vLLM (its CPU build), as a user starts them: in process, as Ray actors, with an adapter."""

import json
from pathlib import Path
from typing import Any

import pytest

from plan.machine import installed_vllm
from tests.scripts import finish, start

pytestmark = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
SMALL = ("env.num_envs=8", "env.repeats=8", "train.total_dialog_turns=192", "inference_model.backend=vllm")
ADAPTER = ("train_model.lora.enabled=true", "inference_model.lora=adapter", "optimizer.lr=1e-2")
TWO_ENGINES = ("inference_model.num_devices=2", "ray.enabled=true", "train.max_policy_age=1")


@pytest.mark.parametrize(
    ("script", "more"),
    [("grpo.py", ()), ("grpo.py", ADAPTER), ("grpo_async.py", TWO_ENGINES)],
    ids=["in process", "adapter", "two Ray engines, overlapped"],
)
def test_three_iterations_with_weights_that_arrive(
    script: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    process = start(script, tmp_path, *SMALL, *more)
    output = finish(process)
    assert process.returncode == 0, output
    metrics = rows(tmp_path)
    assert [row["policy_version"] for row in metrics] == [0.0, 1.0, 2.0]
    for row in metrics:
        assert row["canary/max_abs_diff"] < 1e-3
        assert row["mismatch/max"] < 1e-3 or script == "grpo_async.py"
        assert row["grad_norm"] > 0
        assert row["length/response_mean"] > 1


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
