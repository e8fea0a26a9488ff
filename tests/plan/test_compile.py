"""`train.compile` is refused before anything is loaded where it could not work."""

import sysconfig
from pathlib import Path

import pytest

from plan.machine import missing_to_compile
from plan.plan import make_plan
from plan.problems import problems
from tests.plan.test_plan import config_of, machine

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


def test_a_compiler_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "mine"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(missing_to_compile()) == []


def test_an_engine_that_switches_compiled_code_off_is_no_neighbour() -> None:
    vllm = "inference_model.backend=vllm"
    (text,) = refused(vllm, overlapped=True)
    assert "switches compiled code off" in text and "ray.enabled=true" in text
    for ways in ((vllm, "ray.enabled=true"), (vllm, "inference_model.enforce_eager=false"), ()):
        assert refused(*ways, overlapped=True) == []
    assert refused(vllm) == []
