"""One token for every row through a Llama-like model on a CPU, bit for bit what the model's own forward computes.

Products of few rows spend their time bringing weights into the order in which a processor multiplies them, and the rest
goes into Python. So the weights are brought into that order once for many steps (`pack`), and the layers' parts are
called from here, without what a model's own forward does around them. Packed float32 products add up in another order:
there the last bits differ.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.engines.running_cache import RunningCache

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type` of what has the layers that `_Layer` knows."""
_FEW = 64
"""Rows up to which float32 products are faster packed."""
_LARGE = 2**20
"""Bytes of a matrix from which on its product is: a smaller one stays in the processor's cache."""
_WORTH = 4
"""Steps after which packing, which takes as long as three, is expected to pay: answers are seldom shorter than twice
what they have."""


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    known: dict[torch.dtype, Callable[[], bool]] = {
        torch.float32: lambda: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in known and known[dtype]()


class _Product:
    """Linear layers with the same input [rows, in], one product when packed. Returns [rows, out] of each."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Sequence[Tensor]:
        if self._packed is None:
            return [layer(rows) for layer in self._layers]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        parts: Sequence[Tensor] = out.split(self._sizes, -1)
        return parts

    def pack(self) -> None:
        weights = [layer.weight.detach() for layer in self._layers]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        if whole.numel() * whole.element_size() < _LARGE:
            return
        biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), _FEW)

    def unpack(self) -> None:
        self._packed = self._bias = None


class _Layer:
    """The parts of one decoder layer of the model."""

    def __init__(self, layer: Any, normed: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.queries_keys_values = _Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.size: int = attention.head_dim
        self.norms = (attention.q_norm, attention.k_norm) if normed else None
        self.scale: float = attention.scaling
        self.out = _Product(attention.o_proj)
        self.gate_and_up = _Product(mlp.gate_proj, mlp.up_proj)
        self.activation = mlp.act_fn
        self.down = _Product(mlp.down_proj)

    @property
    def products(self) -> Sequence[_Product]:
        return self.queries_keys_values, self.out, self.gate_and_up, self.down

    def __call__(
        self, hidden: Tensor, number: int, turn: Callable[[Tensor], Tensor], cache: RunningCache
    ) -> Tensor:
        """[rows, hidden] to the same. turn: of queries or keys [rows, heads, D] by their positions."""
        rows = len(hidden)
        projected = self.queries_keys_values(self.before_attention(hidden))
        queries, keys, values = (each.view(rows, -1, self.size) for each in projected)
        if self.norms is not None:
            queries, keys = self.norms[0](queries), self.norms[1](keys)
        cache.update(turn(keys)[:, :, None], values[:, :, None], number)
        seen = cache.attend(turn(queries)[:, :, None], self.scale)
        hidden = hidden + self.out(seen.reshape(rows, -1))[0]
        gate, up = self.gate_and_up(self.before_mlp(hidden))
        made: Tensor = hidden + self.down(self.activation(gate) * up)[0]
        return made


class DecodeStep:
    """The forward of `model` for rows of one token, whose attention is the cache's.

    Args:
        model: one that `fits`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._body: Any = model.model
        normed = model.config.model_type == "qwen3"
        self._layers = [_Layer(layer, normed) for layer in self._body.layers]
        head: Any = model.lm_head
        self._head = _Product(head)
        self._packs, self._half = packs(model.dtype), model.dtype != torch.float32
        self._packed, self._steps = False, 0

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is of a family that is known here, on a CPU, and nobody changed its layers."""
        plain = all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))
        return model.device.type == "cpu" and model.config.model_type in _FAMILIES and plain

    def __call__(self, tokens: Tensor, positions: Tensor, cache: RunningCache) -> Tensor:
        """Logits [rows, vocabulary]. tokens: int64 [rows]. positions: int64 [rows, 1]."""
        self._steps += 1
        faster = self._packs and (self._half or len(tokens) <= _FEW)
        if faster and not self._packed and self._steps >= _WORTH:
            self._pack()
        hidden = self._body.embed_tokens(tokens)
        cosines, sines = (each[0, :, None] for each in self._body.rotary_emb(hidden, positions.t()))
        half = cosines.shape[-1] // 2
        sines = torch.cat((-sines[..., :half], sines[..., half:]), -1)

        def turn(heads: Tensor) -> Tensor:
            turned: Tensor = heads * cosines + heads.roll(half, -1) * sines
            return turned

        for number, layer in enumerate(self._layers):
            hidden = layer(hidden, number, turn, cache)
        return self._head(self._body.norm(hidden))[0]

    def forget(self) -> None:
        """The weights changed, or nothing runs: what is packed gives its memory back."""
        self._steps = 0
        if self._packed:
            for product in self._products():
                product.unpack()
        self._packed = False

    def _pack(self) -> None:
        for product in self._products():
            product.pack()
        self._packed = True

    def _products(self) -> Sequence[_Product]:
        return [*(product for layer in self._layers for product in layer.products), self._head]
