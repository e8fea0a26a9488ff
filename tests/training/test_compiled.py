"""Compiled decoder layers compute what the plain ones do, packed or in rows, with all that works layer by layer."""

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
from tests.tiny import tiny_llama
from tests.training.test_packed_sequence import assert_same, rows, scored
from torchgrpo.plan.weight_bounds import BOUNDS
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.compiled import compile_layers
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.scoring import plain_scores
from torchgrpo.training.sharding import shard, whole

pytestmark = pytest.mark.long

OTHERS = (rows(), rows((4, 8, 3), ((2, 5), (9, 31), (6, 6))), rows((17,), ((5, 8, 3, 2),)))


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """In this process alone: those that inductor starts to compile in would all import torch for it."""
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced and differentiated as ever, but run by PyTorch's own kernels, which saves the C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def code_was_compiled() -> bool:
    return counters["frames"]["ok"] > 0


def compiled(model: nn.Module) -> nn.Module:
    compile_layers(model)
    return model


def test_compiled_layers_are_the_plain_ones_at_any_length() -> None:
    plain, ours = tiny_llama().train(), compiled(tiny_llama().train())
    assert_same(scored(ours, True, OTHERS[0]), scored(plain, True, OTHERS[0]), off=1e-5)
    assert code_was_compiled()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in OTHERS[1:]:
            for model in (plain, ours):
                model.zero_grad()
            assert_same(scored(ours, True, tokens), scored(plain, True, tokens), off=1e-5)


def adapted(checkpointing: bool) -> nn.Module:
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
    plain, ours = adapted(checkpointing=False), compiled(adapted(checkpointing=True))
    assert_same(scored(ours, packs, OTHERS[0]), scored(plain, packs, OTHERS[0]), off=1e-5)
    with torch.no_grad(), plain.disable_adapter(), ours.disable_adapter():  # type: ignore[operator]
        theirs, same = (ResponseScorer(model, packs)(OTHERS[1]).log_prob for model in (plain, ours))
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
    root = shard(compiled(ours), init_device_mesh("cpu", (1,)), None)
    theirs = scored(plain, True, OTHERS[0])
    scores = ResponseScorer(ours, chunk_size=13, within=root)(
        OTHERS[0], torch.linspace(0.5, 1.5, len(OTHERS[0]))[:, None], with_entropy=True
    )
    weight = torch.randn(scores.log_prob.shape, generator=torch.Generator().manual_seed(1))
    assert scores.entropy is not None
    (scores.log_prob * weight + scores.entropy * weight.flip(0)).sum().backward()
    gradient = torch.cat([whole(p.grad).flatten() for p in ours.parameters() if p.grad is not None])
    assert_same((scores, gradient), theirs, off=1e-5)
    assert code_was_compiled()


def test_what_checks_ask_is_not_compiled() -> None:
    sequences = [[5, 7, 9, 11], [4, 6, 8, 3]]
    plain, ours = tiny_llama(), compiled(tiny_llama())
    assert plain_scores(ours, sequences) == plain_scores(plain, sequences)
    check_forward(ResponseScorer(ours), (5, 9), BOUNDS["float32"])
    assert not code_was_compiled()


def test_a_model_without_such_layers_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match=r"train\.compile=true: the layers of GPT2LMHeadModel"):
        compile_layers(model)
