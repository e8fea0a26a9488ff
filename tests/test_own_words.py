"""All that a run prints are lines of its own: none of a library, and no warning that nobody can act on."""

import json
import re
from pathlib import Path

import pytest

from plan.machine import installed_vllm
from tests.scripts import Script, finish, start, start_fresh

OWN = [
    r"(starting|reading data|starting engines|loading the model|push)",
    r"(step \d+/\d+, )?(reward \d\.\d{3}, length \d+\.\d, )?\d\d:\d\d so far(, \d\d:\d\d left)?(, \w+( \w+)?"
    r"( \d+/\d+)?)?(, \d\d:\d\d to go)?",
    r"sample at step \d+",
    r"eval \w+ \d+/\d+(, \d\d:\d\d to go)?",
    r"  .+",  # of a sample, of a table, of a worry
    r"\w+: \d+ problems, \d+ completions each",
    r"finished: .*",
    r"model: .*|to evaluate it:",
]
SMALL = (
    *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32"),
    *("logging.progress=true", "logging.sample_frequency=1"),
)
EVALUATION = "eval.sets={sums: {dataset: arithmetic, n: 2, limit: 8}}"
LORA = "train_model.lora.enabled=true"
VLLM = "inference_model.backend=vllm"
TWO_ENGINES = ("inference_model.num_devices=2", "ray.enabled=true")
NEEDS_VLLM = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")


def check_every_line_is_ours(process: Script) -> None:
    output = finish(process)
    assert process.returncode == 0, output
    own = re.compile("|".join(OWN))
    foreign = [line for line in output.splitlines() if not own.fullmatch(line)]
    assert foreign == []
    assert "arning" not in output and "\x1b" not in output and "\r" not in output


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        pytest.param("grpo.py", (EVALUATION, LORA, "logging.backend=tensorboard"), id="one process"),
        pytest.param("grpo.py", (VLLM, LORA, "inference_model.lora=adapter"), id="vllm", marks=NEEDS_VLLM),
        pytest.param("grpo_async.py", (VLLM, "ray.enabled=true"), id="vllm in Ray", marks=NEEDS_VLLM),
    ],
)
def test_every_line_of_a_new_interpreter_is_ours(
    script: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """What imports say, too: those of torch, of Ray, of vLLM in a run's own process and in Ray's."""
    check_every_line_is_ours(start_fresh(script, tmp_path / "run", *SMALL, *overrides))


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
    check_every_line_is_ours(start(script, tmp_path / "run", *SMALL, *overrides))


def test_rows_of_a_file_come_without_a_bar(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_every_line_is_ours(
        start("grpo.py", tmp_path / "run", *SMALL, "env.dataset=jsonl", f"env.data_files={data}")
    )


def test_a_plan_is_all_that_a_plan_prints(tmp_path: Path) -> None:
    process = start_fresh("grpo.py", tmp_path / "run", "run=plan")
    output = finish(process)
    assert process.returncode == 0, output
    assert output.startswith("machine:\n")
    assert "arning" not in output
