"""Our settings of a vLLM engine in vLLM's own terms, and how it looks at the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.engines.vllm_weights import WeightReceiver


def engine_arguments(settings: VLLMSettings) -> Any:
    """vLLM's `EngineArgs`; what no setting decides is the same for every engine."""
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig

    s = settings
    chosen: dict[str, Any] = {"max_num_batched_tokens": s.max_num_batched_tokens}
    if s.device == "cpu":  # there a seeded request whose prompt is cut over two steps ends the engine
        longest = max(4096, s.max_model_len)
        chosen = {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}
    if s.adapter is not None:
        allocated = (8, 16, 32, 64, 128, 256, 320, 512)
        chosen |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in allocated if rank >= s.adapter.rank),
            # Left unrestricted, vLLM wraps the head too and then fails on prompt log-probs of a batch.
            "lora_target_modules": list(s.adapter.target_modules),
        }
    return EngineArgs(
        model=s.model,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=cast(Any, s.dtype),
        hf_overrides=_head(s),
        quantization=s.quantization,
        tensor_parallel_size=s.tensor_parallel_size,
        distributed_executor_backend="mp" if s.tensor_parallel_size > 1 else "uni",
        worker_extension_cls=f"{WeightReceiver.__module__}.{WeightReceiver.__name__}",
        max_model_len=s.max_model_len,
        max_num_seqs=s.max_num_seqs,
        gpu_memory_utilization=s.gpu_memory_utilization,
        # vLLM takes the size for each of an engine's devices.
        kv_cache_memory_bytes=None
        if s.kv_cache_bytes is None
        else s.kv_cache_bytes // s.tensor_parallel_size,
        enforce_eager=s.enforce_eager,
        enable_sleep_mode=s.sleep,
        enable_prefix_caching=True,
        async_scheduling=s.async_scheduling,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend=s.weight_transfer) if s.weight_transfer else None,
        **chosen,
    )


def _head(settings: VLLMSettings) -> dict[str, Any]:
    """Logits in float32 under weights in half precision, as the learner has them: near 20 a step of bfloat16 is
    0.125, which every log-prob would carry. vLLM refuses it for quantized heads; online quantization leaves the
    head as it is."""
    return {} if settings.dtype == "float32" else {"head_dtype": "float32"}


@contextmanager
def model_seen_here() -> Iterator[None]:
    """vLLM looks in this process at the class of the model that it is about to load here.

    Else, of a model that is new to this machine, it has another process look, which imports vLLM for that: so long as
    all the rest of a start takes. Not where tensor-parallel workers load it: what looking sets up of CUDA, their forks
    could not use.
    """
    from vllm.model_executor.models import registry

    elsewhere = registry._run_in_subprocess
    registry._run_in_subprocess = lambda fn: fn()
    try:
        yield
    finally:
        registry._run_in_subprocess = elsewhere
