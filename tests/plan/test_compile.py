"""What is to be compiled is refused before anything is loaded where it could not be."""

import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.machine import missing_for_kernels, missing_to_compile
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.problems import problems

COMPILED = "train.compile=true"


def refused(*overrides: str, overlapped: bool = False, missing: tuple[str, ...] = ()) -> list[str]:
    config = config_of("grpo_quickstart", COMPILED, *overrides)
    there = machine(0, missing_to_compile=missing)
    return [problem.text for problem in problems(make_plan(config, overlapped, there))]


def test_without_a_compiler_one_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    missing = tuple(missing_to_compile())
    assert missing == ("the C++ compiler no-such-compiler", "Python's header Python.h")
    (text,) = refused(missing=missing)
    assert text.startswith(
        "train.compile=true: torch.compile does not find the C++ compiler no-such-compiler and"
    )
    assert "apt install g++ python3-dev" in text and "CXX" in text
    assert refused("train.compile=false", missing=missing) == []


def test_an_engine_that_switches_compiled_code_off_is_no_neighbour() -> None:
    vllm = "inference_model.backend=vllm"
    (text,) = refused(vllm, overlapped=True)
    assert "switches compiled code off" in text and "ray.enabled=true" in text
    for ways in ((vllm, "ray.enabled=true"), (vllm, "inference_model.enforce_eager=false"), ()):
        assert refused(*ways, overlapped=True) == []
    assert refused(vllm) == []


def refused_on_gpus(*overrides: str, missing: tuple[str, ...]) -> list[str]:
    config = config_of("grpo_gsm8k", "train_model.num_devices=1", *overrides)
    plan = make_plan(config, False, machine(2, 80, missing_for_kernels=missing))
    return [problem.text for problem in problems(plan) if "Triton" in problem.text]


def test_kernels_of_a_gpu_need_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image of containers that has CUDA's libraries and no compiler."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    missing = tuple(missing_for_kernels())
    assert missing == ("the C compiler gcc", "Python's header Python.h")
    (text,) = refused_on_gpus(missing=missing)
    assert text.startswith("vLLM and train.packing=true on a GPU: Triton")
    assert "apt install gcc python3-dev" in text and "CC" in text
    assert refused_on_gpus(missing=()) == []
    plain = ("train.packing=false", "inference_model.backend=transformers")
    assert refused_on_gpus(*plain, missing=missing) == []
    config = config_of("grpo_quickstart")
    assert not problems(make_plan(config, False, machine(0, missing_for_kernels=missing))), (
        "on a CPU nothing is compiled"
    )


@pytest.mark.parametrize(
    ("variable", "find", "name"),
    [("CXX", missing_to_compile, "C++ compiler"), ("CC", missing_for_kernels, "C compiler")],
)
def test_a_compiler_is_found_by_the_name_that_is_given(
    variable: str,
    find: Callable[[], Iterable[str]],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = tmp_path / "mine"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv(variable, str(compiler))
    assert list(find()) == []
    monkeypatch.setenv(variable, "no-such-compiler")
    assert list(find()) == [f"the {name} no-such-compiler"]
