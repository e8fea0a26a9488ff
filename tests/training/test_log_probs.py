"""Compares chunked log-probs, entropies and gradients to computations with full logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from envs.group import Sampling
from torchgrpo.rollout.engines.token_sampling import SamplingFilter
from torchgrpo.training import log_probs
from torchgrpo.training.log_probs import selected_log_probs

RESTRICTIONS = [
    *[{}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}, {"top_k": 1}, {"top_k": 100, "top_p": 0.999}],
    *[{"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 0.15, "top_k": 6, "top_p": 0.8}],
]


def make_inputs(
    rows: int = 13, width: int = 6, vocabulary: int = 17, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return hidden_states.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def full_logits_reference(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden_states, weight, bias) / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_full_logits(chunk_size: int | None, temperature: float, with_bias: bool) -> None:
    hidden_states, weight, bias, targets = make_inputs()
    used = bias if with_bias else None
    inputs = [hidden_states, weight, bias] if with_bias else [hidden_states, weight]
    ours = selected_log_probs(hidden_states, weight, used, targets, temperature, chunk_size, with_entropy=True)
    theirs = full_logits_reference(hidden_states, weight, used, targets, temperature)
    log_prob_gradient = torch.linspace(-1, 2, len(hidden_states), dtype=torch.float64)
    gradients = []
    for log_prob, entropy in (ours, theirs):
        assert entropy is not None
        gradients.append(
            torch.autograd.grad((log_prob * log_prob_gradient + entropy * log_prob_gradient.flip(0)).sum(), inputs)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("restriction", [{}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}])
def test_rows_with_temperatures_equal_separate_calls(restriction: dict[str, Any]) -> None:
    hidden_states, weight, bias, targets = make_inputs()
    temperatures = torch.linspace(0.5, 1.6, len(hidden_states), dtype=torch.float64)

    def score_rows(temperature: float | Tensor, rows: slice) -> Tensor:
        log_prob, entropy = selected_log_probs(
            hidden_states[rows], weight, bias, targets[rows], temperature, 4, True, **restriction
        )
        assert entropy is not None
        return (log_prob + 0.3 * entropy).square().sum()

    together = score_rows(temperatures, slice(None))
    rows = [score_rows(t, slice(i, i + 1)) for i, t in enumerate(temperatures.tolist())]
    inputs = (hidden_states, weight, bias)
    torch.testing.assert_close(together, sum(rows))
    torch.testing.assert_close(torch.autograd.grad(together, inputs), torch.autograd.grad(sum(rows), inputs))


@pytest.mark.parametrize("restriction", RESTRICTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_by_finite_differences(restriction: dict[str, Any], temperature: float) -> None:
    hidden_states, weight, bias, targets = make_inputs(rows=5, width=3, vocabulary=9)

    def log_prob_and_entropy(hidden_states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return selected_log_probs(hidden_states, weight, bias, targets, temperature, 2, True, **restriction)

    assert torch.autograd.gradcheck(log_prob_and_entropy, (hidden_states, weight, bias))
    assert torch.autograd.gradcheck(lambda *inputs: log_prob_and_entropy(*inputs)[0], (hidden_states, weight, bias))
    assert torch.autograd.gradcheck(lambda *inputs: log_prob_and_entropy(*inputs)[1], (hidden_states, weight, bias))


@pytest.mark.parametrize("restriction", RESTRICTIONS)
def test_restricted_distribution_is_the_samplers(restriction: dict[str, Any]) -> None:
    hidden_states, weight, bias, _ = make_inputs(rows=40, dtype=torch.float32)
    logits = torch.nn.functional.linear(hidden_states, weight, bias).detach()
    sampling = Sampling(temperature=0.8, **restriction)
    theirs = SamplingFilter([sampling] * len(hidden_states), torch.device("cpu")).log_probs(logits)
    targets = theirs.exp().multinomial(1, generator=torch.Generator().manual_seed(1))[:, 0]
    ours, entropy = selected_log_probs(hidden_states, weight, bias, targets, 0.8, 7, with_entropy=True, **restriction)
    torch.testing.assert_close(ours, theirs.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert entropy is not None
    torch.testing.assert_close(entropy, torch.special.entr(theirs.exp()).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("restriction", [{"top_k": 2, "top_p": 0.5}, {"min_p": 0.9}])
def test_a_target_outside_the_kept_set_stays_finite(restriction: dict[str, Any]) -> None:
    hidden_states, weight, bias, _ = make_inputs()
    rarest = torch.nn.functional.linear(hidden_states, weight, bias).argmin(1)
    log_prob, entropy = selected_log_probs(hidden_states, weight, bias, rarest, with_entropy=True, **restriction)
    assert entropy is not None
    (log_prob.sum() + entropy.sum()).backward()
    for tensor in (log_prob, entropy, hidden_states.grad, weight.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    hidden_states, weight, _, targets = make_inputs(rows=64, width=32, vocabulary=500, dtype=dtype)
    log_prob, entropy = selected_log_probs(hidden_states, weight, None, targets, chunk_size=5, with_entropy=True)
    assert entropy is not None
    assert log_prob.dtype == entropy.dtype == torch.float32
    exact = full_logits_reference(hidden_states.detach().double(), weight.detach().double(), None, targets, 1.0)
    torch.testing.assert_close(log_prob.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=1e-5, atol=1e-5)
    log_prob.sum().backward()
    wide = [hidden_states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    full_logits_reference(wide[0], wide[1], None, targets, 1.0)[0].sum().backward()
    for narrow, exact_input in zip((hidden_states, weight), wide, strict=True):
        assert narrow.grad is not None
        assert narrow.grad.dtype == dtype
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(narrow.grad.double(), exact_input.grad, rtol=2 * unit, atol=2 * unit)


@pytest.mark.parametrize("chunk_size", [5, 64])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("rounds", [True, False])
def test_gradients_of_bfloat16_on_a_cpu_are_those_of_full_logits(
    rounds: bool, with_entropy: bool, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 gradients equal those of full logits, with and without fast CPU products.

    Likely targets, whose gradient nearly cancels, are included.
    """
    monkeypatch.setattr(log_probs, "_rounds_gradients", lambda hidden_states: rounds)
    hidden_states, weight, bias, targets = make_inputs(rows=64, width=32, vocabulary=50, dtype=torch.bfloat16)
    with torch.no_grad():
        targets[::2] = torch.nn.functional.linear(hidden_states, weight, bias).argmax(1)[::2]
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_states, weight, bias)]
    log_prob_gradient = torch.linspace(-1, 2, 64, dtype=torch.float64)
    ours = selected_log_probs(hidden_states, weight, bias, targets, 0.8, chunk_size, with_entropy)
    theirs = full_logits_reference(exact[0], exact[1], exact[2], targets, 0.8)
    gradients = []
    for (log_prob, entropy), of in ((ours, (hidden_states, weight, bias)), (theirs, exact)):
        scalar = (log_prob * log_prob_gradient).sum()
        if with_entropy:
            assert entropy is not None
            scalar = scalar + (entropy * log_prob_gradient.flip(0)).sum()
        gradients.append(torch.autograd.grad(scalar, of))
    unit = torch.finfo(torch.bfloat16).eps
    for narrow, wide in zip(*gradients, strict=True):
        assert (narrow.double() - wide).norm() / wide.norm() < unit
        torch.testing.assert_close(narrow.double(), wide, rtol=unit, atol=unit * wide.abs().max().item())


