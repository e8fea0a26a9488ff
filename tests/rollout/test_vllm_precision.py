"""Tests of log-probs of a vLLM engine (CPU build) in half precision."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from envs.group import Sampling
from tests.rollout.conftest import StartEngine, tiny_llama
from torchgrpo.rollout.engines import vllm_engine_args
from torchgrpo.rollout.engines.interface import Request, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine

pytestmark = pytest.mark.long

PROMPT = (5, 6, 7)


def head_only_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """Makes a model whose layers are identities, so that only the head rounds.

    Its logits reach 20, as in large models.
    """
    model = tiny_llama(False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(8)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.to(dtype))
        model.lm_head.weight.copy_(model.lm_head.weight.to(dtype))
    return model


def sampled_error(engine: VLLMEngine, model: LlamaForCausalLM, dtype: str) -> float:
    """Returns the mean absolute error of sampled log-probs.

    The reference is float32 logits of the rounded hidden states.
    """
    engine.load(model.state_dict().items(), version=1)
    (response,) = generate(engine, [Request(1, PROMPT, 8, Sampling(max_tokens=24), seed=3)])
    ids = torch.tensor([[*PROMPT, *one.token_ids] for one in response.completions])
    half = copy.deepcopy(model).to(getattr(torch, dtype))
    with torch.no_grad():
        logits = half.model(ids).last_hidden_state.float() @ half.lm_head.weight.float().T
    expected = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, len(PROMPT) - 1 :, 0]
    sampled = torch.tensor([one.log_probs for one in response.completions])
    return float((sampled - expected).abs().mean())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_log_probs_are_those_of_float32_logits(
    start_engine: StartEngine, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's usual head rounds logits to the dtype of the weights."""
    model = head_only_model(getattr(torch, dtype))
    exact = sampled_error(start_engine(dtype=dtype), model, dtype)
    monkeypatch.setattr(vllm_engine_args, "_head_overrides", lambda settings: {})
    rounded = sampled_error(start_engine(dtype=dtype), model, dtype)
    assert exact < 1e-4
    assert rounded > 20 * exact
