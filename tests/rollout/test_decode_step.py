"""A step of the running rows says what the model's own forward says."""

from typing import Any

import pytest
import torch
from rollout.engines.decode_step import DecodeStep, packs
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from envs.group import Sampling
from rollout.engines import decode_step
from rollout.engines.sampler import Request, generate
from rollout.engines.transformers_engine import TransformersEngine
from tests.tiny import VOCABULARY, tiny_llama

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more))


FAMILIES = {
    "llama": llama,
    "llama, biased, tied, other positions": lambda: llama(
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=SCALED
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
}


class Watched(TransformersEngine):
    """Notes how far each step of the running rows lies from the model's own forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, [])
        assert self._decode_step is not None
        self.step_of_rows, self._decode_step = self._decode_step, self.both  # type: ignore[assignment]
        self.apart: list[float] = []
        self.packed: list[bool] = []

    def both(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        ours = self.step_of_rows(tokens, positions, cache)
        _, mask = cache.begin(tokens.device)
        theirs = self._whole_forward(tokens, positions, mask)
        self.apart.append((ours - theirs).abs().max().item())
        self.packed.append(self.step_of_rows._packed)
        return ours

    def _forget_packed(self) -> None:
        self.step_of_rows.forget()


def drawn(model: PreTrainedModel) -> Watched:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    engine = Watched(model)
    asked = [
        Request(i, tuple(range(3, 8 + 2 * i)), 3, Sampling(max_tokens=5 + 2 * i), seed=i) for i in range(4)
    ]
    generate(engine, asked)
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_is_that_of_the_models_own_forward(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    engine = drawn(FAMILIES[family]().to(dtype))
    assert len(engine.apart) == 10 and set(engine.apart) == {0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_give_the_same_but_for_the_last_bits(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_step, "_LARGE", 0)
    torch.manual_seed(0)
    engine = drawn(FAMILIES[family]().to(dtype))
    assert engine.packed == [place + 1 >= decode_step._WORTH and packs(dtype) for place in range(10)]
    scale = torch.finfo(dtype).eps * 100
    assert max(engine.apart) <= (scale if dtype == torch.float32 else 10 * scale)
    assert not engine.step_of_rows._packed, "nothing runs, and packed weights take memory"


def test_a_push_reaches_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "_LARGE", 0)
    old, new = tiny_llama(seed=0), tiny_llama(seed=1)
    engine = Watched(old)
    engine.submit(Request(0, (3, 4, 5), 4, Sampling(max_tokens=20), seed=0))
    for _ in range(10):
        engine.step()
    assert engine.packed[-1] == packs(torch.float32)
    engine.load(new.state_dict().items(), 1)
    assert not engine.step_of_rows._packed
    while engine.in_flight:
        engine.step()
    assert engine.packed[-1] == packs(torch.float32) and max(engine.apart) < 1e-5


def test_models_with_other_layers_keep_their_own_forward() -> None:
    class Special(nn.Linear):
        pass

    model = tiny_llama()
    assert DecodeStep.fits(model)
    model.model.layers[1].mlp.down_proj.__class__ = Special
    assert not DecodeStep.fits(model)
    assert not DecodeStep.fits(llama().to("meta"))


def test_float32_is_packed_when_few_rows_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "_LARGE", 0)
    monkeypatch.setattr(decode_step, "_FEW", 4)
    engine = Watched(tiny_llama())
    generate(engine, [Request(i, (3, 4, 5 + i), 3, Sampling(max_tokens=8 + 4 * i), seed=i) for i in range(2)])
    assert engine.packed == [False] * 7 + [packs(torch.float32)] * 4
