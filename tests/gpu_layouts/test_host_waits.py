"""The host waits for a GPU in an optimizer step, not in each microbatch.

tests/pretend_host_waits.py defines the waits of simulated GPUs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from config.schema.policy import load_policy
from envs.group import Group
from tests.gpu_layouts.layouts import Case, Layout, learner_on, save_tiny, scored_groups
from tests.groups import credit_groups
from tests.pretend_gpu import pretend_gpus
from tests.training.episode_groups import random_streams, split_groups
from torchgrpo.training import packed_attention
from torchgrpo.training.packed_attention import Segments
from torchgrpo.training.response_scorer import ResponseScorer, ScoringInputs

MOST_WAITS = 3
"""Most waits of a step: outputs of the microbatches, norm and loss, and scores for the token weights."""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "KL in the loss": ("grpo", {"kl_coef": 0.1}, {}),
    "token weights": ("high_entropy", {}, {}),
    "penalty": ("kl_cov", {}, {}),
    "passes": ("grpo", {"aggregation": "pass_mean", "pass_size": 2}, {}),
    "teacher": ("opd", {}, {}),
    "environment tokens": ("echo", {}, {}),
    "temperature of each row": ("grpo", {}, {"temperature_end": 0.5}),
    "LoRA": ("grpo", {}, {"lora": True}),
}
"""Preset, fields of the policy and of the test case by the name of the case."""


def attend_densely(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Computes attention from the block mask, since simulated GPUs have no flex attention."""
    positions = torch.arange(segments.total, device=query.device)
    zero = positions.new_zeros(())
    visible = segments.block_mask(query.device).mask_mod(zero, zero, positions[:, None], positions)
    out: Tensor = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    return out.transpose(1, 2)


@pytest.fixture(autouse=True)
def flex_attention_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernel of flex attention."""
    monkeypatch.setattr(packed_attention, "_attend_with_flex", attend_densely)


def waits_of_step(microbatches: int, case: Case, groups: Sequence[Group]) -> list[str]:
    """Returns the waits of a second optimizer step on one simulated GPU."""
    with pretend_gpus(1) as gpus, pytest.MonkeyPatch.context() as patched:
        patched.setattr(packed_attention, "FLEX_DEVICE_TYPES", ("cuda",))
        learner, _ = learner_on(Layout(1), case, case.folder)
        learner.config.train.gradient_accumulation_steps = microbatches
        learner.step(credit_groups(learner, groups))
        batch = credit_groups(learner, groups)
        gpus.waits.clear()
        learner.step(batch)
        return gpus.waits


@pytest.mark.parametrize("name", CASES)
def test_microbatches_add_no_waits(name: str, tmp_path: Path) -> None:
    preset, fields, more = CASES[name]
    policy = load_policy(preset, overlong_cache=None, filter_range=None, dynamic_batching=False, **fields)
    case = Case(policy, save_tiny(tmp_path, False), **more)
    two, four = (Counter(waits_of_step(microbatches, case, scored_groups())) for microbatches in (2, 4))
    assert two == four
    assert 0 < two.total() <= MOST_WAITS


def test_episodes_in_several_rows_add_no_waits(tmp_path: Path) -> None:
    policy = load_policy("grpo", overlong_cache=None, filter_range=None, dynamic_batching=False)
    case, groups = Case(policy, save_tiny(tmp_path, False)), split_groups(random_streams(seed=1), seed=2, share=0.7)
    two, four = (Counter(waits_of_step(microbatches, case, groups)) for microbatches in (2, 4))
    assert two == four
    assert 0 < two.total() <= MOST_WAITS


def test_padded_rows_add_the_wait_of_transformers(tmp_path: Path) -> None:
    """transformers reads from the positions whether a row has several sequences."""
    policy = load_policy("grpo", overlong_cache=None, filter_range=None, dynamic_batching=False)
    case = Case(policy, save_tiny(tmp_path, False), packing=False)
    two, four = (len(waits_of_step(microbatches, case, scored_groups())) for microbatches in (2, 4))
    assert four - two == 2
    assert two <= MOST_WAITS + 2


def test_a_tensor_copied_by_itself_is_a_wait_of_each_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = ResponseScorer.prepare

    def prepare_and_copy(scorer: ResponseScorer, *arguments: Any) -> ScoringInputs:
        inputs = prepare(scorer, *arguments)
        return replace(inputs, targets=inputs.targets.to(scorer.device))

    monkeypatch.setattr(ResponseScorer, "prepare", prepare_and_copy)
    policy = load_policy("grpo", overlong_cache=None, filter_range=None, dynamic_batching=False)
    case = Case(policy, save_tiny(tmp_path, False))
    two, four = (len(waits_of_step(microbatches, case, scored_groups())) for microbatches in (2, 4))
    assert four - two == 2
