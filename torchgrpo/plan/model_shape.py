"""Finds a model's config.json, and derives sizes, parameter counts and attention kind from it.

The module imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from config.schema.errors import ConfigError
from torchgrpo.plan.known_models import KNOWN_MODELS

PACKAGE_DIR = Path(__file__).resolve().parents[1]
"""Folder of the package, which contains `models/quickstart`."""
GIB, TERA = 1024**3, 1e12
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
NF4_BYTES, _SCALE_BYTES = 1 / 2, 1 / 64 + 4 / (64 * 256)
"""Bytes per parameter in 4 bits, and bytes of its scales.

There is an 8-bit scale per 64 parameters, and a float32 scale per 256 of these scales.
"""
_KV_BLOCK = 128
"""Tokens of one KV cache block."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    intermediate_size: of an expert in a model with several experts. num_experts, active_experts: routed experts of a
    layer, and those that a token passes. shared_size: intermediate size of all shared experts of a layer together.
    dense_layers, dense_size: layers without experts, and their intermediate size. tied: whether embedding and head
    share their weights. has_plain_attention, can_compile_layers, rope_limit, window: results of `plain_attention`,
    `can_compile_layers`, `rope_limit` and `attention_window`. windowed_layers: layers whose attention is limited to
    `window` tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int
    gated_mlp: bool = True
    num_experts: int = 1
    active_experts: int = 1
    shared_size: int = 0
    dense_layers: int = 0
    dense_size: int = 0
    has_plain_attention: bool = True
    can_compile_layers: bool = True
    rope_limit: int = 0
    window: int = 0
    windowed_layers: int = 0

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Number of parameters without biases, which is exact for models without biases (Llama)."""
        layers = self.num_layers * (self._attention + 2 * self.hidden_size) + self._mlps(self.num_experts)
        return layers + self.hidden_size + self.head_parameters * (1 if self.tied else 2)

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear layers without the head.

        The MLPs of a model with several experts are no linear layers.
        """
        return self.num_layers * self._attention + (self._mlps(1) if self.num_experts == 1 else 0)

    @property
    def active_linear_parameters(self) -> int:
        """Parameters of the layers that each token is multiplied with."""
        return self.num_layers * self._attention + self._mlps(self.active_experts)

    def _mlps(self, experts: int) -> int:
        """Parameters of the MLPs and routers of all layers.

        experts: routed experts of a layer that count.
        """
        factors = (3 if self.gated_mlp else 2) * self.hidden_size
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        layer = factors * (experts * self.intermediate_size + self.shared_size) + router
        return (self.num_layers - self.dense_layers) * layer + self.dense_layers * factors * self.dense_size

    @property
    def _attention(self) -> int:
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    def lora_parameters(self, rank: int) -> int:
        """Parameters of adapters of rank `rank` on every linear layer except the head (dense MLP)."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = 2 * (self.hidden_size + query) + 2 * (self.hidden_size + key)
        widths += (3 if self.gated_mlp else 2) * (self.hidden_size + self.intermediate_size)
        return self.num_layers * rank * widths

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def kv_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Bytes of the keys and values of one sequence.

        A layer with a window keeps the tokens of its window.
        """
        per_layer = self.kv_bytes_per_token(dtype_bytes) // self.num_layers
        full_layers = self.num_layers - self.windowed_layers
        return per_layer * (full_layers * tokens + self.windowed_layers * min(tokens, self.window))


