"""Tests `train_model.context_parallel` in plans: memory, microbatches, report, and models that do not allow it."""

import json
from pathlib import Path

import pytest

from tests.dry_run.test_tensor_tracker import TINY
from tests.plan.test_plan import config_of, gpu_plan, machine, text_of
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.microbatch_sizes import longest_microbatch, microbatch_tokens
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.problems import find_problems

QWEN = "model.name=Qwen/Qwen2.5-3B-Instruct"
FOUR = "train_model.num_devices=4"
SHARED = (FOUR, "train_model.context_parallel=2")


def activations(plan: Plan) -> float:
    (optimize,) = (phase for phase in plan.phases if phase.name == "optimize")
    return next(use.bytes for use in optimize.uses if use.name.startswith("activations"))


def problem_texts(plan: Plan) -> list[str]:
    return [problem.text for problem in find_problems(plan)]


def test_each_rank_keeps_its_share_of_a_microbatch() -> None:
    """A group has twice the completions, and each rank half of the positions."""
    alone, shared = gpu_plan(QWEN, FOUR, gpus=5), gpu_plan(QWEN, *SHARED, gpus=5)
    assert shared.learner.microbatch_rows == 2 * alone.learner.microbatch_rows
    assert shared.shape is not None
    positions = microbatch_tokens(shared.config, shared.shape)
    sizes = longest_microbatch(shared.config, shared.shape, on_cpu=False, ranks=2)
    assert (sizes.positions, sizes.targets) == (positions // 2, positions // 2)
    limits = ("train.max_tokens_per_microbatch=4096", "env.max_prompt_tokens=1024")
    long_rows = [gpu_plan(QWEN, *overrides, *limits, gpus=5) for overrides in ((FOUR,), SHARED)]
    assert activations(long_rows[1]) == activations(long_rows[0]) / 2
    assert long_rows[1].learner.microbatches == 2 * long_rows[0].learner.microbatches


def test_the_key_is_named_where_a_microbatch_is_too_large() -> None:
    limits = ("train.gradient_accumulation_steps=1", "inference_model.max_tokens=30000")
    plan = make_plan(config_of("grpo_gsm8k", QWEN, FOUR, *limits), False, machine(5, 24.0))
    (text,) = (text for text in problem_texts(plan) if "phase optimize needs" in text)
    assert "train_model.context_parallel" in text


def test_a_group_in_the_report() -> None:
    text = text_of(gpu_plan(QWEN, *SHARED, gpus=5))
    for expected_line in (
        "train_model      4 ranks, each microbatch on 2 of them, parameters sharded over all of them: GPU 0, 1, 2, 3",
        "128 completions = 2 groups of 2 ranks x 8 microbatches x 8; 4 steps per iteration",
    ):
        assert expected_line in text
    many = gpu_plan(QWEN, "train_model.num_devices=258", "train_model.context_parallel=2", gpus=260)
    assert "128 completions, so 2 of 258 learner ranks are idle" in many.notes[0]


def test_scorers_with_devices_of_their_own_score_whole_microbatches() -> None:
    plans = [gpu_plan(QWEN, *overrides, "ref_model.num_devices=1", gpus=8) for overrides in ((FOUR,), SHARED)]
    alone, shared = (next(phase.bytes for phase in plan.phases if phase.name == "score") for plan in plans)
    assert shared < 1.1 * alone
    config, shape = plans[1].config, plans[1].reference_shape
    assert shape is not None
    whole = longest_microbatch(config, shape, on_cpu=False)
    assert whole.positions == 2 * longest_microbatch(config, shape, on_cpu=False, ranks=2).positions


def test_key_value_heads_that_cannot_be_divided() -> None:
    (text,) = problem_texts(gpu_plan(QWEN, FOUR, "train_model.context_parallel=4", gpus=5))
    assert text == (
        "train_model.context_parallel=4 with model.name=Qwen/Qwen2.5-3B-Instruct: the model has 2 key-value heads, "
        "which are divided evenly among the ranks; set train_model.context_parallel to a divisor of 2"
    )


def test_a_model_without_plain_attention(tmp_path: Path) -> None:
    sliding = TINY | {"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sliding))
    (text,) = problem_texts(gpu_plan(f"model.name={tmp_path}", *SHARED, gpus=5))
    assert text.endswith(
        "not every layer is known to use plain causal attention, so rows are not packed, and only a packed sequence is "
        "divided among ranks; set train_model.context_parallel=1"
    )


@pytest.mark.parametrize("devices", [(), ("ref_model.num_devices=1",)])
def test_a_reference_on_the_learner_ranks_has_the_same_limit(devices: tuple[str, ...], tmp_path: Path) -> None:
    """A reference with devices of its own is not divided."""
    one_head = TINY | {"num_key_value_heads": 1, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(one_head))
    texts = problem_texts(gpu_plan(QWEN, *SHARED, f"ref_model.name={tmp_path}", *devices, gpus=6))
    assert len(texts) == (0 if devices else 1)
    assert all(f"with ref_model.name={tmp_path}: the model has 1 key-value heads" in text for text in texts)
