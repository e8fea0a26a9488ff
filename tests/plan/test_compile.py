"""Tests that a plan rejects compilation without compilers before anything is loaded."""

import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.machine import missing_for_kernels, missing_to_compile
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.problems import find_problems

COMPILE = "train.compile=true"


def problem_texts(*overrides: str, is_overlapped: bool = False, missing: tuple[str, ...] = ()) -> list[str]:
    config = config_of("grpo_quickstart", COMPILE, *overrides)
    planned_machine = machine(0, missing_to_compile=missing)
    return [problem.text for problem in find_problems(make_plan(config, is_overlapped, planned_machine))]


def test_without_a_compiler_one_message_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    missing = tuple(missing_to_compile())
    assert missing == ("the C++ compiler no-such-compiler", "Python's header Python.h")
    (text,) = problem_texts(missing=missing)
    assert text.startswith("train.compile=true: torch.compile does not find the C++ compiler no-such-compiler and")
    assert "apt install g++ python3-dev" in text and "CXX" in text
    assert problem_texts("train.compile=false", missing=missing) == []


def test_an_engine_that_disables_compiled_code_is_refused_in_the_learners_process() -> None:
    vllm = "inference_model.backend=vllm"
    (text,) = problem_texts(vllm, is_overlapped=True)
    assert "switches compiled code off" in text and "ray.enabled=true" in text
    for overrides in ((vllm, "ray.enabled=true"), (vllm, "inference_model.enforce_eager=false"), ()):
        assert problem_texts(*overrides, is_overlapped=True) == []
    assert problem_texts(vllm) == []


def triton_problem_texts(*overrides: str, missing: tuple[str, ...]) -> list[str]:
    config = config_of("grpo_gsm8k", "train_model.num_devices=1", *overrides)
    plan = make_plan(config, False, machine(2, 80, missing_for_kernels=missing))
    return [problem.text for problem in find_problems(plan) if "Triton" in problem.text]


def test_kernels_of_a_gpu_need_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Container images may have CUDA's libraries but no compiler."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    missing = tuple(missing_for_kernels())
    assert missing == ("the C compiler gcc", "Python's header Python.h")
    (text,) = triton_problem_texts(missing=missing)
    assert text.startswith("vLLM and train.packing=true on a GPU: Triton")
    assert "apt install gcc python3-dev" in text and "CC" in text
    assert triton_problem_texts(missing=()) == []
    plain = ("train.packing=false", "inference_model.backend=transformers")
    assert triton_problem_texts(*plain, missing=missing) == []
    config = config_of("grpo_quickstart")
    assert not find_problems(make_plan(config, False, machine(0, missing_for_kernels=missing))), (
        "on a CPU nothing is compiled"
    )


@pytest.mark.parametrize(
    ("variable", "find_missing_tools", "name"),
    [("CXX", missing_to_compile, "C++ compiler"), ("CC", missing_for_kernels, "C compiler")],
)
def test_a_compiler_is_found_by_its_environment_variable(
    variable: str,
    find_missing_tools: Callable[[], Iterable[str]],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = tmp_path / "mine"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv(variable, str(compiler))
    assert list(find_missing_tools()) == []
    monkeypatch.setenv(variable, "no-such-compiler")
    assert list(find_missing_tools()) == [f"the {name} no-such-compiler"]
