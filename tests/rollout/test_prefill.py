"""Tests of prefill, the prefix cache and the log-probs of the transformers engine's decoders."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from envs.group import Sampling
from tests.rollout.conftest import drain
from tests.tiny_models import EOS, VOCABULARY, tiny_llama
from torchgrpo.rollout.engines import prefill
from torchgrpo.rollout.engines.continuous_batching_decoder import ContinuousBatchingDecoder
from torchgrpo.rollout.engines.generate_decoder import GenerateDecoder
from torchgrpo.rollout.engines.group_kv_cache import group_by_length
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.shared_prompt_attention import merge_partial_attention, partial_attention
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

PREFIX = tuple(3 + i % 30 for i in range(40))
"""Common beginning of all prompts of a run, such as a system prompt."""


def prefix_requests(
    first: int, count: int, tail: int = 5, n: int = 2, prefix: tuple[int, ...] = PREFIX
) -> list[Request]:
    """Makes requests whose prompts share `prefix` and differ in the first of `tail` further tokens."""
    return [
        Request(i, (*prefix, *(3 + (i + j) % 30 for j in range(tail))), n, Sampling(max_tokens=6), seed=i)
        for i in range(first, first + count)
    ]


def count_prefill_tokens(model: PreTrainedModel) -> list[int]:
    """Returns a list that receives the number of tokens of each later prefill call."""
    calls: list[int] = []

    def note(module: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> None:
        if kwargs["past_key_values"].__class__.__name__ == "DynamicCache":
            calls.append(args[0].numel())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def check_against_float64(model: PreTrainedModel, requests: list[Request], answers: list[Response]) -> None:
    """Asserts that log-probs equal those of one float64 forward pass over the whole sequence."""
    exact = type(model)(deepcopy(model.config)).double()
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("eager")
    for request, answer in zip(requests, answers, strict=True):
        for one in answer.completions:
            ids = torch.tensor([[*request.prompt, *one.token_ids]])
            with torch.no_grad():
                log_probs = exact(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
            expected = log_probs.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
            sampled = torch.tensor(one.log_probs, dtype=torch.float64)
            torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=0)


def test_a_common_prefix_is_computed_once() -> None:
    model = tiny_llama()
    calls = count_prefill_tokens(model)
    requests = prefix_requests(0, 6)
    answers = generate(TransformersEngine(model, [EOS]), requests)
    assert calls == [len(PREFIX), 6 * 5]
    check_against_float64(model, requests, answers)


def test_later_prompts_reuse_the_cached_prefix() -> None:
    """An evaluation may follow a training batch with the same prompts.

    A prompt that was requested before is not computed again.
    """
    model = tiny_llama()
    calls = count_prefill_tokens(model)
    engine = TransformersEngine(model, [EOS])
    generate(engine, prefix_requests(0, 4))
    calls.clear()
    later = prefix_requests(10, 3)
    check_against_float64(model, later, generate(engine, later))
    assert calls == [3 * 5]
    calls.clear()
    (one,) = prefix_requests(20, 1)
    check_against_float64(model, [one], generate(engine, [one]))
    assert calls == [5]
    calls.clear()
    again = [replace(request, request_id=100 + request.request_id, seed=7) for request in prefix_requests(0, 4)]
    check_against_float64(model, again, generate(engine, again))
    assert calls == []


def test_equal_prompts_of_one_batch_are_computed_once() -> None:
    model = tiny_llama()
    calls = count_prefill_tokens(model)
    (one,) = prefix_requests(0, 1)
    generate(TransformersEngine(model, [EOS]), [replace(one, request_id=i, seed=i) for i in range(5)])
    assert calls == [len(one.prompt)]


def test_a_push_clears_the_prefix_cache() -> None:
    model = tiny_llama(seed=0)
    calls = count_prefill_tokens(model)
    engine = TransformersEngine(model, [EOS])
    generate(engine, prefix_requests(0, 4))
    engine.load(tiny_llama(seed=1).state_dict().items(), version=1)
    calls.clear()
    answers = generate(engine, prefix_requests(0, 4))
    assert calls == [len(PREFIX), 4 * 5]
    check_against_float64(tiny_llama(seed=1), prefix_requests(0, 4), answers)


def test_a_short_common_prefix_is_not_shared() -> None:
    model = tiny_llama()
    calls = count_prefill_tokens(model)
    requests = prefix_requests(0, 3, prefix=PREFIX[:4])
    check_against_float64(model, requests, generate(TransformersEngine(model, [EOS]), requests))
    assert calls == [3 * 9]


def test_the_cache_is_bounded_and_keeps_used_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_CACHED_POSITIONS", 150)
    model = tiny_llama()
    calls = count_prefill_tokens(model)
    engine = TransformersEngine(model, [EOS])
    for first in range(0, 30, 3):
        generate(engine, prefix_requests(first, 3))
    assert calls == [len(PREFIX), *[3 * 5] * 10]  # all prompts use the prefix, so it is never evicted
    assert isinstance(engine.decoder, ContinuousBatchingDecoder)
    kept = engine.decoder._prefill
    assert sum(map(len, kept._cached_prompts)) == kept._cached_positions <= 150
    assert sorted(kept._cached_prompts) == kept._sorted_prompts


def grouped_queries() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).float()


def windows() -> PreTrainedModel:
    """Makes a model with sliding windows of 8 tokens, shorter than the tests' sequences."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, initializer_range=0.2)).float()


