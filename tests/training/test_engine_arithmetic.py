"""The learner computing in an engine's dtype, against models that really are in that dtype."""

import copy

import pytest
import torch

from config.models import LoraConfig
from tests.tiny import VOCABULARY, tiny_llama
from training.adapters import add_lora
from training.engine_arithmetic import (
    EXACT,
    Arithmetic,
    computing_in,
    elsewhere,
    learner_scores,
    rounding_error,
    to_float8,
    to_tf32,
)

SEQUENCES = [torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(3)).tolist()]
IDS = torch.tensor(SEQUENCES)
HALF = Arithmetic.of("bfloat16")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_float32_model_computes_as_one_in_half_precision(name: str, tied: bool) -> None:
    """Bit for bit up to the head, whose logits stay float32."""
    model, arithmetic = tiny_llama(tied), Arithmetic.of(name)
    dtype = arithmetic.dtype
    half = copy.deepcopy(model).to(dtype)
    half.model.rotary_emb = (
        model.model.rotary_emb
    )  # whose frequencies stay float32, as in any model that is loaded
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with computing_in(model, arithmetic):
        hidden = model.base_model(IDS).last_hidden_state
        logits = model(IDS).logits
    expected = half.base_model(IDS).last_hidden_state
    assert hidden.dtype == dtype
    assert torch.equal(hidden, expected)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected.float() @ half.lm_head.weight.float().T)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model(IDS).logits.dtype == torch.float32
    assert not vars(model.lm_head).get("forward")
    assert model.lm_head.weight is dict(model.named_parameters(remove_duplicate=False))["lm_head.weight"]


@torch.no_grad()
def test_a_model_in_half_precision_computes_in_float32() -> None:
    half = tiny_llama().to(torch.bfloat16)
    expected = copy.deepcopy(half).float()(IDS).logits
    with computing_in(half, EXACT):
        logits = half(IDS).logits
    torch.testing.assert_close(logits, expected)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_a_lora_policy_computes_in_half_precision() -> None:
    policy = add_lora(tiny_llama(), LoraConfig(enabled=True, r=4))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    errors = torch.tensor(rounding_error(policy, SEQUENCES, HALF))
    plain = torch.tensor(rounding_error(tiny_llama(), SEQUENCES, HALF))
    assert plain.mean() / 3 < errors.mean() < 3 * plain.mean()


@torch.no_grad()
def test_the_model_is_itself_again_after_an_error() -> None:
    model = tiny_llama()
    expected = model(IDS).logits
    with pytest.raises(IndexError), computing_in(model, HALF):
        model(torch.tensor([[VOCABULARY]]))
    with pytest.raises(RuntimeError, match="shape"), computing_in(model, HALF):
        model.model.layers[0].mlp(torch.ones(1, 3))
    assert torch.equal(model(IDS).logits, expected)


def test_no_rounding_is_measured_where_there_is_none() -> None:
    assert torch.tensor(rounding_error(tiny_llama(), SEQUENCES, EXACT)).max() == 0


def test_both_sides_in_half_precision_may_differ_by_both_roundings() -> None:
    model = tiny_llama()
    one = torch.tensor(rounding_error(model, SEQUENCES, HALF))
    both = torch.tensor(rounding_error(model.to(torch.bfloat16), SEQUENCES, HALF))
    assert both.mean() > 1.3 * one.mean()
    assert learner_scores(model, SEQUENCES, 1.0) != learner_scores(model, SEQUENCES, 2.0)


def test_sequences_are_scored_together_as_each_alone() -> None:
    model, generator = tiny_llama(), torch.Generator().manual_seed(5)
    lengths = (160, 160, 160, 7, 1, 300, 600, 2)
    given = [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    passes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda model, arguments: passes.append(tuple(arguments[0].shape)))
    together = learner_scores(model, given, 0.7)
    assert passes == [(3, 160), (2, 7), (1, 300), (1, 600), (1, 2)]
    for sequence, scores in zip(given, together, strict=True):
        expected = model(torch.tensor([sequence])).logits[0, :-1].div(0.7).log_softmax(-1)
        wanted = [row[token].item() for row, token in zip(expected, sequence[1:], strict=True)]
        assert scores == pytest.approx(wanted, abs=1e-5)


def test_float8_rounds_more_than_half_precision() -> None:
    model = tiny_llama()
    half = torch.tensor(rounding_error(model, SEQUENCES, HALF))
    eighth = torch.tensor(rounding_error(model, SEQUENCES, Arithmetic.of("bfloat16", float8=True)))
    assert eighth.mean() > 4 * half.mean()


def test_float8_keeps_the_largest_value_of_each_row() -> None:
    """Three bits of mantissa: no value is off by more than a sixteenth, however small its row."""
    values = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 5)[:, None]
    )
    rounded = to_float8(values)
    torch.testing.assert_close(rounded.abs().amax(-1), values.abs().amax(-1))
    large = values.abs() > 0.02 * values.abs().amax(-1, keepdim=True)
    assert ((rounded - values).abs() / values.abs())[large].max() < 1 / 16 + 1e-6


def test_tf32_keeps_ten_bits_of_a_mantissa() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 1000)
    rounded = to_tf32(values)
    assert torch.equal(rounded.view(torch.int32) & (1 << 13) - 1, torch.zeros(1000, dtype=torch.int32))
    error = ((rounded - values) / values).abs().max()
    assert 2**-12 < error <= 2**-11


@torch.no_grad()
def test_tf32_rounds_the_factors_of_products_alone() -> None:
    model = tiny_llama()
    layer = model.model.layers[0]
    values = torch.randn(3, layer.hidden_size, generator=torch.Generator().manual_seed(1))
    norm, projected = layer.input_layernorm(values), layer.self_attn.q_proj(values)
    with computing_in(model, Arithmetic.of("tf32"), elsewhere(2**-10, seed=1)):
        assert torch.equal(layer.input_layernorm(values), norm)
        error = layer.self_attn.q_proj(values) - projected
    assert 1e-4 < error.norm() / projected.norm() < 2e-3


@pytest.mark.parametrize("name", ["bfloat16", "tf32"])
def test_more_draws_find_what_one_misses(name: str) -> None:
    """Where one computation happens to round to the exact value, others do not."""
    model = tiny_llama()
    one, again, many = (
        torch.tensor(rounding_error(model, SEQUENCES, Arithmetic.of(name), draws=draws))
        for draws in (1, 1, 8)
    )
    assert torch.equal(one, again)
    assert many.min() > 10 * one.min()
    assert one.mean() < many.mean() < 2 * one.mean()
