"""Contents of config.json of common models by hub name.

With them a plan or a dry run needs no download.
A field that is absent has the default of its class in transformers. The number of positions is absent where it differs
between models of one size, so it is only known from the model's own file.
"""

from collections.abc import Iterator
from typing import Any

Fields = dict[str, Any]
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QWEN2 = {"model_type": "qwen2", "rope_theta": 1e6}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rope_theta": 1e6}
LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "rope_theta": 5e5}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3 = {"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window_pattern": 6}
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
}
SMOLLM3 = {"model_type": "smollm3", "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 5e6}
MISTRAL = {"model_type": "mistral", "head_dim": 128, "rope_theta": 1e6, "sliding_window": None}


def _model(family: Fields, sizes: tuple[int, ...], **fields: Any) -> Fields:
    """Makes the contents of one config.json. sizes: values of `_SIZES`, in order."""
    return {"tie_word_embeddings": False} | family | dict(zip(_SIZES, sizes, strict=True)) | fields


def _llama31(sizes: tuple[int, ...], factor: float = 8.0, **fields: Any) -> Fields:
    rope = LLAMA31_ROPE | {"factor": factor}
    return _model(LLAMA3, sizes, max_position_embeddings=131072, rope_scaling=rope, **fields)


def _qwen2_models() -> Iterator[tuple[str, Fields]]:
    for size, sizes, vocabulary in (
        ("0.5B", (896, 4864, 24, 14, 2), 151936),
        ("1.5B", (1536, 8960, 28, 12, 2), 151936),
        ("3B", (2048, 11008, 36, 16, 2), 151936),
        ("7B", (3584, 18944, 28, 28, 4), 152064),
        ("14B", (5120, 13824, 48, 40, 8), 152064),
        ("32B", (5120, 27648, 64, 40, 8), 152064),
        ("72B", (8192, 29568, 80, 64, 8), 152064),
    ):
        model = _model(QWEN2, sizes, vocab_size=vocabulary, tie_word_embeddings=size in ("0.5B", "1.5B", "3B"))
        instruct = model | {"max_position_embeddings": 32768}
        for kind in ("", "Coder-") if size != "72B" else ("",):
            yield f"Qwen/Qwen2.5-{kind}{size}", model
            yield f"Qwen/Qwen2.5-{kind}{size}-Instruct", instruct
        if size in ("1.5B", "7B", "72B"):
            math = model | {"max_position_embeddings": 4096, "rope_theta": 1e4}
            yield f"Qwen/Qwen2.5-Math-{size}", math
            yield f"Qwen/Qwen2.5-Math-{size}-Instruct", math


def _qwen3_models() -> Iterator[tuple[str, Fields]]:
    for size, sizes, is_tied in (
        ("0.6B", (1024, 3072, 28, 16, 8), True),
        ("1.7B", (2048, 6144, 28, 16, 8), True),
        ("4B", (2560, 9728, 36, 32, 8), True),
        ("8B", (4096, 12288, 36, 32, 8), False),
        ("14B", (5120, 17408, 40, 40, 8), False),
        ("32B", (5120, 25600, 64, 64, 8), False),
    ):
        model = _model(QWEN3, sizes, tie_word_embeddings=is_tied)
        yield f"Qwen/Qwen3-{size}", model | {"max_position_embeddings": 40960}
        if size != "32B":
            yield f"Qwen/Qwen3-{size}-Base", model | {"max_position_embeddings": 32768}
    long = {"max_position_embeddings": 262144, "rope_theta": 5e6}
    small = _model(QWEN3, (2560, 9728, 36, 32, 8), tie_word_embeddings=True, **long)
    experts = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    mixture = _model(QWEN3, (2048, 6144, 48, 32, 4), **experts)
    yield "Qwen/Qwen3-30B-A3B", mixture | {"max_position_embeddings": 40960}
    for kind in ("Instruct", "Thinking"):
        yield f"Qwen/Qwen3-4B-{kind}-2507", small
        yield f"Qwen/Qwen3-30B-A3B-{kind}-2507", mixture | long


def _llama_models() -> Iterator[tuple[str, Fields]]:
    for size, sizes in (("8B", (4096, 14336, 32, 32, 8)), ("70B", (8192, 28672, 80, 64, 8))):
        model = _model(LLAMA3, sizes, max_position_embeddings=8192)
        for suffix in ("", "-Instruct"):
            yield f"meta-llama/Meta-Llama-3-{size}{suffix}", model
            yield f"meta-llama/Llama-3.1-{size}{suffix}", _llama31(sizes)
    yield "meta-llama/Llama-3.3-70B-Instruct", _llama31((8192, 28672, 80, 64, 8))
    for size, sizes in (("1B", (2048, 8192, 16, 32, 8)), ("3B", (3072, 8192, 28, 24, 8))):
        for suffix in ("", "-Instruct"):
            model = _llama31(sizes, 32.0, tie_word_embeddings=True)
            yield f"meta-llama/Llama-3.2-{size}{suffix}", model


def _gemma_models() -> Iterator[tuple[str, Fields]]:
    """Yields the text part of Gemma 3."""
    for size, sizes, head_dim, window, vocabulary, positions in (
        ("1b", (1152, 6912, 26, 4, 1), 256, 512, 262144, 32768),
        ("4b", (2560, 10240, 34, 8, 4), 256, 1024, 262208, 131072),
        ("12b", (3840, 15360, 48, 16, 8), 256, 1024, 262208, 131072),
        ("27b", (5376, 21504, 62, 32, 16), 128, 1024, 262208, 131072),
    ):
        model = _model(GEMMA3, sizes, head_dim=head_dim, sliding_window=window, vocab_size=vocabulary)
        for suffix in ("pt", "it"):
            yield f"google/gemma-3-{size}-{suffix}", model | {"max_position_embeddings": positions}


def _smollm_models() -> Iterator[tuple[str, Fields]]:
    for size, sizes in (
        ("135M", (576, 1536, 30, 9, 3)),
        ("360M", (960, 2560, 32, 15, 5)),
        ("1.7B", (2048, 8192, 24, 32, 32)),
    ):
        for suffix in ("", "-Instruct"):
            yield f"HuggingFaceTB/SmolLM2-{size}{suffix}", _model(SMOLLM2, sizes)
    large = _model(SMOLLM3, (2048, 11008, 36, 16, 4), max_position_embeddings=65536)
    yield "HuggingFaceTB/SmolLM3-3B", large
    yield "HuggingFaceTB/SmolLM3-3B-Base", large


def _mistral_models() -> Iterator[tuple[str, Fields]]:
    small, nemo = (4096, 14336, 32, 32, 8), (5120, 14336, 40, 32, 8)
    for name, sizes, vocabulary, positions in (
        ("7B-v0.3", small, 32768, 32768),
        ("7B-Instruct-v0.3", small, 32768, 32768),
        ("Nemo-Base-2407", nemo, 131072, 131072),
        ("Nemo-Instruct-2407", nemo, 131072, 131072),
        ("Small-24B-Base-2501", (5120, 32768, 40, 32, 8), 131072, 32768),
        ("Small-24B-Instruct-2501", (5120, 32768, 40, 32, 8), 131072, 32768),
    ):
        yield (
            f"mistralai/Mistral-{name}",
            _model(MISTRAL, sizes, vocab_size=vocabulary, max_position_embeddings=positions),
        )


KNOWN_MODELS: dict[str, Fields] = dict(
    (
        *_qwen2_models(),
        *_qwen3_models(),
        *_llama_models(),
        *_gemma_models(),
        *_smollm_models(),
        *_mistral_models(),
    )
)
"""Contents of config.json by hub name."""
