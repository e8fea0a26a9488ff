"""Checks the log-probs of a GPU: values, gradients, and passes over the logits."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from tests.pretend_gpu import pretend_gpus
from tests.training.test_log_probs import RESTRICTIONS, full_logits_reference, make_inputs
from torchgrpo.plan.microbatch_sizes import automatic_chunk_size
from torchgrpo.run.dry_run.tensor_tracker import OperationObserver
from torchgrpo.training import fused_log_probs, log_probs
from torchgrpo.training.log_probs import selected_log_probs
from torchgrpo.training.logit_operations import (
    compile_operation,
    compute_logit_gradient,
    compute_token_statistics,
    run_compiled,
)

WIDTH, VOCABULARY = 2048, 151936
"""Head of a model of 3B."""
STATISTICS = "torchgrpo::token_statistics"


@pytest.fixture
def fused_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the GPU's function on a CPU."""
    monkeypatch.setattr(log_probs, "fuses_logits", lambda device: True)


def score_and_differentiate(
    inputs: tuple[Tensor, ...], temperature: float | Tensor, chunk_size: int | None, **restriction: Any
) -> list[Tensor]:
    """Returns log-probs, entropies, and gradients of rows, head and bias."""
    log_prob, entropy = selected_log_probs(*inputs, temperature, chunk_size, True, **restriction)
    assert entropy is not None
    slopes = torch.linspace(-1, 2, len(log_prob), dtype=log_prob.dtype)
    scalar = (log_prob * slopes).sum() + (entropy * slopes.flip(0)).sum()
    return [log_prob, entropy, *torch.autograd.grad(scalar, inputs[:3])]