def test_inside_autocast() -> None:
    hidden_states, weight, bias, targets = make_inputs(dtype=torch.float32)
    expected, _ = selected_log_probs(hidden_states, weight, bias, targets)
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = selected_log_probs(hidden_states, weight, bias, targets)
        mixed, _ = selected_log_probs(hidden_states.to(torch.bfloat16), weight, bias, targets)
    assert torch.equal(ours, expected)
    torch.testing.assert_close(mixed, expected, rtol=0.1, atol=0.1)
    (ours.sum() + mixed.sum()).backward()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden_states, weight, bias, targets = make_inputs()
    selected_log_probs(hidden_states, weight.detach(), bias.detach(), targets)[0].sum().backward()
    assert hidden_states.grad is not None
    assert weight.grad is None


def test_no_rows() -> None:
    hidden_states, weight, bias, targets = make_inputs(rows=0)
    log_prob, _ = selected_log_probs(hidden_states, weight, bias, targets)
    log_prob.sum().backward()
    assert log_prob.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.eq(0).all()


def test_large_logits() -> None:
    hidden_states = torch.tensor([[1e4]])
    weight = torch.tensor([[1.0], [1.0 + 1e-4], [-1.0]])
    log_prob, entropy = selected_log_probs(hidden_states, weight, None, torch.tensor([0]), with_entropy=True)
    assert entropy is not None
    assert log_prob.item() == pytest.approx(-1.3133, abs=1e-2)
    assert entropy.isfinite().all()


def test_logits_never_exist_at_once() -> None:
    """The largest tensor in forward and backward pass is a chunk of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            if isinstance(output, Tensor):
                largest = max(largest, output.numel())
            return output

    hidden_states, weight, bias, targets = make_inputs(rows=200, width=2, vocabulary=50)
    with Watch():
        log_prob, entropy = selected_log_probs(hidden_states, weight, bias, targets, 1.0, 10, with_entropy=True)
        assert entropy is not None
        (log_prob + entropy).sum().backward()
    assert largest == 10 * 50


def test_temperature_zero_is_refused() -> None:
    hidden_states, weight, bias, targets = make_inputs()
    with pytest.raises(ValueError, match="temperature=0"):
        selected_log_probs(hidden_states, weight, bias, targets, temperature=0.0)
