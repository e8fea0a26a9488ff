"""What vLLM's workers do with a push: write into the tensors that exist, or reload as vLLM does.

    on a CPU, plain layers only     a tensor that the layer kept ─────────▶ written in place
                                    a matrix that it has only packed ─────▶ scratch, packed once its last shard came
    everything else                 vLLM's layer-wise reload: every tensor made anew, processed, copied back

Plain are linear layers and embeddings without quantization, norms and attention: their tensors hold what a checkpoint
holds. The second way costs two more copies of the model, and packs embeddings that nobody multiplies with.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchgrpo.rollout.weights.outgoing import NamedTensors
from torchgrpo.rollout.weights.transports.shared_memory import MappedWeights


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    @torch.no_grad()
    def receive(self: Any, weights: NamedTensors) -> None:
        """Raises RuntimeError when a matrix got some of its shards only."""
        model = self.get_model()
        if _plain(model, self.vllm_config):
            _load_in_place(model, weights)
        else:
            self.reload_weights(weights_iterator=iter(weights))

    def receive_mapped(self: Any, handle: MappedWeights, names: frozenset[str]) -> None:
        """Through shared memory; what has these names."""
        self.receive(pair for pair in handle.open() if pair[0] in names)

    def forget(self: Any) -> None:
        """Before the engine ends: vLLM's notes on how to reload each layer hold, once it was reloaded, the layer too.
        With them its memory would outlive the engine, and vLLM starts no other engine that sleeps beside it."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        model = vars(self.model_runner).get("model")  # gone where the engine has ended before
        for layer in model.modules() if model is not None else ():
            LAYERWISE_INFO.pop(layer, None)


def _plain(model: nn.Module, config: Any) -> bool:
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.platforms import current_platform

    def plain(layer: Any) -> bool:
        if isinstance(layer, LinearBase):
            return type(layer.quant_method) is UnquantizedLinearMethod
        if isinstance(layer, VocabParallelEmbedding):
            return type(layer.quant_method) is UnquantizedEmbeddingMethod
        if is_deferred_attention_layer(layer):
            return type(layer) is Attention
        if isinstance(layer, RMSNorm | nn.LayerNorm):
            return True
        return not layer._parameters and layer._buffers.keys() <= layer._non_persistent_buffers_set

    alone = config.parallel_config.world_size == 1 and config.lora_config is None
    return current_platform.is_cpu() and alone and all(map(plain, model.modules()))


def _load_in_place(model: Any, weights: NamedTensors) -> None:
    """One push into a plain model on a CPU."""
    from vllm.model_executor.layers.linear import LinearBase

    linear: list[Any] = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
    # vLLM leaves an empty tensor where it has packed a matrix.
    scratch: list[torch.Tensor] = []
    matrices = [_Packed(layer, scratch) for layer in linear if layer.weight.numel() == 0]
    try:
        for matrix in matrices:
            matrix.expect()
        loaded = model.load_weights(iter(weights))
    finally:
        for matrix in matrices:
            matrix.close()
    partly = [matrix.layer.prefix for matrix in matrices if matrix.arrived]
    if partly:
        raise RuntimeError(f"the push brought some shards of {len(partly)} matrices only: {partly[:3]}")
    _pack_heads(model, loaded)


def _pack_heads(model: Any, loaded: set[str] | None) -> None:
    """An embedding that is no head is not multiplied with: what vLLM packed of it is dropped.

    loaded: the parameters that were written; None where the model does not say.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    parameters = dict(model.named_parameters(remove_duplicate=False))
    written = {id(one) for name, one in parameters.items() if loaded is None or name in loaded}
    # Under each of its names: a tied head may be the embedding itself.
    named = model.named_modules(remove_duplicate=False)
    embeddings: list[tuple[str, Any]]
    embeddings = [(name, layer) for name, layer in named if isinstance(layer, VocabParallelEmbedding)]
    heads = {layer for name, layer in embeddings if name.endswith("lm_head")}
    for _, layer in embeddings:
        if id(layer.weight) not in written:
            continue
        if layer in heads or isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
        else:
            layer.cpu_linear = nn.functional.linear


class _Packed:
    """A linear layer whose matrix vLLM has in its own format alone, while a push arrives.

    scratch: flat buffers that no matrix needs now; they stay warm from one layer to the next.
    arrived: elements that came and are not packed yet.
    """

    def __init__(self, layer: Any, scratch: list[torch.Tensor]) -> None:
        self.layer = layer
        self.arrived = 0
        self._buffers = scratch
        self._empty = layer.weight
        self._expected: Any = None
        self._matrix: Any = None
        self._flat = torch.empty(0)
        self._fill: Callable[..., None]

    def expect(self) -> None:
        """The layer shows the matrix that vLLM noted when it loaded the model, without memory, for shards to come."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        noted = get_layerwise_info(self.layer).restore_metadata[0]["weight"]
        self._expected = restore_layer_refs(to_meta_tensor(noted), self.layer)
        self._fill = inspect.unwrap(self._expected.weight_loader)  # a reload by vLLM leaves its wrapper
        self._expected.weight_loader = self._take
        self.layer.weight = self._expected

    def _take(self, param: Any, shard: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._matrix is None:
            size = self._expected.numel()
            self._flat = self._buffers.pop() if self._buffers else torch.empty(0)
            if self._flat.numel() < size or self._flat.dtype != self._expected.dtype:
                self._flat = torch.empty(size, dtype=self._expected.dtype)
            self._matrix = self._flat[:size].view(self._expected.shape)
            self._matrix.__class__ = self._expected.__class__
            self._matrix.__dict__ = self._expected.__dict__.copy()
        self._fill(self._matrix, shard, *args, **kwargs)
        self.arrived += shard.numel()
        if self.arrived == self._matrix.numel():
            self.layer.weight = self._matrix
            self.layer.quant_method.process_weights_after_loading(self.layer)
            self._buffers.append(self._flat)
            self._matrix, self.arrived = None, 0

    def close(self) -> None:
        """Of a matrix that got no shard, the packed one stays."""
        if self.layer.weight is self._expected:
            self.layer.weight = self._empty
