"""Sizes of a causal language model read from its config.json alone: parameters, KV cache. No torch here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from config.schema.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
"""Holds `models/quickstart`."""
GIB = 1024**3
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
NF4_BYTES, _SCALE_BYTES = 1 / 2, 1 / 64 + 4 / (64 * 256)
"""Of a parameter in 4 bits: itself; an 8-bit scale for each 64, and a float32 scale for each 256 of those."""
_KV_BLOCK = 128
"""Tokens of a block of the KV cache."""


@dataclass(frozen=True)
class ModelShape:
    """What memory and batch arithmetic need to know of a decoder-only transformer.

    plain: of every layer (`plain_attention`). rope_limit: `rope_limit`. window: `attention_window`.
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
    plain: bool = True
    rope_limit: int = 0
    window: int = 0

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters; biases are left out, so the number is exact for bias-free models (Llama)."""
        layers = self.num_layers * (self._attention + self.num_experts * self._mlp + 2 * self.hidden_size)
        return layers + self.hidden_size + self.head_parameters * (1 if self.tied else 2)

    @property
    def linear_parameters(self) -> int:
        """Of the linear layers but the head. Several experts are tensors of their own kind."""
        return self.num_layers * (self._attention + (self._mlp if self.num_experts == 1 else 0))

    @property
    def _attention(self) -> int:
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def _mlp(self) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    def lora_parameters(self, rank: int) -> int:
        """Parameters of rank-`rank` adapters on every linear layer but the head (dense MLP)."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = 2 * (self.hidden_size + query) + 2 * (self.hidden_size + key)
        widths += (3 if self.gated_mlp else 2) * (self.hidden_size + self.intermediate_size)
        return self.num_layers * rank * widths

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def kv_cache_bytes(shape: ModelShape, max_model_len: int, max_num_seqs: int, dtype_bytes: int) -> int:
    """KV cache for `max_num_seqs` full sequences in whole blocks: 4 GiB at most, one sequence at least."""
    blocks = -(-max_model_len // _KV_BLOCK)
    one = blocks * _KV_BLOCK * shape.kv_bytes_per_token(dtype_bytes)
    return max(2 * one, min(max_num_seqs * one, 4 * GIB))


def quantized_bytes(shape: ModelShape, width: int, shards: int = 1) -> float:
    """The linear layers but the head in 4 bits, all else in numbers of `width` bytes. Scales are in every shard."""
    others = (shape.parameters - shape.linear_parameters) * width
    return (shape.linear_parameters * NF4_BYTES + others) / shards + shape.linear_parameters * _SCALE_BYTES


def model_path(name: str) -> str:
    """A local folder (looked up from the working directory, then from the project) or the hub name itself."""
    for candidate in (Path(name), PACKAGE / name):
        if candidate.is_dir():
            return str(candidate)
    return name


def find_file(model: str, key: str = "model.name") -> Path | None:
    """The config.json of a model in its folder or the hub's cache, or None. key: the setting that names the model."""
    folder = Path(model_path(model))
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{key}={model}: no config.json in it; give a Hugging Face folder")
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


def find_config(model: str) -> dict[str, Any] | None:
    """What config.json of `model.name` says: that of `find_file`, else what is known by the model's name."""
    path = find_file(model)
    if path is None:
        return KNOWN.get(model)
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return raw


@cache
def find_shape(model: str, key: str = "model.name") -> ModelShape | None:
    """The sizes of a model, None where they are not known. key: the setting that names the model."""
    path = find_file(model, key)
    if path is not None:
        return read_shape(path)
    return shape_of(KNOWN[model], model) if model in KNOWN else None


def read_shape(path: Path) -> ModelShape:
    """As `shape_of`, of a Hugging Face config.json."""
    return shape_of(json.loads(path.read_text(encoding="utf-8")), str(path))


NAMES = {
    "vocab_size": (),
    "hidden_size": ("n_embd", "d_model", "emb_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
}
"""Sizes that every model has, and what some architectures call them."""


def shape_of(raw: dict[str, Any], place: str) -> ModelShape:
    """The sizes that a Hugging Face config.json says. place: where it stands.

    Raises:
        ConfigError: a size that every decoder-only transformer has is missing.
    """
    raw = raw.get("text_config") or raw
    raw = {
        name: next((raw[one] for one in (name, *others) if one in raw), None)
        for name, others in NAMES.items()
    } | raw
    if raw["num_attention_heads"] is None and {"state_size", "attention_hidden_size"} & raw.keys():
        raw["num_attention_heads"] = 1  # recurrent layers alone
    absent = [name for name in NAMES if raw[name] is None]
    if absent:
        raise ConfigError(f"{place}: no {', '.join(absent)}; the sizes of this architecture are not known")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    return ModelShape(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw.get("moe_intermediate_size") or raw.get("intermediate_size") or 4 * hidden,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=raw.get("max_position_embeddings") or 0,
        gated_mlp=raw.get("hidden_act", "silu") in ("silu", "swish"),
        num_experts=raw.get("num_experts") or raw.get("num_local_experts") or 1,
        plain=plain_attention(raw),
        rope_limit=rope_limit(raw),
        window=attention_window(raw),
    )


# fmt: off
PLAIN = frozenset({
    "apertus", "arcee", "bitnet", "ernie4_5", "ernie4_5_moe", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2",
    "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2",
})
# fmt: on
"""`model_type` of what packed rows and our own decoding are held equal to the model's forward pass for, by
tests/test_architectures.py; a name gets here by an entry in tests/architectures.py."""


def plain_attention(config: Mapping[str, Any]) -> bool:
    """Whether every layer is causal attention to all tokens before, by a config.json."""
    if config.get("model_type") not in PLAIN:
        return False
    # These read `use_sliding_window`; the others' window is on where it has a size.
    reads_switch = config["model_type"] in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
    switched_off = reads_switch and config.get("use_sliding_window") is False
    if config.get("sliding_window") and not switched_off:
        return False
    return set(config.get("layer_types") or ()) <= {"full_attention"}


def rope_limit(config: Mapping[str, Any]) -> int:
    """Length up to which rotary embeddings do not depend on a sequence's length; 0: any."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [one for one in rope.values() if isinstance(one, Mapping)] or [rope]
    known = ("original_max_position_embeddings", "max_position_embeddings")
    limits = [
        next((int(place[key]) for key in known for place in (one, config) if place.get(key)), 0)
        for one in kinds
        if one.get("rope_type", one.get("type")) in ("dynamic", "longrope", "su")
    ]
    return min(limits, default=0)


def beyond_rope_limit(name: str, longest: int, limit: int, key: str = "model.name") -> str:
    """The message on sequences beyond a model's rope limit.

    longest: tokens of such a sequence. limit: as `rope_limit`. key: the setting that is `name`.
    """
    return (
        f"prompt plus response may reach {longest} tokens, but the rotary embeddings of {key}={name} change with "
        f"the length beyond {limit} tokens (rope_type dynamic or longrope), so that a token has no log-prob of its "
        "own: lower env.max_prompt_tokens or inference_model.max_tokens"
    )


def attention_window(config: Mapping[str, Any]) -> int:
    """The shortest window or chunk that a layer works with; 0 where none is named."""
    windows = ("sliding_window", "attention_window_size", "window_size", "local_attention")
    names = (*windows, "attention_chunk_size", "chunk_size", "mamba_chunk_size")
    sizes = [config.get(name) for name in names]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=0)


KNOWN = {
    f"Qwen/Qwen2.5-{kind}{size}{suffix}": {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": size in ("0.5B", "1.5B", "3B"),
        "rope_theta": 1e6,
        **({"max_position_embeddings": 32768} if suffix else {}),
    }
    for size, hidden, mlp, layers, heads, kv_heads, vocabulary in (
        ("0.5B", 896, 4864, 24, 14, 2, 151936),
        ("1.5B", 1536, 8960, 28, 12, 2, 151936),
        ("3B", 2048, 11008, 36, 16, 2, 151936),
        ("7B", 3584, 18944, 28, 28, 4, 152064),
        ("14B", 5120, 13824, 48, 40, 8, 152064),
        ("32B", 5120, 27648, 64, 40, 8, 152064),
    )
    for kind in ("", "Coder-")
    for suffix in ("", "-Instruct")
}
"""What the models' own config.json says, by hub name, so that a plan and a rehearsal need no download. The positions of
base models differ by size and are left to their own file."""
