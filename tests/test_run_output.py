"""Checks that a run prints only its own lines, without output of libraries."""

import json
from pathlib import Path

import pytest

from tests.run_output import EVALUATION, SMALL_RUN, check_no_foreign_lines
from tests.script_runner import run_script
from torchgrpo.plan.machine import installed_vllm

TWO_ENGINES = ("inference_model.num_devices=2", "ray.enabled=true")
VLLM = ("ray.enabled=true", "inference_model.backend=vllm")
needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        pytest.param("grpo.py", (), id="quickstart"),
        pytest.param("grpo.py", ("run=eval", EVALUATION), id="evaluation", marks=pytest.mark.long),
        pytest.param("grpo_async.py", TWO_ENGINES, id="two engines", marks=pytest.mark.long),
        pytest.param("grpo_async.py", VLLM, id="vLLM", marks=[pytest.mark.long, needs_vllm]),
        pytest.param("grpo.py", ("train_model.num_devices=2",), id="two ranks", marks=pytest.mark.long),
    ],
)
def test_a_run_prints_no_foreign_lines(script: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The output includes that of the imports of torch, Ray and vLLM."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    local_rows = ("env.dataset=jsonl", f"env.data_files={data}")
    process = run_script(script, tmp_path / "run", *SMALL_RUN, *local_rows, *overrides)
    assert process.returncode == 0, process.output
    check_no_foreign_lines(process.output)


def test_a_plan_prints_only_the_plan(tmp_path: Path) -> None:
    process = run_script("grpo.py", tmp_path / "run", "run=plan")
    assert process.returncode == 0, process.output
    assert process.output.startswith("machine:\n")
    assert "arning" not in process.output
