"""The learner's model computing as an engine does, to see what the engine's dtype alone does to this very model.

    float32 learner ──bfloat16 weights, bfloat16 residual stream──▶ the scores that a bfloat16 engine may give
    bfloat16 learner ──float32 everywhere──▶ the scores without rounding

One layer's weights exist in the other dtype at a time, so this fits beside whatever else is in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from training.adapters import causal_model
from training.sharding import Within, directly

_HEAD_VALUES = 1 << 26  # of the output head that are converted at a time
_TOGETHER = 1 << 9  # tokens with padding that are scored at once: their logits are to stay small
_FLOAT8 = torch.float8_e4m3fn
TF32 = "tf32"
_TF32_CUT = 13  # bits of float32's 23 that TF32 has not


Change = Callable[[torch.Tensor], torch.Tensor]


def unchanged(values: torch.Tensor) -> torch.Tensor:
    """The dtype rounds, and nothing else."""
    return values


def to_float8(values: torch.Tensor) -> torch.Tensor:
    """As vLLM's online `fp8` does it: a weight by one scale for each of its rows, an input by one for each token."""
    scale = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(_FLOAT8).max
    return ((values.float() / scale).to(_FLOAT8).float() * scale).to(values.dtype)


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """As products of float32 on a GPU that take 10 bits of each factor's mantissa; vLLM's attention does."""
    bits = values.float().contiguous().view(torch.int32)
    return ((bits + (1 << (_TF32_CUT - 1))) >> _TF32_CUT << _TF32_CUT).view(torch.float32)


@dataclass(frozen=True)
class Arithmetic:
    """How an engine computes.

    dtype: of its weights and of what its layers hand on. factors: what happens beside to the two factors of a linear
    layer's product. step: from 1 to the next number, of what layers take. products_only: other layers take float32.
    """

    dtype: torch.dtype
    factors: Change
    step: float
    products_only: bool = False

    @classmethod
    def of(cls, name: str, float8: bool = False) -> "Arithmetic":
        """name: a dtype's, or `tf32`. float8: matrices are quantized online."""
        if float8:
            return replace(cls.of("float32" if name == TF32 else name), factors=to_float8)
        if name == TF32:
            return cls(torch.float32, to_tf32, torch.finfo(torch.float32).eps * (1 << _TF32_CUT), True)
        dtype: torch.dtype = getattr(torch, name)
        return cls(dtype, unchanged, torch.finfo(dtype).eps)


EXACT = Arithmetic.of("float32")


def elsewhere(step: float, seed: int) -> Change:
    """Up or down by chance within half a step, as operations in another order round at other places."""
    generators: dict[torch.device, torch.Generator] = {}

    def moved(values: torch.Tensor) -> torch.Tensor:
        if values.device not in generators:
            generators[values.device] = torch.Generator(values.device).manual_seed(seed)
        chance = torch.rand(values.shape, generator=generators[values.device], device=values.device)
        return (values.float() * (1 + step / 2 * (2 * chance - 1))).to(values.dtype)

    return moved


@contextmanager
def computing_in(model: PreTrainedModel, arithmetic: Arithmetic, moved: Change = unchanged) -> Iterator[None]:
    """Every layer computes so; the output head makes float32 logits from operands of the dtype, as vLLM's float32 head
    does. The weights themselves are not touched.

    moved: what happens first to what layers take, where it is rounded.
    """
    head, dtype = model.get_output_embeddings(), arithmetic.dtype
    with ExitStack() as undo:
        for module in model.modules():
            if module is head:
                undo.enter_context(forward_replaced(head, partial(_head_logits, head, dtype=dtype)))
            elif isinstance(module, nn.Embedding):
                # Rounding commutes with picking rows.
                in_dtype = module.register_forward_hook(lambda module, arguments, rows: rows.to(dtype))
                undo.callback(in_dtype.remove)
            elif module._parameters:
                undo.enter_context(_computing_in(module, arithmetic, moved))
        yield


