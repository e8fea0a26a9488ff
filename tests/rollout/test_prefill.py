"""What passes the model before the first token of an answer is drawn, and what it says."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from envs.group import Sampling
from tests.rollout.conftest import drain
from tests.tiny import EOS, VOCABULARY, tiny_llama
from torchgrpo.rollout.engines import prefill
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.library_decoder import LibraryDecoder
from torchgrpo.rollout.engines.partial_attention import attend_partly, merge
from torchgrpo.rollout.engines.running_cache import alike
from torchgrpo.rollout.engines.running_decoder import RunningDecoder
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

PREFIX = tuple(3 + i % 30 for i in range(40))
"""What all prompts of a run begin with: a system prompt, examples."""


def asked(
    first: int, count: int, tail: int = 5, n: int = 2, prefix: tuple[int, ...] = PREFIX
) -> list[Request]:
    """Requests whose prompts share `prefix` and differ in the first of `tail` tokens behind it."""
    return [
        Request(i, (*prefix, *(3 + (i + j) % 30 for j in range(tail))), n, Sampling(max_tokens=6), seed=i)
        for i in range(first, first + count)
    ]


def passed(model: PreTrainedModel) -> list[int]:
    """The tokens in each later call of a model that computes more than one position a row."""
    calls: list[int] = []

    def note(module: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> None:
        if kwargs["past_key_values"].__class__.__name__ == "DynamicCache":
            calls.append(args[0].numel())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def check_against_float64(model: PreTrainedModel, requests: list[Request], answers: list[Response]) -> None:
    """Every log-prob is that of one forward over the whole sequence in float64."""
    exact = type(model)(deepcopy(model.config)).double()
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("eager")
    for request, answer in zip(requests, answers, strict=True):
        for one in answer.completions:
            ids = torch.tensor([[*request.prompt, *one.token_ids]])
            with torch.no_grad():
                log_probs = exact(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
            expected = log_probs.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
            drawn = torch.tensor(one.log_probs, dtype=torch.float64)
            torch.testing.assert_close(drawn, expected, atol=1e-4, rtol=0)


def test_what_prompts_have_in_common_passes_the_model_once() -> None:
    model = tiny_llama()
    calls = passed(model)
    requests = asked(0, 6)
    answers = generate(TransformersEngine(model, [EOS]), requests)
    assert calls == [len(PREFIX), 6 * 5]
    check_against_float64(model, requests, answers)


def test_later_prompts_of_the_same_version_begin_behind_what_is_known() -> None:
    """As an evaluation after a batch of training does; and a prompt that was asked before passes not at all."""
    model = tiny_llama()
    calls = passed(model)
    engine = TransformersEngine(model, [EOS])
    generate(engine, asked(0, 4))
    calls.clear()
    later = asked(10, 3)
    check_against_float64(model, later, generate(engine, later))
    assert calls == [3 * 5]
    calls.clear()
    (one,) = asked(20, 1)
    check_against_float64(model, [one], generate(engine, [one]))
    assert calls == [5]
    calls.clear()
    again = [replace(request, request_id=100 + request.request_id, seed=7) for request in asked(0, 4)]
    check_against_float64(model, again, generate(engine, again))
    assert calls == []


def test_equal_prompts_of_one_batch_pass_once() -> None:
    model = tiny_llama()
    calls = passed(model)
    (one,) = asked(0, 1)
    generate(TransformersEngine(model, [EOS]), [replace(one, request_id=i, seed=i) for i in range(5)])
    assert calls == [len(one.prompt)]


def test_a_push_forgets_what_the_old_weights_computed() -> None:
    model = tiny_llama(seed=0)
    calls = passed(model)
    engine = TransformersEngine(model, [EOS])
    generate(engine, asked(0, 4))
    engine.load(tiny_llama(seed=1).state_dict().items(), version=1)
    calls.clear()
    answers = generate(engine, asked(0, 4))
    assert calls == [len(PREFIX), 4 * 5]
    check_against_float64(tiny_llama(seed=1), asked(0, 4), answers)


def test_few_tokens_in_common_are_no_prefix() -> None:
    model = tiny_llama()
    calls = passed(model)
    requests = asked(0, 3, prefix=PREFIX[:4])
    check_against_float64(model, requests, generate(TransformersEngine(model, [EOS]), requests))
    assert calls == [3 * 9]


def test_what_is_kept_is_bounded_and_what_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "KEPT_POSITIONS", 150)
    model = tiny_llama()
    calls = passed(model)
    engine = TransformersEngine(model, [EOS])
    for first in range(0, 30, 3):
        generate(engine, asked(first, 3))
    assert calls == [len(PREFIX), *[3 * 5] * 10]  # the prefix is used by all, so it is never the oldest
    assert isinstance(engine.decoder, RunningDecoder)
    kept = engine.decoder._prefill
    assert sum(map(len, kept._kept)) == kept._positions <= 150
    assert sorted(kept._kept) == kept._sorted


def grouped_queries() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).float()


def windows() -> PreTrainedModel:
    """Its layers see the last 8 tokens, which is less than the tests have."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, initializer_range=0.2)).float()


@pytest.mark.parametrize(("make", "decoder"), [(grouped_queries, RunningDecoder), (windows, LibraryDecoder)])
def test_models_of_other_kinds(make: Callable[[], PreTrainedModel], decoder: type) -> None:
    """Prompts of all lengths, rows that end at all times, more requests than places, and a push amid them."""
    model = make()
    engine = TransformersEngine(model, [EOS], max_num_seqs=10)
    assert isinstance(engine.decoder, decoder)
    requests = [
        Request(
            i, tuple(3 + (i + j) % 30 for j in range(2 + 5 * i % 23)), 1 + i % 4, Sampling(max_tokens=16), i
        )
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
def test_two_parts_of_an_attention_are_the_whole(values: int) -> None:
    """With a part that is masked, and with values of another size than keys, which have no kernel of their own."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(3, 2, count, 8, generator=generator) for count in (4, 11))
    value = torch.randn(3, 2, 11, values, generator=generator)
    mask = torch.zeros(3, 1, 1, 7)
    mask[1, :, :, 5:] = -torch.inf
    first = attend_partly(query, key[:, :, :7], value[:, :, :7], mask, 0.3)
    both = merge(first, attend_partly(query, key[:, :, 7:], value[:, :, 7:], None, 0.3))
    scores = query.double() @ key.double().transpose(2, 3) * 0.3
    scores[1, :, :, 5:7] = -torch.inf
    torch.testing.assert_close(both, (scores.softmax(-1) @ value.double()).float(), atol=1e-6, rtol=1e-6)


def test_prompts_of_like_length_are_together() -> None:
    assert alike([100, 90, 110, 40]) == [[2, 0, 1, 3]]  # so few that padding costs nothing
    lengths = [1000, 10, 990, 12, 985, 11]
    assert alike(lengths) == [[0, 2, 4], [3, 5, 1]]
    assert alike([]) == []


def test_a_model_whose_attention_was_replaced_by_someone_else_is_an_error() -> None:
    """It would see the new token alone, and draw something all the same."""
    model = tiny_llama()
    engine = TransformersEngine(model, [EOS])
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="its attention is sdpa"):
        generate(engine, asked(0, 1))
