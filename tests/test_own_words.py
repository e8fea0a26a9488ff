"""All that a run prints are lines of its own: none of a library, and no warning that nobody can act on."""

import json
from pathlib import Path

import pytest

from plan.machine import installed_vllm
from tests.own_words import EVALUATION, SMALL, check_every_line_is_ours
from tests.scripts import Script, finish, start, start_fresh

TWO_ENGINES = ("inference_model.num_devices=2", "ray.enabled=true")


def check(process: Script) -> None:
    output = finish(process)
    assert process.returncode == 0, output
    check_every_line_is_ours(output)


@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
def test_every_line_of_new_interpreters_is_ours(tmp_path: Path) -> None:
    """What imports say, too: those of torch, of Ray, and in Ray of vLLM. tests/test_forked.py has runs without Ray."""
    process = start_fresh(
        "grpo_async.py", tmp_path / "run", *SMALL, "ray.enabled=true", "inference_model.backend=vllm"
    )
    check(process)


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        pytest.param("grpo.py", (), id="quickstart"),
        pytest.param("grpo.py", ("run=eval", EVALUATION), id="evaluation"),
        pytest.param("grpo_async.py", TWO_ENGINES, id="two engines"),
        pytest.param("grpo.py", ("train_model.num_devices=2",), id="two ranks"),
    ],
)
def test_every_line_after_the_imports_is_ours(
    script: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    check(start(script, tmp_path / "run", *SMALL, *overrides))


def test_rows_of_a_file_come_without_a_bar(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(start("grpo.py", tmp_path / "run", *SMALL, "env.dataset=jsonl", f"env.data_files={data}"))


def test_a_plan_is_all_that_a_plan_prints(tmp_path: Path) -> None:
    process = start_fresh("grpo.py", tmp_path / "run", "run=plan")
    output = finish(process)
    assert process.returncode == 0, output
    assert output.startswith("machine:\n")
    assert "arning" not in output
