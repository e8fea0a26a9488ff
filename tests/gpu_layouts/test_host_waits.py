"""Waits of the host for a simulated GPU in an optimizer step: none grows with the number of microbatches."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from config.schema.policy import load_policy
from tests.gpu_layouts.layouts import Case, Layout, learner_on, save_tiny, scored_groups
from tests.groups import credit_groups
from tests.pretend_gpu import pretend_gpus
from torchgrpo.training import packed_attention
from torchgrpo.training.packed_attention import Segments


def attend_densely(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Computes the result of flex attention, which has no kernel for simulated GPUs, from its block mask."""
    positions = torch.arange(segments.total, device=query.device)
    none = positions.new_zeros(())
    sees = segments.block_mask(query.device).mask_mod(none, none, positions[:, None], positions)
    out: Tensor = scaled_dot_product_attention(
        query, key, value, attn_mask=sees, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


def waits_of_step(microbatches: int, monkeypatch: pytest.MonkeyPatch, case: Case, **knobs: Any) -> list[str]:
    """Returns the waits of a second optimizer step on one simulated GPU, whose layers attend with a block mask."""
    with pretend_gpus(1) as gpus, monkeypatch.context() as patched:
        patched.setattr(packed_attention, "FLEX_DEVICE_TYPES", ("cuda",))
        patched.setattr(packed_attention, "_attend_with_flex", attend_densely)
        learner, _ = learner_on(Layout(1), case, case.folder)
        learner.config.train.gradient_accumulation_steps = microbatches
        learner.step(credit_groups(learner, scored_groups()))
        batch = credit_groups(learner, scored_groups())
        gpus.waits.clear()
        learner.step(batch)
        return gpus.waits


def test_it(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path, False)
    policy = load_policy("grpo", overlong_cache=None, filter_range=None, dynamic_batching=False)
    a, b = (waits_of_step(n, monkeypatch, Case(policy, folder)) for n in (1, 2))
    print(len(a), len(b))
    for k, v in sorted(Counter(b).items()):
        print(v, Counter(a)[k], k)
    assert 0
