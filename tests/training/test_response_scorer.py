"""Tests of the response scorer: agreement with the engine, packing, autocast."""

import pytest
import torch

from tests.groups import sample_tiny_groups
from tests.tiny_models import tiny_llama
from tests.training.tiny_learners import REPEATS, make_scorer, sampled_batch
from torchgrpo.batches.batch import collate


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("packs", [True, False])
def test_the_trainer_agrees_with_the_engine_on_every_token(packs: bool, temperature: float) -> None:
    batch = sampled_batch(temperature)
    scores = make_scorer(tiny_llama(), packs, temperature)(batch.tokens)
    mask = batch.tokens.response_mask
    torch.testing.assert_close(scores.log_prob[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=0)
    assert not scores.log_prob[~mask].any()


def test_rows_are_scored_at_their_own_temperature() -> None:
    groups = [group for at in (0.5, 1.0, 1.7) for group in sample_tiny_groups(at, 2, REPEATS)]
    batch = collate(groups)
    assert batch.temperature.unique().tolist() == pytest.approx([0.5, 1.0, 1.7])
    mask = batch.tokens.response_mask
    for packs in (True, False):
        scores = make_scorer(tiny_llama(), packs, temperature=None)(batch.tokens, batch.temperature)
        torch.testing.assert_close(scores.log_prob[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=0)
    fixed = make_scorer(tiny_llama(), True, temperature=1.0)(batch.tokens)
    assert (fixed.log_prob - batch.sample_log_prob)[mask].abs().mean() > 0.1


def test_a_shared_prompt_changes_no_gradient() -> None:
    batch = sampled_batch()
    weight = torch.randn(batch.sample_log_prob.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for share in (True, False):
        model = tiny_llama()
        scores = make_scorer(model, share)(batch.tokens, with_entropy=True)
        (scores.log_prob * weight + 0.1 * scores.entropy).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert difference < 1e-5


def test_entropy_is_over_the_whole_vocabulary() -> None:
    batch = sampled_batch()
    model = tiny_llama()
    scores = make_scorer(model, packs=True)(batch.tokens, with_entropy=True)
    row = 5
    prompt = batch.tokens.prompt[row][batch.tokens.prompt_mask[row]]
    response = batch.tokens.response[row][batch.tokens.response_mask[row]]
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(scores.entropy[row, : len(response)], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_under_autocast_the_head_multiplies_halves_and_sums_in_float32(precision: torch.dtype, tied: bool) -> None:
    """Under autocast the head's input is rounded like that of linear layers.

    The residual stream of float32 weights is float32.
    """
    batch, model = sampled_batch(), tiny_llama(tied)
    half = make_scorer(model, packs=False)
    half.autocast_dtype = precision
    scores = half(batch.tokens)
    tokens = batch.tokens
    with torch.no_grad(), torch.autocast("cpu", precision):
        hidden = half._padded_hidden_states(model, half.prepare(tokens))
    assert hidden.dtype == torch.float32
    logits = hidden.to(precision).double() @ model.lm_head.weight.to(precision).double().T
    expected = logits.log_softmax(-1).gather(1, tokens.response[tokens.loss_mask][:, None])[:, 0]
    ours = scores.log_prob[batch.tokens.loss_mask].double()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    full = hidden.double() @ model.lm_head.weight.double().T
    unrounded = full.log_softmax(-1).gather(1, tokens.response[tokens.loss_mask][:, None])[:, 0]
    assert (ours - unrounded).abs().max() > 1e-4
    scores.log_prob.sum().backward()
    assert model.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_a_temperature_of_zero_is_refused_before_the_forward_pass() -> None:
    batch = sampled_batch()
    batch.temperature[3] = 0.0
    with pytest.raises(ValueError, match="temperature above 0"):
        make_scorer(tiny_llama(), True, temperature=None).prepare(batch.tokens, batch.temperature)
