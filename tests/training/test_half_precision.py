"""Tests that one rank and two gloo ranks compute alike in bfloat16.

Adapters need no wider copies of activations.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from config.schema.models import LoraConfig
from config.schema.optimizer import OptimizerConfig
from tests.script_runner import ENVIRONMENT, ROOT, start_python
from tests.training.half_precision_rank import KINDS, gradients
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.optimizer import make_optimizer

LAYERS, POSITIONS = 28, 13


@pytest.fixture(scope="module")
def folder_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs two ranks; returns the folder of their gradients."""
    folder = tmp_path_factory.mktemp("ranks")
    script = str(ROOT / "tests" / "training" / "half_precision_rank.py")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    ranks = [start_python([script, str(rank), "2", str(folder)], environment=environment) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=900)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_one_and_two_ranks(kind: str, folder_of_two_ranks: Path) -> None:
    """The order of the float32 sum over microbatches is the only difference."""
    expected = gradients(KINDS[kind], 0, 1)
    found: dict[str, Tensor] = torch.load(folder_of_two_ranks / f"{kind}.pt", weights_only=True)
    assert {name.removeprefix("model.") for name in found} == {name.removeprefix("model.") for name in expected}
    for (name, gradient), other in zip(expected.items(), found.values(), strict=True):
        assert gradient.dtype == other.dtype == torch.float32, name
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))


class CastCounter(TorchDispatchMode):
    """Counts casts of activations: of tensors with one vector for each position."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and POSITIONS in args[0].shape:
            self.casts += 1
        return func(*args, **(kwargs or {}))


def test_adapters_cast_activations_only_for_norms() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    policy: Any = add_lora(LlamaForCausalLM(config).to(torch.bfloat16), LoraConfig(enabled=True))
    make_optimizer(policy, OptimizerConfig())
    with CastCounter() as counter:
        hidden = policy.get_base_model().base_model(torch.arange(POSITIONS)[None], use_cache=False).last_hidden_state
        hidden.sum().backward()
    norms = 2 * LAYERS + 1
    assert 2 * norms <= counter.casts <= 4 * norms + 3  # forward and backward pass; positions and their cosines