@pytest.mark.parametrize(
    ("make", "decoder"), [(grouped_queries, ContinuousBatchingDecoder), (windows, GenerateDecoder)]
)
def test_models_of_other_kinds(make: Callable[[], PreTrainedModel], decoder: type) -> None:
    """Prompts of all lengths, rows that end at all times, and a push.

    There are more requests than rows.
    """
    model = make()
    engine = TransformersEngine(model, [EOS], max_num_seqs=10)
    assert isinstance(engine.decoder, decoder)
    requests = [
        Request(i, tuple(3 + (i + j) % 30 for j in range(2 + 5 * i % 23)), 1 + i % 4, Sampling(max_tokens=16), i)
        for i in range(14)
    ]
    check_against_float64(model, requests, generate(engine, requests))
    for request in requests:
        engine.submit(request)
    answers: dict[int, Response] = {}
    for _ in range(5):
        answers |= {one.request_id: one for one in engine.step()}
    engine.load([(name, tensor.clone()) for name, tensor in model.state_dict().items()], version=1)
    answers |= {one.request_id: one for one in drain(engine)}
    check_against_float64(model, requests, [answers[request.request_id] for request in requests])


@pytest.mark.parametrize("values", [8, 12])
def test_merged_partial_attention_equals_full_attention(values: int) -> None:
    """Covers a masked segment, and values of another size than keys.

    For such values there is no fused kernel.
    """
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(3, 2, count, 8, generator=generator) for count in (4, 11))
    value = torch.randn(3, 2, 11, values, generator=generator)
    mask = torch.zeros(3, 1, 1, 7)
    mask[1, :, :, 5:] = -torch.inf
    first = partial_attention(query, key[:, :, :7], value[:, :, :7], mask, 0.3)
    both = merge_partial_attention(first, partial_attention(query, key[:, :, 7:], value[:, :, 7:], None, 0.3))
    scores = query.double() @ key.double().transpose(2, 3) * 0.3
    scores[1, :, :, 5:7] = -torch.inf
    torch.testing.assert_close(both, (scores.softmax(-1) @ value.double()).float(), atol=1e-6, rtol=1e-6)


def test_prompts_are_grouped_by_length() -> None:
    assert group_by_length([100, 90, 110, 40]) == [[2, 0, 1, 3]]  # little padding in any case
    lengths = [1000, 10, 990, 12, 985, 11]
    assert group_by_length(lengths) == [[0, 2, 4], [3, 5, 1]]
    assert group_by_length([]) == []


def test_a_model_whose_attention_was_replaced_by_someone_else_is_an_error() -> None:
    """Another attention function would see the new token only, without an error of its own."""
    model = tiny_llama()
    engine = TransformersEngine(model, [EOS])
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="its attention function was replaced by sdpa"):
        generate(engine, prefix_requests(0, 1))
