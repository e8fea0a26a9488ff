"""Dispatch modes and patches with which the learner's own code runs on fake tensors.

Fake tensors have a shape but no memory. Token ids, lengths and masks are small real tensors. The CPU build of
PyTorch has no autograd for fake CUDA tensors, so the fake tensors are on the CPU, and code that depends on the
device is patched to behave as on a GPU.
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
from torchgrpo.run.dry_run.tensor_tracker import is_device_query
from torchgrpo.training import (
    learner_models,
    log_probs,
    master_weights,
    model_loading,
    packed_attention,
    worker,
)
from torchgrpo.training.packed_attention import Segments

aten = torch.ops.aten
_INTEGER_DTYPES = (torch.int64, torch.bool)
_FACTORIES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


class FastFakeTensorMode(FakeTensorMode):
    """A fake tensor mode with a faster cache of results.

    The cache keys omit sparse, quantized, complex and symbolic tensors, which a dry run does not contain.
    """

    def _cache_key(self, state: Any, func: Any, args: Iterable[object], kwargs: Mapping[str, object]) -> Any:
        key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        _append_key(args, key)
        key += kwargs
        _append_key(kwargs.values(), key)
        return tuple(key)

    def _get_output_tensor_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Sequence[Any]
    ) -> FakeTensor | None:
        metadata = entry.metadata
        if metadata is None or entry.inplace_idx is not None:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        with in_kernel_invocation_manager(self):
            out = torch.empty_strided(
                metadata.shape,
                metadata.stride,
                dtype=metadata.dtype,
                device="meta",
                requires_grad=metadata.requires_grad,
            )
            if func.is_view:
                storage = args[entry.view_idx].untyped_storage()
                out.set_(storage, metadata.storage_offset, metadata.shape, metadata.stride)
        return FakeTensor(self, out, metadata.device)


def _append_key(arguments: Iterable[object], key: list[object]) -> None:
    """Appends the properties of arguments that determine a fake result to the cache key.

    The key of a tensor has its metadata without values. The key of a number has its type too, since 1 equals 1.0.
    """
    for argument in arguments:
        if type(argument) is FakeTensor and argument.constant is None:
            key += argument.dtype, argument.shape, argument.stride(), argument.storage_offset()
            key += argument.requires_grad, argument.fake_device
        elif isinstance(argument, Tensor):
            raise _BypassDispatchCache("a tensor with values")
        elif isinstance(argument, list | tuple):
            key.append(len(argument))
            _append_key(argument, key)
        else:
            key += type(argument), argument


class RealIntegerMode(TorchDispatchMode):
    """Computes real results in fake mode for inputs that are real integers or masks."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_device_query(func, args):
            return args[0].fake_device
        if func is aten._unsafe_view.default:
            func = aten.view.default  # shares the storage, and its results are cached
        if func is aten.index.Tensor and isinstance(args[0], FakeTensor):
            args = (args[0], [indices for index in args[1] for indices in _true_indices(index)])
        if FakeTensor not in types and _is_real(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_real(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        return func in _FACTORIES or kwargs.get("dtype") in _INTEGER_DTYPES
    return all(type(tensor) is Tensor and not tensor.is_floating_point() for tensor in tensors)


def _true_indices(index: Tensor | None) -> list[Tensor | None]:
    """Converts a real mask to the indices of its true elements.

    Fake tensors do not know the number of true elements.
    """
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return [index]
    with unset_fake_temporarily():
        return [*index.nonzero().unbind(1)]


class FiniteValueMode(TorchFunctionMode):
    """Returns constants when code reads values of fake tensors: numbers are 1, conditions are true."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CONSTANT_RESULTS and isinstance(args[0], FakeTensor):
            return _CONSTANT_RESULTS[func]
        return func(*args, **(kwargs or {}))


_CONSTANT_RESULTS: dict[Any, object] = {
    Tensor.__bool__: True,
    Tensor.__float__: 1.0,
    Tensor.item: 1.0,
    Tensor.tolist: [1.0],
    torch.equal: True,
    torch.allclose: True,
}


@contextmanager
def use_fake_tensors(imitates_gpu: bool) -> Iterator[None]:
    """Makes all new tensors fake inside the context, and loads models from config.json alone.

    Code that needs tensor values is disabled: checks and digests of loaded weights, the whole model from which shards
    are filled, and block masks.
    imitates_gpu: whether packed attention is one kernel, the output head is that of a GPU, and master weights have the
        large buckets of a GPU.
    """
    with ExitStack() as exit_stack:
        for module, name, replacement in (
            (model_loading, "_load", load_without_files),
            (model_loading, "check_output_head", _do_nothing),
            (model_loading, "make_skeleton", model_loading.make_local_skeleton),
            (learner_models, "make_skeleton", model_loading.make_local_skeleton),
            (learner_models, "find_shard_files", _do_nothing),
            (learner_models, "load_model", _do_nothing),
            (learner_models, "distribute_weights", _do_nothing),
            (worker, "base_digest", lambda model: ""),
        ):
            exit_stack.enter_context(patch.object(module, name, replacement))
        # The modes below have no effect in the threads in which transformers loads weights.
        exit_stack.enter_context(patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        swap = partial(_swap_tensors, torch.utils.swap_tensors)
        exit_stack.enter_context(patch.object(torch.utils, "swap_tensors", swap))
        if imitates_gpu:
            bucket = master_weights.BUCKET_ELEMENTS
            exit_stack.enter_context(patch.object(master_weights, "CPU_BUCKET_ELEMENTS", bucket))
            exit_stack.enter_context(patch.object(log_probs, "fuses_logits", lambda device: True))
            exit_stack.enter_context(patch.object(packed_attention, "FLEX_DEVICE_TYPES", ("cpu",)))
            exit_stack.enter_context(patch.object(packed_attention, "_attend_with_flex", attend_in_one_kernel))
            exit_stack.enter_context(patch.object(Segments, "block_mask_tensors", _do_nothing))
        exit_stack.enter_context(FastFakeTensorMode(allow_non_fake_inputs=True))
        exit_stack.enter_context(RealIntegerMode())  # type: ignore[no-untyped-call]
        exit_stack.enter_context(FiniteValueMode())
        yield


def _do_nothing(*arguments: object) -> None:
    """Replaces a function that reads or writes values of tensors."""


def _swap_tensors(swap: Callable[[Tensor, Tensor], None], old: Tensor, new: Tensor) -> None:
    """Swaps two tensors as `Module.to` does, without swapping fake parameters.

    A fake parameter cannot be swapped, since its mode keeps references to it.
    """
    if isinstance(old, FakeTensor):
        old.data = new.data
    else:
        swap(old, new)


def load_without_files(loader: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Replaces `_load`: lets transformers load a model from fake tensors instead of files."""
    skeleton = model_loading.make_local_skeleton(config)
    files = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in skeleton.state_dict().items()}
    architecture = loader if issubclass(loader, PreTrainedModel) else type(skeleton)
    loaded: PreTrainedModel = architecture.from_pretrained(
        None,
        config=skeleton.config,
        state_dict=files,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        device_map={"": device},
    )
    return loaded


def attend_in_one_kernel(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
) -> Tensor:
    """Replaces `_attend_with_flex`: attention without a mask and without repeated keys.

    Under autocast the inputs are cast to its dtype.
    """
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
    out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[0]
    return out.transpose(1, 2)
