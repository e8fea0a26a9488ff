"""Worker extension of vLLM that loads pushed weights in place or by vLLM's reload.

    plain layers                    one foreach copy into the live tensors (`vllm_live_weights.py`)
    plain layers, packed on a CPU   an unpacked tensor ───────────────────▶ written in place
                                    a matrix that exists packed only ─────▶ scratch, packed after its last shard
    everything else                 vLLM's layer-wise reload: every tensor made anew, processed, copied back

Plain layers are linear layers and embeddings without quantization, norms and attention: their tensors equal those of a
checkpoint. vLLM's reload needs two more copies of the model, and packs embeddings that no matrix product uses.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchgrpo.rollout.engines.vllm_live_weights import LiveWeights, UnmappableModelError
from torchgrpo.rollout.weights.transports.shared_memory import MappedWeights
from torchgrpo.rollout.weights.weight_update import NamedTensors, WeightUpdate

log = logging.getLogger(__name__)


class WeightReceiver:
    """Worker extension of vLLM (`worker_extension_cls`) that loads pushed weights.

    live_weights: map of the live tensors, made at the first push into plain layers.
    reload_reason: reason why a model of plain layers has no such map.
    """

    live_weights: LiveWeights | None = None
    reload_reason: str | None = None

    @torch.no_grad()
    def receive_pushed_weights(self: Any, weights: NamedTensors) -> None:
        """Loads pushed weights.

        Raises RuntimeError if a matrix received some of its shards only, or if a name or a shape does not fit.
        """
        model = self.get_model()
        if not _is_plain(model, self.vllm_config):
            self.reload_weights(weights_iterator=iter(weights))
        elif _has_packed_matrices(model):
            _load_in_place(model, weights)
        else:
            self.copy_pushed_weights(model, WeightUpdate.from_pairs(weights))

    def copy_pushed_weights(self: Any, model: nn.Module, update: WeightUpdate) -> None:
        """Copies pushed weights into the live tensors, or reloads a model without a map."""
        if self.live_weights is not None and not self.live_weights.is_for(model, update.names):
            self.live_weights = None
        if self.live_weights is None and self.reload_reason is None:
            try:
                self.live_weights = LiveWeights.from_model(model, update.tensors)
            except UnmappableModelError as error:
                self.reload_reason = str(error)
                log.warning("vLLM reloads the weights at every push, which is slower than a copy: %s", error)
        if self.live_weights is None:
            self.reload_weights(weights_iterator=iter(update))
        else:
            self.live_weights.copy(update)

    def receive_mapped_weights(self: Any, handle: MappedWeights, names: frozenset[str]) -> None:
        """Loads pushed weights of the given names from shared memory."""
        self.receive_pushed_weights(pair for pair in handle.open() if pair[0] in names)

    def forget_reload_info(self: Any) -> None:
        """Removes vLLM's reload information of the layers, before the engine ends.

        After a reload this information holds references to the layers. Their memory would outlive the engine, and
        vLLM would not start another engine with sleep mode beside it.
        """
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        model = vars(self.model_runner).get("model")  # missing if the engine has ended before
        for layer in model.modules() if model is not None else ():
            LAYERWISE_INFO.pop(layer, None)


def _is_plain(model: nn.Module, config: Any) -> bool:
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

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
    return alone and all(map(plain, model.modules()))


def _has_packed_matrices(model: nn.Module) -> bool:
    """Whether vLLM's CPU build computes with other matrices than the parameters.

    Its layers then have a function `cpu_linear` over a packed matrix.
    """
    functions = (vars(layer).get("cpu_linear") for layer in model.modules())
    return any(function not in (None, nn.functional.linear) for function in functions)


def _load_in_place(model: Any, weights: NamedTensors) -> None:
    """Loads a push into a plain model on a CPU, in place."""
    from vllm.model_executor.layers.linear import LinearBase

    linear: list[Any] = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
    # vLLM leaves an empty tensor in place of a packed matrix.
    scratch: list[torch.Tensor] = []
    matrices = [_PackedMatrix(layer, scratch) for layer in linear if layer.weight.numel() == 0]
    try:
        for matrix in matrices:
            matrix.expect_shards()
        parameter_names = model.load_weights(iter(weights))
    finally:
        for matrix in matrices:
            matrix.restore_empty_matrix()
    incomplete = [matrix.layer.prefix for matrix in matrices if matrix.num_arrived]
    if incomplete:
        raise RuntimeError(f"the push delivered only some shards of {len(incomplete)} matrices: {incomplete[:3]}")
    _pack_heads(model, parameter_names)


def _pack_heads(model: Any, parameter_names: set[str] | None) -> None:
    """Packs written output heads, and drops the packed copy of other embeddings.

    No matrix product uses an embedding that is not a head.
    parameter_names: names of the parameters written; None if the model does not report them.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    parameters = dict(model.named_parameters(remove_duplicate=False))
    written = {id(one) for name, one in parameters.items() if parameter_names is None or name in parameter_names}
    # Modules are listed under all their names, since a tied head may be the embedding itself.
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


class _PackedMatrix:
    """Linear layer whose matrix exists in vLLM's packed format only, during a push.

    scratch: flat buffers that no matrix uses at the moment, reused from layer to layer.
    num_arrived: elements that arrived and are not packed yet.
    """

    def __init__(self, layer: Any, scratch: list[torch.Tensor]) -> None:
        self.layer = layer
        self.num_arrived = 0
        self._buffers = scratch
        self._empty = layer.weight
        self._expected_layer_weight: Any = None
        self._matrix: Any = None
        self._flat = torch.empty(0)
        self._weight_loader: Callable[..., None]

    def expect_shards(self) -> None:
        """Gives the layer a weight without memory, whose loader collects shards.

        Its shape is that of the matrix at loading.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        metadata = get_layerwise_info(self.layer).restore_metadata[0]["weight"]
        self._expected_layer_weight = restore_layer_refs(to_meta_tensor(metadata), self.layer)
        self._weight_loader = inspect.unwrap(
            self._expected_layer_weight.weight_loader
        )  # vLLM's reload leaves a wrapper around it
        self._expected_layer_weight.weight_loader = self._take_shard
        self.layer.weight = self._expected_layer_weight

    def _take_shard(self, param: Any, shard: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._matrix is None:
            size = self._expected_layer_weight.numel()
            self._flat = self._buffers.pop() if self._buffers else torch.empty(0)
            if self._flat.numel() < size or self._flat.dtype != self._expected_layer_weight.dtype:
                self._flat = torch.empty(size, dtype=self._expected_layer_weight.dtype)
            self._matrix = self._flat[:size].view(self._expected_layer_weight.shape)
            self._matrix.__class__ = self._expected_layer_weight.__class__
            self._matrix.__dict__ = self._expected_layer_weight.__dict__.copy()
        self._weight_loader(self._matrix, shard, *args, **kwargs)
        self.num_arrived += shard.numel()
        if self.num_arrived == self._matrix.numel():
            self.layer.weight = self._matrix
            self.layer.quant_method.process_weights_after_loading(self.layer)
            self._buffers.append(self._flat)
            self._matrix, self.num_arrived = None, 0

    def restore_empty_matrix(self) -> None:
        """Restores the packed matrix if no shard arrived."""
        if self.layer.weight is self._expected_layer_weight:
            self.layer.weight = self._empty
