"""Scorers that cannot work: messages name what was typed, and remedies help."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.schema.errors import ConfigError
from tests.plan.test_plan import config_of
from tests.plan.test_scorers import LARGE, MIDDLE, SMALL, plan_of, ranks
from torchgrpo.plan.host_memory import host_uses
from torchgrpo.plan.model_shape import KNOWN
from torchgrpo.plan.plan import Plan, scorer_phase
from torchgrpo.plan.plan_text import report, with_typed_names
from torchgrpo.plan.problems import planned, problems
from torchgrpo.plan.remedies import remedy
from torchgrpo.plan.weight_bounds import BOUNDS

CLUSTER: dict[str, Any] = {"nodes": 4, "imagined": True}
EXACT = (f"ref_model.name={LARGE}", "train.mixed_precision=fp32")


def told(plan: Plan) -> str:
    (problem,) = problems(plan)
    return problem.text


def advised(plan: Plan) -> list[str]:
    return [*map(str, remedy(plan, plan.machine) or ())]


def test_float16_has_no_shards() -> None:
    half = (*ranks(1, 2, 1), f"ref_model.name={MIDDLE}", "train.mixed_precision=fp16")
    assert problems(plan_of(*half, gpus=4)) == []
    typed = plan_of(*half, "ref_model.shard_size=2", gpus=4)
    assert told(typed) == (
        "train.mixed_precision=fp16 with ref_model.shard_size=2: the shards of a frozen model are float32 or bfloat16; "
        "take train.mixed_precision=bf16, or ref_model.shard_size=1"
    )
    assert advised(typed) == ["ref_model.shard_size=null"]
    chosen = plan_of(*half, "ref_model.dtype=bfloat16", gpus=4, memory=24.0)
    assert chosen.reference.shard_size == 2
    assert "ref_model.num_devices=2, of which 2 share a copy, for one does not hold it" in told(chosen)
    assert advised(chosen) == ["train.mixed_precision=bf16"]


def test_a_copy_that_nobody_split_lies_on_one_node() -> None:
    asked = (*ranks(1, 8, 1), *EXACT)
    plan = plan_of(*asked, gpus=4, memory=24.0, **CLUSTER)
    assert plan.reference.shard_size == 4
    said = told(plan)
    assert f"ref_model.name={LARGE} with ref_model.num_devices=8: each scorer GPU needs" in said
    assert "shard_size" not in said and "; take ref_model.dtype=bfloat16, or choose a smaller model" in said
    joined = plan_of(*ranks(2, 2, 1), "device=cuda", gpus=0, **CLUSTER)
    assert joined.reference.shard_size == 1, "of nodes whose GPUs are not said"


@pytest.mark.parametrize(
    ("asked", "typed", "more"),
    [
        (("ref_model.devices=[2]",), "ref_model.devices=[2]", "list more GPUs in ref_model.devices"),
        (("ref_model.num_devices=1",), "ref_model.num_devices=1", "raise ref_model.num_devices"),
        ((), "ref_model.num_devices unset", "give ref_model.num_devices=2 or more"),
    ],
)
def test_devices_are_told_as_they_were_typed(asked: tuple[str, ...], typed: str, more: str) -> None:
    plan = plan_of(*ranks(1, None, 1), *asked, *EXACT, gpus=3)
    assert f" with {typed}: each scorer GPU needs" in told(plan)
    assert f"planned with; {more}, over which a copy is sharded, " in told(plan)


def test_devices_by_hand_are_left_out_by_hand() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train_model.num_devices=1, ref_model.devices=\[1, 2\], inference_model.num_devices=2: 5 GPUs.*"
        r"leave ref_model.devices unset",
    ):
        plan_of(*ranks(1, None, 2), "ref_model.devices=[1,2]", gpus=3)
    quantized = (
        "train_model.lora.enabled=true",
        "train_model.lora.quantization=nf4",
        "ref_model.devices=[1]",
    )
    with pytest.raises(ConfigError, match=r"nf4 with ref_model.devices=\[1\]: the base"):
        plan_of(*quantized, gpus=4)


def test_a_frozen_model_is_checked_by_its_own_dtype_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = {**KNOWN[MIDDLE], "model_type": "mistral", "sliding_window": 64}
    monkeypatch.setitem(KNOWN, "nobody/windowed", windowed)
    whole = ("train.mixed_precision=fp32", "ref_model.name=nobody/windowed")
    plan = plan_of(*ranks(1, 1, 1), *whole, "ref_model.dtype=bfloat16", gpus=3)
    assert plan.reference.bounds == BOUNDS["bfloat16"] and plan.weight_check.learner == BOUNDS["float32"]
    assert (plan.reference.prompts, plan.weight_check.prompts) == ((8, 12, 68), (8, 12))
    half = plan_of(*ranks(1, 2, 1), "train.mixed_precision=fp16", gpus=5)
    assert half.reference.bounds == BOUNDS["float16"]


def test_the_reference_scores_no_evaluation() -> None:
    """Engines hold the longest response of an evaluation; its tokens are never scored."""
    sets = "eval.sets={test:{dataset:gsm8k,max_tokens:40000}}"
    config = (*ranks(1, 1, 1), f"ref_model.name={SMALL}", f"model.name={LARGE}", sets)
    lines = [problem.line for problem in problems(plan_of(*config, gpus=3, memory=4096.0))]
    assert "ref_model" not in lines and "a sequence" in lines


def test_advice_is_not_refused_when_it_is_typed(tmp_path: Path) -> None:
    """Without the KL term nothing would be left of this objective."""
    nothing = {"reward_coef": 0.0, "distill_coef": 0.0, "kl_coef": 0.1}
    asked = [f"policy.{key}={value}" for key, value in nothing.items()]
    plan = plan_of(*ranks(1, None, 1), *EXACT, *asked, gpus=2, memory=24.0)
    assert problems(plan) and "policy.kl_coef=0.0" not in advised(plan)
    with pytest.raises(ConfigError):
        config_of("grpo_gsm8k", *asked, "policy.kl_coef=0.0")


@pytest.mark.parametrize(
    ("asked", "gpus", "marked"),
    [
        (ranks(2, 2, 2), 4, "ref_model"),
        (ranks(2, 2, 2), 3, "engine 1"),
        (ranks(2, None, 1), 1, "train_model"),
        (("ref_model.devices=[0,5]",), 4, "ref_model"),
    ],
)
def test_the_line_that_goes_beyond_the_machine_is_marked(
    asked: tuple[str, ...], gpus: int, marked: str, tmp_path: Path
) -> None:
    whole = plan_of(*asked, gpus=8)
    _, found = planned(whole.config, False, replace(whole.machine, num_gpus=gpus), tmp_path)
    assert [problem.line for problem in found] == [marked]


def test_a_teacher_is_told_as_one() -> None:
    """Its plan never advises to do without: that would be another objective."""
    taught = ("policy=opd", f"ref_model.name={MIDDLE}", "train_model.num_devices=1")
    sharing = plan_of(*taught, gpus=2)
    text = report(sharing, [])
    assert f"ref_model        training GPU; the teacher; {MIDDLE}, float32" in text
    assert "  teacher  [ref_model.num_devices, ref_model.dtype, ref_model.name]" in text
    assert "reference  [" not in text and "policy.kl_coef]" not in text
    own = scorer_phase(plan_of(*taught, gpus=3))
    assert own is not None and own.uses[0].what == "weights of the teacher"
    visiting = plan_of(*taught, gpus=1)
    assert visiting.shape is not None
    assert "visiting teacher" in [use.what for use in host_uses(visiting, visiting.shape)]
    shown = plan_of("policy=opsd", "train_model.num_devices=1", gpus=2)
    assert "training GPU; the teacher, which sees policy.teacher_prompt\n" in report(shown, [])


def test_a_run_as_a_model_keeps_its_name_in_the_report() -> None:
    plan = plan_of(*ranks(1, 1, 1), f"ref_model.name={MIDDLE}", gpus=3)
    typed = config_of("grpo_gsm8k", "model.name=outputs/one", "ref_model.name=outputs/two")
    shown = with_typed_names(plan, typed)
    assert f"Ray actor; outputs/two (of {MIDDLE}), float32" in report(shown, [])
    assert shown.config.model.name == f"outputs/one (of {SMALL})"
    assert with_typed_names(plan, plan.config) == plan
