"""What lets the learner's own code run without memory: fake tensors for what is large, small real ones for token ids.

The CPU build of PyTorch has no autograd for fake CUDA tensors, so fake tensors are on the CPU, and what would choose
another way on a GPU is told to.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from config.schema.models import ModelConfig
from torchgrpo.batches.batch import Batch, Scores, Tokens
from torchgrpo.plan.microbatches import rows_at_a_time
from torchgrpo.plan.plan import Plan
from torchgrpo.run.rehearsal.tracking import asks_device
from torchgrpo.training import attention, learner_models, log_probs, model_loading, worker
from torchgrpo.training.attention import Segments

aten = torch.ops.aten
_WHOLE_NUMBERS = (torch.int64, torch.bool)
_FACTORIES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


class QuickFakes(FakeTensorMode):
    """PyTorch's cache of fake results without what no rehearsal has: sparse, quantized, complex and symbolic tensors.

    A rehearsal takes two thirds of the time.
    """

    def _cache_key(self, state: Any, func: Any, args: Iterable[object], kwargs: Mapping[str, object]) -> Any:
        key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        _describe(args, key)
        key += kwargs
        _describe(kwargs.values(), key)
        return tuple(key)

    def _get_output_tensor_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Sequence[Any]
    ) -> FakeTensor | None:
        made = entry.metadata
        if made is None or entry.inplace_idx is not None:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        with in_kernel_invocation_manager(self):
            out = torch.empty_strided(
                made.shape, made.stride, dtype=made.dtype, device="meta", requires_grad=made.requires_grad
            )
            if func.is_view:
                storage = args[entry.view_idx].untyped_storage()
                out.set_(storage, made.storage_offset, made.shape, made.stride)
        return FakeTensor(self, out, made.device)


def _describe(given: Iterable[object], key: list[object]) -> None:
    """Adds what decides of a result: of a tensor all but its values, of a number its type too, for 1 is 1.0."""
    for one in given:
        if type(one) is FakeTensor and one.constant is None:
            key += one.dtype, one.shape, one.stride(), one.storage_offset()
            key += one.requires_grad, one.fake_device
        elif isinstance(one, Tensor):
            raise _BypassDispatchCache("a tensor with values")
        elif isinstance(one, list | tuple):
            key.append(len(one))
            _describe(one, key)
        else:
            key += type(one), one


class SmallIntegers(TorchDispatchMode):
    """Inside the fake mode: what is computed from real ids, lengths and masks alone is computed for real."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks_device(func, args):
            return args[0].fake_device
        if func is aten._unsafe_view.default:
            func = aten.view.default  # the same storage, and its results are remembered
        if func is aten.index.Tensor and isinstance(args[0], FakeTensor):
            args = (args[0], [place for index in args[1] for place in _places(index)])
        if FakeTensor not in types and _is_real(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_real(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        return func in _FACTORIES or kwargs.get("dtype") in _WHOLE_NUMBERS
    return all(type(tensor) is Tensor and not tensor.is_floating_point() for tensor in tensors)


def _places(index: Tensor | None) -> list[Tensor | None]:
    """A real mask as the places where it is true: how many these are, fake tensors cannot say."""
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return [index]
    with unset_fake_temporarily():
        return [*index.nonzero().unbind(1)]


class Finite(TorchFunctionMode):
    """Answers what is read from fake tensors: every number is 1, every condition holds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS and isinstance(args[0], FakeTensor):
            return _ANSWERS[func]
        return func(*args, **(kwargs or {}))


_ANSWERS: dict[Any, object] = {
    Tensor.__bool__: True,
    Tensor.__float__: 1.0,
    Tensor.item: 1.0,
    Tensor.tolist: [1.0],
    torch.equal: True,
    torch.allclose: True,
}


@contextmanager
def without_memory(as_on_a_gpu: bool) -> Iterator[None]:
    """Tensors that are made inside are fake, and models are loaded without their files, by config.json alone.

    Nothing asks for their values: no check of what was loaded, no digest of it, no whole model that
    shards are filled from.

    as_on_a_gpu: attention of packed sequences is one kernel, half-precision factors of the output head are summed as
    they are.
    """
    with ExitStack() as inside:
        for module, name, other in (
            (model_loading, "_load", load_without_files),
            (model_loading, "check_head", _nothing),
            (model_loading, "skeleton", model_loading.bare_model),
            (learner_models, "skeleton", model_loading.bare_model),
            (learner_models, "load_model", _nothing),
            (learner_models, "fill", _nothing),
            (worker, "base_digest", lambda model: ""),
        ):
            inside.enter_context(patch.object(module, name, other))
        # Threads that transformers loads with know nothing of the modes below.
        inside.enter_context(patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        swap = partial(_swap, torch.utils.swap_tensors)
        inside.enter_context(patch.object(torch.utils, "swap_tensors", swap))
        if as_on_a_gpu:
            inside.enter_context(patch.object(log_probs, "_multiplies_half", lambda device: True))
            inside.enter_context(patch.object(attention, "BLOCKED", ("cpu",)))
            inside.enter_context(patch.object(attention, "_attend_in_blocks", attend_in_one_kernel))
        inside.enter_context(QuickFakes(allow_non_fake_inputs=True))
        inside.enter_context(SmallIntegers())  # type: ignore[no-untyped-call]
        inside.enter_context(Finite())
        yield


def _nothing(*given: object) -> None:
    """In place of what reads or writes values."""


def _swap(swap: Callable[[Tensor, Tensor], None], old: Tensor, new: Tensor) -> None:
    """As `Module.to` has it: a fake parameter cannot be swapped, for its mode remembers it."""
    if isinstance(old, FakeTensor):
        old.data = new.data
    else:
        swap(old, new)


def load_without_files(
    loader: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """In place of `_load`: what transformers makes of files whose tensors are all fake."""
    bare = model_loading.bare_model(config)
    files = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in bare.state_dict().items()}
    architecture = loader if issubclass(loader, PreTrainedModel) else type(bare)
    loaded: PreTrainedModel = architecture.from_pretrained(
        None,
        config=bare.config,
        state_dict=files,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        device_map={"": device},
    )
    return loaded


def attend_in_one_kernel(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
) -> Tensor:
    """In place of `_attend_in_blocks`: no mask, no repeated keys; under autocast in its dtype."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
    out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[0]
    return out.transpose(1, 2)


def longest_rows(plan: Plan) -> Batch:
    """One microbatch of a rank, every prompt and response at its limit; a group's prompts are the same."""
    config, rows = plan.config, rows_at_a_time(plan.config, plan.shape)
    prompt, response = config.env.max_prompt_tokens, config.inference_model.max_tokens
    group = torch.arange(rows)[:, None] // config.env.repeats

    def full(width: int, value: Any) -> Tensor:
        return torch.full((rows, width), value)

    return Batch(
        tokens=Tokens(
            prompt=group.expand(-1, prompt) % 2,
            prompt_mask=full(prompt, True),
            response=full(response, 1),
            response_mask=full(response, True),
            loss_mask=full(response, True),
            batch_size=[rows],
        ),
        next=Scores(reward=full(1, 1.0), reward_status=full(1, 0), batch_size=[rows]),
        group_id=group,
        sample_log_prob=full(response, -1.0),
        policy_version=full(response, 0),
        finish_reason=full(1, 0),
        temperature=full(1, 1.0),
        ref_log_prob=full(response, -1.0),
        advantage=full(1, 1.0),
        mask=full(response, True),
        batch_size=[rows],
    )
