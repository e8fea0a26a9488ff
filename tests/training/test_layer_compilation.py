"""Tests that compiled decoder layers compute the results of plain layers."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from config.schema.errors import ConfigError
from config.schema.models import LoraConfig
from tests.tiny_models import tiny_llama
from tests.training.test_packed_sequence import assert_same, rows, score_with_gradient
from torchgrpo.plan.log_prob_bounds import BOUNDS
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.layer_compilation import compile_layers
from torchgrpo.training.plain_log_probs import plain_log_probs
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.sharding import full_tensor, shard_model

pytestmark = pytest.mark.long

TOKEN_BATCHES = (rows(), rows((4, 8, 3), ((2, 5), (9, 31), (6, 6))), rows((17,), ((5, 8, 3, 2),)))


@pytest.fixture(autouse=True)
def compile_in_process() -> Iterator[None]:
    """Compiles from scratch and in this process.

    Inductor's worker processes would all import torch.
    """
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and differentiates layers, but runs PyTorch's own kernels instead of compiled C++."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def code_was_compiled() -> bool:
    return counters["frames"]["ok"] > 0


def compile_model(model: nn.Module) -> nn.Module:
    compile_layers(model)
    return model


def test_compiled_layers_are_the_plain_ones_at_any_length() -> None:
    plain, ours = tiny_llama().train(), compile_model(tiny_llama().train())
    assert_same(
        score_with_gradient(ours, True, TOKEN_BATCHES[0]), score_with_gradient(plain, True, TOKEN_BATCHES[0]), off=1e-5
    )
    assert code_was_compiled()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in TOKEN_BATCHES[1:]:
            for model in (plain, ours):
                model.zero_grad()
            assert_same(score_with_gradient(ours, True, tokens), score_with_gradient(plain, True, tokens), off=1e-5)


def make_adapter_model(checkpointing: bool) -> nn.Module:
    model = tiny_llama()
    if checkpointing:
        model.gradient_checkpointing_enable()
    torch.manual_seed(5)
    learner = add_lora(model, LoraConfig(enabled=True))
    for name, parameter in learner.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return learner.train()


@pytest.mark.parametrize("packs", [True, False])
def test_adapters_and_checkpointing(packs: bool, uncompiled_kernels: None) -> None:
    plain, ours = (make_adapter_model(checkpointing=False), compile_model(make_adapter_model(checkpointing=True)))
    assert_same(
        score_with_gradient(ours, packs, TOKEN_BATCHES[0]),
        score_with_gradient(plain, packs, TOKEN_BATCHES[0]),
        off=1e-5,
    )
    with torch.no_grad(), plain.disable_adapter(), ours.disable_adapter():  # type: ignore[operator]
        theirs, same = (ResponseScorer(model, packs)(TOKEN_BATCHES[1]).log_prob for model in (plain, ours))
    torch.testing.assert_close(same, theirs, rtol=1e-5, atol=1e-5)
    assert code_was_compiled()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_sharded_layers(checkpointing: bool, one_rank: None, uncompiled_kernels: None) -> None:
    plain, ours = tiny_llama().train(), tiny_llama().train()
    if checkpointing:
        ours.gradient_checkpointing_enable()
    root = shard_model(compile_model(ours), init_device_mesh("cpu", (1,)), None)
    theirs = score_with_gradient(plain, True, TOKEN_BATCHES[0])
    scores = ResponseScorer(ours, chunk_size=13, unsharded_context=root)(
        TOKEN_BATCHES[0], torch.linspace(0.5, 1.5, len(TOKEN_BATCHES[0]))[:, None], with_entropy=True
    )
    weight = torch.randn(scores.log_prob.shape, generator=torch.Generator().manual_seed(1))
    assert scores.entropy is not None
    (scores.log_prob * weight + scores.entropy * weight.flip(0)).sum().backward()
    gradient = torch.cat([full_tensor(p.grad).flatten() for p in ours.parameters() if p.grad is not None])
    assert_same((scores, gradient), theirs, off=1e-5)
    assert code_was_compiled()


def test_plain_log_probs_run_without_compilation() -> None:
    sequences = [[5, 7, 9, 11], [4, 6, 8, 3]]
    plain, ours = tiny_llama(), compile_model(tiny_llama())
    assert plain_log_probs(ours, sequences) == plain_log_probs(plain, sequences)
    check_forward(ResponseScorer(ours), (5, 9), BOUNDS["float32"])
    assert not code_was_compiled()


def test_a_model_without_decoder_layers_is_an_error() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match=r"train\.compile=true: GPT2LMHeadModel has no layers"):
        compile_layers(model)