@pytest.mark.parametrize("restriction", [{}, *RESTRICTIONS])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, None])
@pytest.mark.parametrize("per_row", [True, False])
def test_equals_the_function_of_a_cpu(
    restriction: dict[str, Any], chunk_size: int | None, per_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs()
    temperature = torch.linspace(0.5, 1.6, len(inputs[0]), dtype=torch.float64) if per_row else 0.7
    theirs = score_and_differentiate(inputs, temperature, 5, **restriction)
    monkeypatch.setattr(log_probs, "fuses_logits", lambda device: True)
    ours = score_and_differentiate(inputs, temperature, chunk_size, **restriction)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("restriction", [{}, *RESTRICTIONS])
def test_gradients_by_finite_differences(restriction: dict[str, Any], fused_head: None) -> None:
    hidden_states, weight, bias, targets = make_inputs(rows=5, width=3, vocabulary=9)

    def log_prob_and_entropy(hidden_states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return selected_log_probs(hidden_states, weight, bias, targets, 0.7, 2, True, **restriction)

    assert torch.autograd.gradcheck(log_prob_and_entropy, (hidden_states, weight, bias))
    assert torch.autograd.gradcheck(lambda *inputs: log_prob_and_entropy(*inputs)[0], (hidden_states, weight, bias))
    assert torch.autograd.gradcheck(lambda *inputs: log_prob_and_entropy(*inputs)[1], (hidden_states, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_half_precision_gives_the_gradients_of_full_logits(dtype: torch.dtype, with_entropy: bool, size: float) -> None:
    """Compares gradients of half-precision rows with those of full logits in float64.

    A GPU multiplies half-precision factors; a simulated one converts them to float32 first, with equal results.
    Likely targets, whose gradient nearly cancels, are included, and slopes below the range of float16.
    """
    inputs = make_inputs(rows=64, width=32, vocabulary=50, dtype=dtype)
    with torch.no_grad():
        inputs[3][::2] = torch.nn.functional.linear(*inputs[:3]).argmax(1)[::2]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs[:3]]
    slopes = size * torch.linspace(-1, 2, 64, dtype=torch.float64)

    def gradients(log_prob: Tensor, entropy: Tensor | None, of: Any) -> tuple[Tensor, ...]:
        scalar = (log_prob * slopes.to(log_prob)).sum()
        if with_entropy:
            assert entropy is not None
            scalar = scalar + (entropy * slopes.flip(0).to(entropy)).sum()
        return torch.autograd.grad(scalar, of)

    theirs = gradients(*full_logits_reference(exact[0], exact[1], exact[2], inputs[3], 1.0), exact)
    with pretend_gpus(1):
        moved = [tensor.detach().to("cuda:0", torch.float32 if i == 1 else None) for i, tensor in enumerate(inputs)]
        of = [tensor.requires_grad_() for tensor in moved[:3]]
        log_prob, entropy = selected_log_probs(of[0], of[1], of[2], moved[3], 1.0, 5, with_entropy)
        assert log_prob.dtype == torch.float32
        ours = [gradient.cpu() for gradient in gradients(log_prob, entropy, of)]
    for narrow, wide in zip(ours, theirs, strict=True):
        unit = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(narrow.double(), wide, rtol=unit, atol=unit * wide.abs().max().item())


def test_a_frozen_head_and_no_rows(fused_head: None) -> None:
    hidden_states, weight, bias, targets = make_inputs()
    selected_log_probs(hidden_states, weight.detach(), bias.detach(), targets)[0].sum().backward()
    assert hidden_states.grad is not None
    assert weight.grad is None
    selected_log_probs(hidden_states[:0], weight, bias, targets[:0])[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(0).all()


def test_a_second_backward_pass_gives_the_same_gradients(fused_head: None) -> None:
    inputs = make_inputs()
    log_prob, _ = selected_log_probs(*inputs, 0.8, 5)
    first = torch.autograd.grad(log_prob.sum(), inputs[:3], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(log_prob.sum(), inputs[:3]), first, rtol=0, atol=0)


class _LogitBytes(OperationObserver):
    """Counts the bytes of operands as large as logits or head.

    Log-sum-exp and entropy read the logits twice: for the maximum, and for the sums.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_operation(self, func: Any, arguments: Any, out: Any) -> None:
        if func.is_view or func.name().startswith("aten::empty"):
            return
        tensors = [leaf for leaf in tree_leaves((arguments, out)) if isinstance(leaf, Tensor)]
        if func.name().endswith("_out"):
            tensors.pop()  # the argument `out` is the result
        size = sum(one.numel() * one.element_size() for one in tensors if one.numel() >= VOCABULARY * 64)
        self.count += 2 * size if func.name() == STATISTICS else size


@pytest.mark.parametrize("count", [3532, 15360])
def test_passes_over_the_logits(count: int, fused_head: None) -> None:
    """Forward and backward pass read and write few times the bytes of all float32 logits."""
    with FakeTensorMode():
        hidden_states = torch.empty(count, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(VOCABULARY, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(count, dtype=torch.int64)
        with _LogitBytes() as forward:
            log_prob, entropy = selected_log_probs(hidden_states, weight, None, targets, with_entropy=True)
        assert entropy is not None
        with _LogitBytes() as backward:
            (log_prob.sum() + entropy.sum()).backward()
    rows = automatic_chunk_size(VOCABULARY, WIDTH, on_cpu=False)
    chunk_bytes = -(-count // rows) * rows * VOCABULARY * 4
    assert forward.count <= 6 * chunk_bytes
    assert backward.count <= 8 * chunk_bytes


def operation_inputs(rows: int = 9, vocabulary: int = 3000) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the inputs of `compute_token_statistics`, and the further ones of `compute_logit_gradient`."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(rows, vocabulary, generator=generator)
    logits[::3, ::2] = -torch.inf
    targets = 2 * torch.randint(0, vocabulary // 2, (rows,), generator=generator) + 1
    targets[1] = logits[1].argmax()
    slopes = torch.randn(2, rows, generator=generator)
    return [logits, targets, torch.linspace(0.5, 1.5, rows)], [*slopes, torch.arange(vocabulary)]


@pytest.mark.long
def test_compiled_operations_equal_float64() -> None:
    """Compiled operations equal float64, and allocate no intermediate logits.

    The kernels of a GPU are compiled from the same functions.
    """
    inputs, more = operation_inputs()
    wide, wide_more = (
        [each.double() if each.is_floating_point() else each for each in tensors] for tensors in (inputs, more)
    )
    exact = compute_token_statistics(*wide)
    statistics, matrices = compile_and_run(compute_token_statistics, *inputs)
    assert matrices == 0
    for ours, theirs in zip(statistics, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    gradient_inputs: list[Any] = [*wide, *exact[1:], *wide_more, torch.float64]
    gradient = compute_logit_gradient(*gradient_inputs)
    for dtype in (torch.bfloat16, torch.float32):
        compiled, matrices = compile_and_run(compute_logit_gradient, *inputs, *statistics[1:], *more, dtype)
        assert matrices == 1, "the result"
        assert compiled.dtype == dtype
        unit = max(torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(compiled.double(), gradient, rtol=unit, atol=1e-5)


@pytest.mark.long
def test_all_chunks_share_one_compiled_graph(monkeypatch: pytest.MonkeyPatch, fused_head: None) -> None:
    """Chunks of other sizes and places do not compile again."""
    torch.compiler.reset()
    compile_operation.cache_clear()
    for name, function in (("token_statistics", compute_token_statistics), ("logit_gradient", compute_logit_gradient)):
        monkeypatch.setattr(fused_log_probs, name, partial(run_compiled, function))
    counters.clear()
    for rows, chunk_size in ((20, 8), (23, 8), (17, 9), (8, 8)):
        inputs = make_inputs(rows=rows, vocabulary=31)
        log_prob, entropy = selected_log_probs(*inputs, 0.7, chunk_size, with_entropy=True)
        assert entropy is not None
        (log_prob.sum() + entropy.sum()).backward()
    assert counters["stats"]["unique_graphs"] == 2


def compile_and_run(function: Callable[..., Any], *inputs: Any) -> tuple[Any, int]:
    """Returns the results of the compiled function, and its number of [C, V] tensors."""
    torch.compiler.reset()
    compile_operation.cache_clear()
    with fresh_cache():
        result, codes = run_and_get_code(compile_operation(function), *inputs)
    shapes = re.findall(r"empty_strided_cpu\(\((.*?)\)", "".join(codes))
    assert shapes
    return result, sum(len(re.findall(r"s\d+", shape)) > 1 for shape in shapes)
