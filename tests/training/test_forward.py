import pytest
import torch

from tests.groups import drawn_from_tiny
from tests.tiny import tiny_llama
from tests.training.scorers import REPEATS, collected, scorer
from torchgrpo.batches.batch import collate


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("packs", [True, False])
def test_the_trainer_agrees_with_the_engine_on_every_token(packs: bool, temperature: float) -> None:
    batch = collected(temperature)
    scores = scorer(tiny_llama(), packs, temperature)(batch.tokens)
    mask = batch.tokens.response_mask
    torch.testing.assert_close(scores.log_prob[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=0)
    assert not scores.log_prob[~mask].any()


def test_every_row_is_scored_at_its_own_temperature() -> None:
    groups = [group for at in (0.5, 1.0, 1.7) for group in drawn_from_tiny(at, 2, REPEATS)]
    batch = collate(groups)
    assert batch.temperature.unique().tolist() == pytest.approx([0.5, 1.0, 1.7])
    mask = batch.tokens.response_mask
    for packs in (True, False):
        scores = scorer(tiny_llama(), packs, temperature=None)(batch.tokens, batch.temperature)
        torch.testing.assert_close(scores.log_prob[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=0)
    fixed = scorer(tiny_llama(), True, temperature=1.0)(batch.tokens)
    assert (fixed.log_prob - batch.sample_log_prob)[mask].abs().mean() > 0.1


def test_a_shared_prompt_changes_no_gradient() -> None:
    batch = collected()
    weight = torch.randn(batch.sample_log_prob.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for share in (True, False):
        model = tiny_llama()
        scores = scorer(model, share)(batch.tokens, with_entropy=True)
        (scores.log_prob * weight + 0.1 * scores.entropy).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert difference < 1e-5


def test_entropy_is_over_the_whole_vocabulary() -> None:
    batch = collected()
    model = tiny_llama()
    scores = scorer(model, packs=True)(batch.tokens, with_entropy=True)
    row = 5
    prompt = batch.tokens.prompt[row][batch.tokens.prompt_mask[row]]
    response = batch.tokens.response[row][batch.tokens.response_mask[row]]
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(scores.entropy[row, : len(response)], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_under_autocast_the_head_multiplies_halves_and_sums_in_float32(
    precision: torch.dtype, tied: bool
) -> None:
    """The residual stream of float32 weights is float32, so the head's input must be rounded as a linear layer's is."""
    batch, model = collected(), tiny_llama(tied)
    half = scorer(model, packs=False)
    half.autocast_dtype = precision
    scores = half(batch.tokens)
    tokens = batch.tokens
    with torch.no_grad(), torch.autocast("cpu", precision):
        hidden = half._whole(model, tokens)
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
