"""Tests which layers a plan compiles and recomputes, and plans without compilers."""

import json
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from config.schema.errors import ConfigError
from tests.plan.test_plan import QWEN, config_of, machine
from torchgrpo.plan.machine import missing_for_kernels, missing_to_compile
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.plan_report import format_plan
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


def compile_plan(*overrides: str, gpus: int = 2, is_overlapped: bool = False, **fields: Any) -> Plan:
    config = config_of("grpo_gsm8k", "train_model.num_devices=1", "policy.kl_coef=0", *overrides)
    return make_plan(config, is_overlapped, machine(gpus, 80.0, **fields))


def compilation_notes(plan: Plan) -> list[str]:
    return [note for note in plan.notes if "decoder layers are not compiled" in note]


def test_layers_compile_by_default_on_gpus_alone() -> None:
    plan = compile_plan()
    assert plan.learner.compiles and plan.reference.compiles and not compilation_notes(plan)
    assert "compiled; recomputed activations" in format_plan(plan, [])
    assert not compile_plan("train.compile=false").learner.compiles
    for compiles, overrides in ((False, ()), (True, (COMPILE,))):
        assert make_plan(config_of("grpo_quickstart", *overrides), False, machine(0)).learner.compiles == compiles


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100},
        QWEN | {"use_sliding_window": True, "sliding_window": 64},
        QWEN | {"model_type": "qwen3_moe", "num_experts": 8},
    ],
    ids=["layers elsewhere", "windows", "experts"],
)
def test_other_layers_compile_only_if_configured(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    name = f"model.name={tmp_path}"
    plan = compile_plan(name)
    assert not plan.learner.compiles and plan.learner.recomputation == "full"
    (note,) = compilation_notes(plan)
    assert str(tmp_path) in note and "set train.compile=true to try" in note
    assert compile_plan(name, COMPILE).learner.compiles


def test_layers_do_not_compile_by_default_where_nothing_can() -> None:
    for missing in ("missing_to_compile", "missing_for_kernels"):
        plan = compile_plan(**{missing: ("the C++ compiler g++",)})
        (note,) = compilation_notes(plan)
        assert not plan.learner.compiles and "does not find the C++ compiler g++" in note
    quantized = compile_plan("train_model.lora.enabled=true", "train_model.lora.quantization=nf4")
    assert not quantized.learner.compiles and len(compilation_notes(quantized)) == 1


def test_a_gpu_recomputes_no_more_than_its_memory_requires() -> None:
    """Larger GPUs keep more activations; a configured value is kept."""

    def recomputation(gib: float, *overrides: str) -> str:
        config = config_of("grpo_gsm8k", "train_model.num_devices=1", "policy.kl_coef=0", *overrides)
        return make_plan(config, False, machine(2, gib)).learner.recomputation

    chosen = [recomputation(gib) for gib in (65.0, 110.0, 180.0)]
    assert chosen == ["full", "selective", "none"]
    assert recomputation(180.0, "train.gradient_checkpointing=true") == "full"
    assert recomputation(65.0, "train.gradient_checkpointing=false") == "none"
    assert recomputation(65.0, "train.gradient_checkpointing=selective") == "selective"
    assert make_plan(config_of("grpo_quickstart"), False, machine(0)).learner.recomputation == "none"
    with pytest.raises(ConfigError, match=r"train\.gradient_checkpointing='some': choose one of none"):
        config_of("grpo_quickstart", "train.gradient_checkpointing=some")


def test_ranks_that_share_a_microbatch_compile_only_if_configured() -> None:
    shared = ("train_model.num_devices=2", "train_model.context_parallel=2")
    config = config_of("grpo_gsm8k", *shared, "policy.kl_coef=0")
    plan = make_plan(config, False, machine(3, 80.0))
    assert not plan.learner.compiles
    (note,) = compilation_notes(plan)
    assert "share a microbatch" in note
    config = config_of("grpo_gsm8k", *shared, COMPILE)
    assert make_plan(config, False, machine(3, 80.0)).learner.compiles
