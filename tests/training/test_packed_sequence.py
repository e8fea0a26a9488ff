"""Tests that packed rows have the log-probs, entropies and gradients of padded rows."""

import copy
import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from config.schema.errors import RunError
from config.schema.models import LoraConfig
from tests.tiny_models import tiny_llama
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.microbatch_sizes import BLOCK_SIZE
from torchgrpo.training import packed_attention
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.packed_attention import ATTENTION_NAME, attend, supports_packing
from torchgrpo.training.packed_sequence import count_real_tokens, pack_rows, packed_positions
from torchgrpo.training.response_scorer import ResponseScorer, TokenLogProbs

PROMPTS = (5, 9, 1, 30)
LENGTHS = ((7, 1, 12, 3), (1, 1, 1, 1), (40, 2, 9, 25), (6, 30, 1, 17))


def rows(prompts: tuple[int, ...] = PROMPTS, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Tokens:
    """Returns random groups with these prompt and response lengths.

    Some tokens are outside the loss.
    """
    generator = torch.Generator().manual_seed(3)
    widest, longest = max(prompts) + 2, max(itertools.chain(*lengths)) + 3
    parts: dict[str, list[torch.Tensor]] = {"prompt": [], "prompt_mask": [], "response": [], "response_mask": []}
    for width, of_group in zip(prompts, lengths, strict=True):
        prompt = torch.randint(4, 40, (widest,), generator=generator)
        prompt_mask = torch.arange(widest) >= widest - width
        for length in of_group:
            parts["prompt"].append(prompt * prompt_mask)
            parts["prompt_mask"].append(prompt_mask)
            inside = torch.arange(longest) < length
            parts["response"].append(torch.randint(4, 40, (longest,), generator=generator) * inside)
            parts["response_mask"].append(inside)
    stacked = {name: torch.stack(values) for name, values in parts.items()}
    holes = torch.rand(stacked["response"].shape, generator=generator) < 0.2
    loss_mask = stacked["response_mask"] & ~holes
    loss_mask[2] = False  # a row outside the loss
    return Tokens(**stacked, loss_mask=loss_mask, batch_size=[len(loss_mask)])


def score_with_gradient(
    model: torch.nn.Module, packs: bool, tokens: Tokens, **more: object
) -> tuple[TokenLogProbs, torch.Tensor]:
    """Computes log-probs, and the gradient of a random weighting of log-probs and entropies."""
    scorer = ResponseScorer(model, packs, chunk_size=13, **more)  # type: ignore[arg-type]
    assert scorer.packs == packs
    temperature = torch.linspace(0.5, 1.5, len(tokens))[:, None]
    scores = scorer(tokens, temperature, with_entropy=True)
    weight = torch.randn(scores.log_prob.shape, generator=torch.Generator().manual_seed(1))
    assert scores.entropy is not None
    (scores.log_prob * weight + scores.entropy * weight.flip(0)).sum().backward()
    named = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return scores, torch.cat(named)


def assert_same(
    ours: tuple[TokenLogProbs, torch.Tensor], theirs: tuple[TokenLogProbs, torch.Tensor], off: float = 1e-6
) -> None:
    for one, other in (
        (ours[0].log_prob, theirs[0].log_prob),
        (ours[0].entropy, theirs[0].entropy),
        (ours[1], theirs[1]),
    ):
        assert one is not None and other is not None
        assert (one - other).norm() <= off * other.norm()
        assert other.norm() > 0


@pytest.mark.parametrize("small", [1 << 15, 0], ids=["together", "apart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_rows_equal_padded_rows(dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows have the results of padded rows.

    small: with 0, rows of different length are in different attention calls.
    """
    monkeypatch.setattr(packed_attention, "SMALL_CALL", small)
    tokens = rows()
    for temperature in (0.7, None):
        packed, whole = (
            score_with_gradient(tiny_llama().to(dtype), packs, tokens, temperature=temperature)
            for packs in (True, False)
        )
        assert_same(packed, whole, off=1e-6 if dtype == torch.float64 else 1e-5)
        assert packed[0].log_prob.dtype == dtype
        assert not packed[0].log_prob[~tokens.loss_mask].any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_computes_the_same(reentrant: bool) -> None:
    kept, recomputed = tiny_llama().train(), tiny_llama().train()
    recomputed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        recomputed.enable_input_require_grads()
    assert_same(score_with_gradient(recomputed, True, rows()), score_with_gradient(kept, True, rows()))


def test_adapters_learn_the_same() -> None:
    lora = LoraConfig(enabled=True)
    gradients = []
    for packs in (True, False):
        torch.manual_seed(5)
        model = add_lora(tiny_llama(), lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        gradients.append(score_with_gradient(model, packs, rows()))
    assert_same(*gradients, off=1e-5)


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES), Qwen3Config(**SIZES)], ids=lambda one: one.model_type)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_models_with_grouped_query_attention(config: Qwen2Config | Qwen3Config, precision: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    other = copy.deepcopy(model)
    packed, whole = (
        score_with_gradient(one, packs, rows(), autocast_dtype=precision)
        for one, packs in ((model, True), (other, False))
    )
    assert_same(packed, whole, off=1e-5 if precision is None else 0.05)


def test_an_incomplete_group_is_packed_with_its_prompt() -> None:
    tokens = rows()
    with torch.no_grad():
        scorer = ResponseScorer(tiny_llama())
        whole = scorer(tokens).log_prob
        for chosen in ([1], [0, 3], [3, 0], [4, 1, 8, 9, 15], [8, 2, 9]):
            torch.testing.assert_close(scorer(tokens[chosen]).log_prob, whole[chosen], atol=1e-5, rtol=1e-5)


def test_packed_positions_have_no_padding() -> None:
    tokens = rows((3, 2), ((4, 1), (2, 3)))
    tokens.loss_mask = tokens.response_mask.clone()
    packed = pack_rows(tokens)
    prompts = [row[mask] for row, mask in zip(tokens.prompt, tokens.prompt_mask, strict=True)]
    responses = [row[mask][:-1] for row, mask in zip(tokens.response, tokens.response_mask, strict=True)]
    expected = torch.cat([prompts[0], responses[0], responses[1], prompts[2], responses[2], responses[3]])
    assert packed.ids[0].tolist() == expected.tolist()
    assert packed.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 2, 3]
    assert packed.target_positions.tolist() == [2, 3, 4, 5, 2, 7, 8, 7, 9, 10]
    assert packed_positions(tokens) == packed.ids.numel() == packed.segments.total
    assert count_real_tokens(tokens) == 5 + 10
    tokens.loss_mask[0, 2:] = False
    assert packed_positions(tokens) == packed.ids.numel() - 2, "behind the last target nothing is needed"


def visible(tokens: Tokens) -> torch.Tensor:
    """Returns the visibility mask, bool [L, L], computed row by row."""
    segments = pack_rows(tokens).segments
    visibility = torch.zeros(segments.total, segments.total, dtype=torch.bool)
    for start, length, group in zip(segments.starts, segments.lengths, segments.groups, strict=True):
        begin, width = segments.prompt_starts[group], segments.prompt_lengths[group]
        places = torch.cat([torch.arange(begin, begin + width), torch.arange(start, start + length)])
        for number, place in enumerate(places):
            visibility[place, places[: number + 1]] = True
    return visibility


def test_the_block_mask_shows_what_each_token_may_see() -> None:
    tokens = rows()
    segments = pack_rows(tokens).segments
    sees = segments.block_mask(torch.device("cpu")).mask_mod
    dense = create_mask(sees, None, None, segments.total, segments.total, device="cpu")[0, 0]
    assert torch.equal(dense, visible(tokens))


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "many": (PROMPTS, LENGTHS),
    "whole blocks": ((400,), ((500, 300, 1),)),
    "at the edges": ((128, 64, 64), ((128, 256), (64, 192), (1, 127))),
    "one block": ((3,), ((2, 4, 1),)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_block_mask_equals_pytorchs(layout: str) -> None:
    tokens = rows(*LAYOUTS[layout])
    segments = pack_rows(tokens).segments
    mask = segments.block_mask(torch.device("cpu"))
    wanted = create_block_mask(
        mask.mask_mod, None, None, segments.total, segments.total, device="cpu", BLOCK_SIZE=BLOCK_SIZE
    )
    assert mask.seq_lengths == wanted.seq_lengths
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for each in (name, f"full_{name}"):
            found, expected = vars(mask)[each], vars(wanted)[each]
            assert torch.equal(found, expected), each
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), each
    assert torch.equal(mask.to_dense(), wanted.to_dense())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_blocks_attend_as_rows_do(precision: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention in its uncompiled forward pass on the CPU equals attention by rows."""
    tokens, found = rows(), []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(packed_attention, "FLEX_DEVICE_TYPES", devices)
        with torch.no_grad():
            found.append(ResponseScorer(tiny_llama(), autocast_dtype=precision)(tokens).log_prob)
    torch.testing.assert_close(*found, atol=1e-5 if precision is None else 0.3, rtol=1e-5)
    assert not torch.equal(*found)


@pytest.mark.parametrize("small", [0, 1 << 15])
def test_padding_inside_attention_stays_small(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "SMALL_CALL", small)
    lengths = torch.empty(64).log_normal_(4.0, 0.8, generator=torch.Generator().manual_seed(0)).long().clamp(1, 400)
    tokens = rows((60,) * 8, tuple(tuple(of_group) for of_group in lengths.view(8, 8).tolist()))
    tokens.loss_mask = tokens.response_mask.clone()
    segments = pack_rows(tokens).segments
    calls = segments.attention_calls(torch.device("cpu"))
    places = torch.cat([call.queries.flatten() for call in calls.calls])[calls.output_indices]
    assert torch.equal(places, torch.arange(segments.total))
    needed = 0
    for call in calls.calls:
        widths = torch.tensor([len(set(row)) for row in call.queries.tolist()])
        ahead = call.keys.shape[1] - call.queries.shape[1]
        needed = int((widths * (widths + ahead)).sum())
        assert call.queries.shape[1] * call.keys.numel() <= 1.25 * needed + small


def test_no_query_is_computed_twice() -> None:
    tokens = rows((6,) * 5, ((8,) * 4,) * 5)
    tokens.loss_mask = tokens.response_mask.clone()
    segments = pack_rows(tokens).segments
    calls = segments.attention_calls(torch.device("cpu"))
    assert sum(call.queries.numel() for call in calls.calls) == segments.total == 5 * (6 + 4 * 7)
    assert [tuple(call.keys.shape) for call in calls.calls] == [(5, 6), (20, 13)]


def test_tokens_after_the_last_target_are_not_packed() -> None:
    tokens = rows((3, 3), ((4, 2), (3, 2)))
    tokens.loss_mask = tokens.response_mask.clone()
    packed, whole = (score_with_gradient(tiny_llama(), packs, tokens) for packs in (True, False))
    assert_same(packed, whole, off=1e-5)


def test_without_segments_the_attention_is_the_models_own() -> None:
    plain, replaced = tiny_llama(), tiny_llama()
    ResponseScorer(replaced)
    assert replaced.config._attn_implementation == ATTENTION_NAME
    ids, mask = torch.randint(4, 40, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    for given in (None, mask):
        assert torch.equal(plain(ids, given).logits, replaced(ids, given).logits)
    config = copy.deepcopy(replaced.config)
    assert ATTENTION_NAME not in config.to_json_string()


def sliding_window_model(**more: object) -> object:
    return AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, **more))


@pytest.mark.parametrize("keyword", ["softcap", "s_aux", "sliding_window", "something_new"])
def test_an_attention_with_a_keyword_that_is_not_known_packs_nothing(keyword: str) -> None:
    model, segments = tiny_llama(), pack_rows(rows()).segments
    heads = torch.zeros(1, 2, segments.total, 8)
    attend(model, heads, heads, heads, None, segments=segments, position_ids=None, **{keyword: None})
    with pytest.raises(RunError, match=f"LlamaForCausalLM attends with {keyword}, .*train.packing=false"):
        attend(model, heads, heads, heads, None, segments=segments, **{keyword: 8})


def test_a_layer_without_the_segments_is_an_error() -> None:
    model = tiny_llama()
    scores = ResponseScorer(model)
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *arguments, segments=None, **keywords: forward(*arguments, **keywords)
    with pytest.raises(RunError, match="only 1 of 2 layers of LlamaForCausalLM used segment attention: set"):
        scores(rows())


def test_models_with_limited_attention_get_padded_rows() -> None:
    assert supports_packing(sliding_window_model())  # type: ignore[arg-type]
    sliding = sliding_window_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert not supports_packing(sliding)  # type: ignore[arg-type]
    assert not ResponseScorer(sliding).packs  # type: ignore[arg-type]