def kv_cache_bytes(shape: ModelShape, max_model_len: int, max_num_seqs: int, dtype_bytes: int) -> int:
    """Bytes of the KV cache for `max_num_seqs` full-length sequences in whole blocks.

    The cache has at most 4 GiB, but at least two sequences.
    """
    blocks = -(-max_model_len // _KV_BLOCK)
    one = blocks * _KV_BLOCK * shape.kv_bytes_per_token(dtype_bytes)
    return max(2 * one, min(max_num_seqs * one, 4 * GIB))


def quantized_bytes(shape: ModelShape, width: int, shards: int = 1) -> float:
    """Bytes of one shard of a model with linear layers in 4 bits.

    The head and all other parameters have `width` bytes each. Every shard contains all scales.
    """
    others = (shape.parameters - shape.linear_parameters) * width
    return (shape.linear_parameters * NF4_BYTES + others) / shards + shape.linear_parameters * _SCALE_BYTES


def model_path(name: str) -> str:
    """Returns the local folder of a model, else the name itself as a hub name.

    The folder is looked up from the working directory, then from the package.
    """
    for candidate in (Path(name), PACKAGE_DIR / name):
        if candidate.is_dir():
            return str(candidate)
    return name


def find_config_file(model: str, key: str = "model.name") -> Path | None:
    """Finds the config.json of a model in its folder or in the hub's cache.

    key: the setting that names the model.

    Raises:
        ConfigError: the folder has no config.json, or the name is not a hub name.
    """
    folder = Path(model_path(model))
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{key}={model}: the folder has no config.json; give a Hugging Face folder")
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        raise ConfigError(
            f"{key}={model}: neither a folder nor a hub name; give a Hugging Face folder or ORG/NAME"
        ) from error
    return Path(cached) if isinstance(cached, str) else None


def find_model_config(model: str, key: str = "model.name") -> dict[str, Any] | None:
    """Returns the config.json of a model, else the entry in `KNOWN_MODELS`, else None.

    key: the setting that names the model.
    """
    path = find_config_file(model, key)
    if path is None:
        return KNOWN_MODELS.get(model)
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return raw


@cache
def find_shape(model: str, key: str = "model.name") -> ModelShape | None:
    """Returns the sizes of a model, or None if they are unknown.

    key: the setting that names the model.
    """
    path = find_config_file(model, key)
    if path is not None:
        return read_shape(path)
    return make_shape(KNOWN_MODELS[model], model) if model in KNOWN_MODELS else None


def read_shape(path: Path) -> ModelShape:
    """Reads the sizes of a model from a Hugging Face config.json."""
    return make_shape(json.loads(path.read_text(encoding="utf-8")), str(path))


SIZE_ALIASES = {
    "vocab_size": (),
    "hidden_size": ("n_embd", "d_model", "emb_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
}
"""Required sizes by key of config.json, with the keys of other architectures."""
CLASS_DEFAULTS = {
    "gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
}
"""Sizes that the published config.json of a model type leaves to its class."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERT_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
SHARED_EXPERT_KEYS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
SHARED_SIZE_KEYS = ("shared_expert_intermediate_size", "shared_intermediate_size")
DENSE_LAYER_KEYS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def make_shape(raw: dict[str, Any], source: str) -> ModelShape:
    """Makes the sizes of a model from the contents of a config.json.

    source: file or model name for messages.

    Raises:
        ConfigError: a size that every decoder-only transformer has is missing.
    """
    raw = raw.get("text_config") or raw
    raw = CLASS_DEFAULTS.get(raw.get("model_type", ""), {}) | raw
    raw = {
        name: next((raw[one] for one in (name, *others) if one in raw), None) for name, others in SIZE_ALIASES.items()
    } | raw
    if raw["num_attention_heads"] is None and {"state_size", "attention_hidden_size"} & raw.keys():
        raw["num_attention_heads"] = 1  # a model of recurrent layers without attention
    absent = [name for name in SIZE_ALIASES if raw[name] is None]
    if absent:
        raise ConfigError(f"{source}: no {', '.join(absent)}; the sizes of this architecture are not known")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    is_gemma = str(raw.get("model_type")).startswith("gemma")  # leaves both to its class
    return ModelShape(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw.get("moe_intermediate_size") or raw.get("intermediate_size") or 4 * hidden,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        tied=bool(raw.get("tie_word_embeddings", is_gemma)),
        max_positions=raw.get("max_position_embeddings") or 0,
        gated_mlp=is_gemma or raw.get("hidden_act", "silu") in ("silu", "swish"),
        **_expert_sizes(raw),
        has_plain_attention=plain_attention(raw),
        can_compile_layers=can_compile_layers(raw),
        rope_limit=rope_limit(raw),
        window=attention_window(raw),
        windowed_layers=_windowed_layers(raw),
    )


def _expert_sizes(raw: Mapping[str, Any]) -> dict[str, int]:
    """Returns the fields of `ModelShape` about experts; the default without experts."""

    def first(*keys: str) -> int:
        """Returns the first number above 0; models may also list a number for each layer."""
        return next((raw[key] for key in keys if isinstance(raw.get(key), int) and raw[key] > 0), 0)

    experts = first(*EXPERT_KEYS)
    if experts <= 1:
        return {}
    expert_size = first("moe_intermediate_size", "intermediate_size")
    dense_layers = first(*DENSE_LAYER_KEYS) or len(raw.get("mlp_only_layers") or ())
    return {
        "num_experts": experts,
        "active_experts": first(*ACTIVE_EXPERT_KEYS) or 1,
        "shared_size": first(*SHARED_SIZE_KEYS) or first(*SHARED_EXPERT_KEYS) * expert_size,
        "dense_layers": min(dense_layers, raw["num_hidden_layers"]),
        "dense_size": first("intermediate_size"),
    }


def _windowed_layers(raw: Mapping[str, Any]) -> int:
    """Returns the layers with an attention window, from `layer_types` or `sliding_window_pattern`."""
    if not raw.get("sliding_window"):
        return 0
    kinds, pattern = raw.get("layer_types"), raw.get("sliding_window_pattern")
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds)
    layers: int = raw["num_hidden_layers"]
    return layers - layers // pattern if isinstance(pattern, int) and pattern > 0 else 0


# fmt: off
PLAIN_MODEL_TYPES = frozenset({
    "apertus", "arcee", "bitnet", "ernie4_5", "ernie4_5_moe", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2",
    "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2",
})
# fmt: on
"""Values of `model_type` for which packed rows and our own decoding equal the model's forward pass.

tests/test_architectures.py verifies each of them; a new name needs an entry in tests/architectures.py.
"""


def plain_attention(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes causal attention to all previous tokens in every layer."""
    if config.get("model_type") not in PLAIN_MODEL_TYPES:
        return False
    # These types read `use_sliding_window`; other types have a window whenever `sliding_window` is set.
    reads_switch = config["model_type"] in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
    switched_off = reads_switch and config.get("use_sliding_window") is False
    if config.get("sliding_window") and not switched_off:
        return False
    return set(config.get("layer_types") or ()) <= {"full_attention"}


EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json with the number of experts."""


def can_compile_layers(config: Mapping[str, Any]) -> bool:
    """Whether each layer of a config.json's model is one compiled graph for any length.

    The layers attend to all previous tokens, are at `model.layers`, and have no experts, whose code depends on the
    tokens.
    """
    has_experts = any((config.get(key) or 1) != 1 for key in EXPERT_KEYS)
    return plain_attention(config) and not has_experts and config["model_type"] not in ("gpt2", "opt")


def rope_limit(config: Mapping[str, Any]) -> int:
    """Returns the length beyond which rotary embeddings depend on the sequence length; 0: none."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]
    limit_keys = ("original_max_position_embeddings", "max_position_embeddings")
    limits = [
        next((int(fields[key]) for key in limit_keys for fields in (kind, config) if fields.get(key)), 0)
        for kind in kinds
        if kind.get("rope_type", kind.get("type")) in ("dynamic", "longrope", "su")
    ]
    return min(limits, default=0)


def rope_limit_message(name: str, longest: int, limit: int, key: str = "model.name") -> str:
    """Returns the error message about sequences beyond a model's rope limit.

    longest: tokens of such a sequence. limit: result of `rope_limit`. key: the setting with the value `name`.
    """
    return (
        f"{key}={name}: the rotary embeddings change with the length beyond {limit} tokens (rope_type dynamic "
        f"or longrope), and prompt plus response may reach {longest} tokens, so that the log-prob of a token "
        "would depend on the length of its sequence: lower env.max_prompt_tokens or "
        "inference_model.max_tokens"
    )


def attention_window(config: Mapping[str, Any]) -> int:
    """Returns the shortest attention window or chunk of any layer; 0 without one."""
    windows = ("sliding_window", "attention_window_size", "window_size", "local_attention")
    names = (*windows, "attention_chunk_size", "chunk_size", "mamba_chunk_size")
    sizes = [config.get(name) for name in names]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=0)
