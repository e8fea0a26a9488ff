"""All that a run prints are lines of its own: none of a library, and no warning that nobody can act on."""

import json
from pathlib import Path

import pytest

from tests.own_words import EVALUATION, SMALL, check_every_line_is_ours
from tests.scripts import ran
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
def test_every_line_is_ours(script: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Imports of torch, Ray and vLLM say nothing either."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_a_file = ("env.dataset=jsonl", f"env.data_files={data}")
    process = ran(script, tmp_path / "run", *SMALL, *of_a_file, *overrides)
    assert process.returncode == 0, process.output
    check_every_line_is_ours(process.output)


def test_a_plan_is_all_that_a_plan_prints(tmp_path: Path) -> None:
    process = ran("grpo.py", tmp_path / "run", "run=plan")
    assert process.returncode == 0, process.output
    assert process.output.startswith("machine:\n")
    assert "arning" not in process.output
