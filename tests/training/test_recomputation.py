"""Tests that recomputed activations change no bit, and what selective recomputation repeats and keeps."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from config.schema.models import LoraConfig
from tests.training.test_packed_sequence import SIZES, rows
from torchgrpo.plan.memory import Recomputation
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.recomputation import SAVED_OPERATIONS, recompute_activations
from torchgrpo.training.response_scorer import ResponseScorer

WAYS: tuple[Recomputation, ...] = ("none", "selective", "full")


def make_model(recomputation: Recomputation, has_adapters: bool = False, compiles: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    recompute_activations(model, recomputation, compiles)
    if not has_adapters:
        return model.train()
    adapted = add_lora(model, LoraConfig(enabled=True))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return adapted.train()


class OperationCounter(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def backward_counts(recomputation: Recomputation) -> Counter[Any]:
    loss = ResponseScorer(make_model(recomputation), autocast_dtype=torch.bfloat16)(rows()).log_prob.sum()
    with OperationCounter() as counter:
        loss.backward()
    return counter.counts


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_gradients_are_equal_bit_for_bit(precision: torch.dtype | None, has_adapters: bool) -> None:
    found = []
    for recomputation in WAYS:
        model = make_model(recomputation, has_adapters)
        scores = ResponseScorer(model, autocast_dtype=precision)(rows(), with_entropy=True)
        assert scores.entropy is not None
        (scores.log_prob.sum() + scores.entropy.sum()).backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append(torch.cat([scores.log_prob.flatten(), *gradients]))
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_selective_recomputation_repeats_no_product() -> None:
    """Full recomputation repeats seven products of each layer but the last; both repeat the norms."""
    none, selective, full = map(backward_counts, WAYS)
    products = [sum(counts[operation] for operation in SAVED_OPERATIONS) for counts in (none, selective, full)]
    assert products[0] == products[1] < products[2]
    rsqrt = torch.ops.aten.rsqrt.default
    assert none[rsqrt] < selective[rsqrt] == full[rsqrt]


def test_compiled_layers_leave_selective_recomputation_to_the_compiler() -> None:
    for recomputation, is_checkpoint in (("none", False), ("selective", False), ("full", True)):
        model = make_model(recomputation, compiles=True)
        assert model.model.layers[0].gradient_checkpointing is is_checkpoint  # type: ignore[attr-defined, union-attr, index]
    assert make_model("selective").model.layers[0].gradient_checkpointing  # type: ignore[union-attr, index]
