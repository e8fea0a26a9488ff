"""Tests problems of scorers: messages name the user's settings, and remedies work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.schema.errors import ConfigError
from tests.plan.test_plan import config_of
from tests.plan.test_scorers import FLOAT32, LARGE, MIDDLE, SMALL, plan_of, ranks
from torchgrpo.plan.host_memory import host_uses
from torchgrpo.plan.known_models import KNOWN_MODELS
from torchgrpo.plan.log_prob_bounds import BOUNDS
from torchgrpo.plan.plan import Plan, scorer_phase
from torchgrpo.plan.plan_report import format_plan, with_original_names
from torchgrpo.plan.problems import find_problems, plan_with_problems
from torchgrpo.plan.remedies import find_remedy

CLUSTER: dict[str, Any] = {"nodes": 4, "is_hypothetical": True}
EXACT = (f"ref_model.name={LARGE}", *FLOAT32)


def problem_text(plan: Plan) -> str:
    (problem,) = find_problems(plan)
    return problem.text


def advised_settings(plan: Plan) -> list[str]:
    return [*map(str, find_remedy(plan, plan.machine) or ())]


def test_float16_has_no_shards() -> None:
    half = (*ranks(1, 2, 1), f"ref_model.name={MIDDLE}", "train.mixed_precision=fp16")
    assert find_problems(plan_of(*half, gpus=4)) == []
    with_shard_size = plan_of(*half, "ref_model.shard_size=2", gpus=4)
    assert problem_text(with_shard_size) == (
        "train.mixed_precision=fp16 with ref_model.shard_size=2: the shards of a frozen model are float32 or bfloat16; "
        "set train.mixed_precision=bf16, or ref_model.shard_size=1"
    )
    assert advised_settings(with_shard_size) == ["ref_model.shard_size=null"]
    automatic = plan_of(*half, "ref_model.dtype=bfloat16", gpus=4, memory=24.0)
    assert automatic.reference.shard_size == 2
    assert "ref_model.num_devices=2 (2 GPUs share a copy, which is too large for one GPU)" in problem_text(automatic)
    assert advised_settings(automatic) == ["train.mixed_precision=bf16"]


def test_an_automatic_copy_is_on_one_node() -> None:
    overrides = (*ranks(1, 8, 1), *EXACT)
    plan = plan_of(*overrides, gpus=4, memory=24.0, **CLUSTER)
    assert plan.reference.shard_size == 4
    text = problem_text(plan)
    assert f"ref_model.name={LARGE} with ref_model.num_devices=8: each scorer GPU needs" in text
    assert "shard_size" not in text and "; set ref_model.dtype=bfloat16, or choose a smaller model" in text
    joined = plan_of(*ranks(2, 2, 1), "device=cuda", gpus=0, **CLUSTER)
    assert joined.reference.shard_size == 1, "the GPUs of the nodes are unknown"


@pytest.mark.parametrize(
    ("overrides", "setting", "advice"),
    [
        (("ref_model.devices=[2]",), "ref_model.devices=[2]", "list more GPUs in ref_model.devices"),
        (("ref_model.num_devices=1",), "ref_model.num_devices=1", "raise ref_model.num_devices"),
        ((), "ref_model.num_devices unset", "give ref_model.num_devices=2 or more"),
    ],
)
def test_messages_name_the_device_setting_of_the_user(overrides: tuple[str, ...], setting: str, advice: str) -> None:
    plan = plan_of(*ranks(1, None, 1), *overrides, *EXACT, gpus=3)
    assert f" with {setting}: each scorer GPU needs" in problem_text(plan)
    assert f"are usable; {advice}, over which a copy is sharded, " in problem_text(plan)


def test_messages_name_device_lists() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train_model.num_devices=1, ref_model.devices=\[1, 2\], inference_model.num_devices=2: 5 GPUs.*"
        r"leave ref_model.devices unset",
    ):
        plan_of(*ranks(1, None, 2), "ref_model.devices=[1,2]", gpus=3)
    quantized = ("train_model.lora.enabled=true", "train_model.lora.quantization=nf4", "ref_model.devices=[1]")
    with pytest.raises(ConfigError, match=r"nf4 with ref_model.devices=\[1\]: the reference is the 4-bit base"):
        plan_of(*quantized, gpus=4)


def test_a_frozen_model_is_checked_by_its_own_dtype_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = {**KNOWN_MODELS[MIDDLE], "model_type": "mistral", "sliding_window": 64}
    monkeypatch.setitem(KNOWN_MODELS, "nobody/windowed", windowed)
    whole = (*FLOAT32, "ref_model.name=nobody/windowed")
    plan = plan_of(*ranks(1, 1, 1), *whole, "ref_model.dtype=bfloat16", gpus=3)
    assert plan.reference.bounds == BOUNDS["bfloat16"] and plan.weight_check.learner == BOUNDS["float32"]
    assert (plan.reference.prompts, plan.weight_check.prompts) == ((8, 12, 68), (8, 12))
    half = plan_of(*ranks(1, 2, 1), "model.dtype=float32", "train.mixed_precision=fp16", gpus=5)
    assert half.reference.bounds == BOUNDS["float16"]


def test_the_reference_scores_no_evaluation() -> None:
    """Only engines need room for the longest response of an evaluation."""
    sets = "eval.sets={test:{dataset:gsm8k,max_tokens:40000}}"
    config = (*ranks(1, 1, 1), f"ref_model.name={SMALL}", f"model.name={LARGE}", sets)
    lines = [problem.line for problem in find_problems(plan_of(*config, gpus=3, memory=4096.0))]
    assert "ref_model" not in lines and "a sequence" in lines


def test_advised_settings_are_valid(tmp_path: Path) -> None:
    """The objective here is the KL term alone, so the advice must keep the term."""
    coefficients = {"reward_coef": 0.0, "distill_coef": 0.0, "kl_coef": 0.1}
    overrides = [f"policy.{key}={value}" for key, value in coefficients.items()]
    plan = plan_of(*ranks(1, None, 1), *EXACT, *overrides, gpus=2, memory=24.0)
    assert find_problems(plan) and "policy.kl_coef=0.0" not in advised_settings(plan)
    with pytest.raises(ConfigError):
        config_of("grpo_gsm8k", *overrides, "policy.kl_coef=0.0")


@pytest.mark.parametrize(
    ("overrides", "gpus", "line"),
    [
        (ranks(2, 2, 2), 4, "ref_model"),
        (ranks(2, 2, 2), 3, "engine 1"),
        (ranks(2, None, 1), 1, "train_model"),
        (("ref_model.devices=[0,5]",), 4, "ref_model"),
    ],
)
def test_the_line_of_missing_devices_is_marked(
    overrides: tuple[str, ...], gpus: int, line: str, tmp_path: Path
) -> None:
    whole = plan_of(*overrides, gpus=8)
    _, problems = plan_with_problems(whole.config, False, replace(whole.machine, num_gpus=gpus), tmp_path)
    assert [problem.line for problem in problems] == [line]


def test_the_report_calls_a_teacher_a_teacher() -> None:
    """The report never advises to remove a teacher, since that would change the objective."""
    teacher = ("policy=opd", f"ref_model.name={MIDDLE}", "train_model.num_devices=1")
    sharing = plan_of(*teacher, gpus=2)
    text = format_plan(sharing, [])
    assert f"ref_model        training GPU; the teacher; {MIDDLE}, bfloat16" in text
    assert "  teacher  [ref_model.num_devices, ref_model.dtype, ref_model.name]" in text
    assert "reference  [" not in text and "policy.kl_coef]" not in text
    own = scorer_phase(plan_of(*teacher, gpus=3))
    assert own is not None and own.uses[0].name == "weights of the teacher"
    visiting = plan_of(*teacher, gpus=1)
    assert visiting.shape is not None
    assert "teacher in host memory" in [use.name for use in host_uses(visiting, visiting.shape)]
    with_prompt = plan_of("policy=opsd", "train_model.num_devices=1", gpus=2)
    assert "training GPU; the teacher, which sees policy.teacher_prompt\n" in format_plan(with_prompt, [])


def test_the_report_names_the_run_of_a_model() -> None:
    plan = plan_of(*ranks(1, 1, 1), f"ref_model.name={MIDDLE}", gpus=3)
    original_config = config_of("grpo_gsm8k", "model.name=outputs/one", "ref_model.name=outputs/two")
    named_plan = with_original_names(plan, original_config)
    assert f"Ray actor; outputs/two (of {MIDDLE}), bfloat16" in format_plan(named_plan, [])
    assert named_plan.config.model.name == f"outputs/one (of {SMALL})"
    assert with_original_names(plan, plan.config) == plan