@contextmanager
def forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """The module's hooks stay, and work around the new one."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


def _head_logits(head: Any, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 [..., V] from `hidden` and the head's weight in `dtype`, some rows of the weight at a time."""
    hidden = hidden.to(head.weight.device, dtype).float()
    rows = max(1, _HEAD_VALUES // head.weight.shape[1])
    parts = [hidden @ part.to(dtype).float().T for part in head.weight.split(rows)]
    logits = torch.cat(parts, -1)
    return logits if head.bias is None else logits + head.bias.to(dtype).float()


@contextmanager
def parameters_replaced(
    module: nn.Module, replaced: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """For the time of each of its forwards a module's own parameters are what `replaced` makes of their names and
    values. Of two such contexts the inner one is given what the outer one made."""
    own: dict[str, nn.Parameter | None] = {}

    def before(module: nn.Module, arguments: Any) -> None:
        own.update(module._parameters)
        for name, parameter in own.items():
            if parameter is not None:
                made: Any = replaced(name, parameter)
                module._parameters[name] = made

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        module._parameters.update(own)
        own.clear()

    first = module.register_forward_pre_hook(before)
    last = module.register_forward_hook(after, prepend=True, always_call=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()


@contextmanager
def _computing_in(module: nn.Module, arithmetic: Arithmetic, moved: Change) -> Iterator[None]:
    linear, dtype = isinstance(module, nn.Linear), arithmetic.dtype
    factors = arithmetic.factors if linear else unchanged
    moved = unchanged if arithmetic.products_only and not linear else moved

    def replaced(name: str, values: torch.Tensor) -> torch.Tensor:
        in_dtype = values.detach().to(dtype)
        return factors(in_dtype) if values.ndim > 1 else in_dtype

    def rounded(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return factors(moved(value.to(dtype)))

    def inputs(module: nn.Module, arguments: Any, named: Any) -> Any:
        return tree_map(rounded, (arguments, named))

    hook = module.register_forward_pre_hook(inputs, with_kwargs=True)
    try:
        with parameters_replaced(module, replaced):
            yield
    finally:
        hook.remove()


@torch.no_grad()
def learner_scores(
    model: nn.Module, sequences: Sequence[Sequence[int]], temperature: float, within: Within = directly
) -> list[list[float]]:
    """Log-probs of all tokens but the first under the learner's weights, [count][length - 1].

    Compiled layers compute as they are written: each dtype and hook would be compiled anew for a few sequences.

    within: where the model's parameters are whole.
    """
    causal = causal_model(model)
    was_training = causal.training
    model.eval()
    scores = []
    for together in _batches(sequences):
        # Causal: the padding behind a sequence does not change it.
        ids = pad_sequence([torch.tensor(list(sequence)) for sequence in together], batch_first=True)
        with torch.compiler.set_stance("force_eager"):
            logits = within(partial(_logits, causal, ids))
        expected = ids.to(logits.device)[:, 1:, None]
        for sequence, row, tokens in zip(together, logits, expected, strict=True):
            count = len(sequence) - 1
            log_probs = (row[:count].float() / temperature).log_softmax(-1)
            picked: Any = log_probs.gather(-1, tokens[:count])
            scores.append(picked[:, 0].tolist())
    model.train(was_training)
    return scores


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Neighbours, as many as fit."""
    first = longest = 0
    for place, sequence in enumerate(sequences):
        longest = max(longest, len(sequence))
        if place > first and (place - first + 1) * longest > _TOGETHER:
            yield sequences[first:place]
            first, longest = place, len(sequence)
    if sequences:
        yield sequences[first:]


def _logits(causal: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = causal(ids.to(causal.device)).logits
    return logits


def rounding_error(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    arithmetic: Arithmetic,
    within: Within = directly,
    draws: int = 1,
) -> list[list[float]]:
    """What the learner's own dtype and the engine's arithmetic may do to each score together, [count][length - 1].

    The distance of either from float32, where no rounding is left to speak of. Two computations in one dtype round
    at different places, so they are not nearer to each other than that.

    draws: times that the engine's distance is tried, rounded at other places each time; the root of their mean square
        counts.
    """
    causal = causal_model(model)

    def scores_in(one: Arithmetic, moved: Change = unchanged) -> torch.Tensor:
        with computing_in(causal, one, moved):
            return torch.tensor(learner_scores(model, sequences, 1.0, within))

    own = torch.tensor(learner_scores(model, sequences, 1.0, within))
    rounded = any(parameter.dtype != torch.float32 for parameter in causal.parameters())
    exact = scores_in(EXACT) if rounded else own
    error = (own - exact).abs()
    if arithmetic != EXACT:
        ways = [unchanged, *(elsewhere(arithmetic.step, seed) for seed in range(1, draws))]
        squares = [(scores_in(arithmetic, moved) - exact).square() for moved in ways]
        error += torch.stack(squares).mean(0).sqrt()
    listed: list[list[float]] = error.tolist()
    return listed
