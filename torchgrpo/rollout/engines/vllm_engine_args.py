"""Builds vLLM's `EngineArgs` from `VLLMSettings`, and makes vLLM inspect model classes in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.engines.vllm_weight_receiver import WeightReceiver


def engine_arguments(settings: VLLMSettings) -> Any:
    """Builds vLLM's `EngineArgs` from our settings; the other arguments are the same for all engines."""
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig

    s = settings
    overrides: dict[str, Any] = {"max_num_batched_tokens": s.max_num_batched_tokens}
    if s.device == "cpu":  # on a CPU, a seeded request whose prompt is split over two steps ends the engine
        longest = max(4096, s.max_model_len)
        overrides = {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}
    if s.adapter is not None:
        allocated = (8, 16, 32, 64, 128, 256, 320, 512)
        overrides |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in allocated if rank >= s.adapter.rank),
            # Without a restriction vLLM wraps the head too, and then fails on prompt log-probs of a batch.
            "lora_target_modules": list(s.adapter.target_modules),
        }
    return EngineArgs(
        model=s.model,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=cast(Any, s.dtype),
        hf_overrides=_head_overrides(s),
        quantization=s.quantization,
        tensor_parallel_size=s.tensor_parallel_size,
        distributed_executor_backend="mp" if s.tensor_parallel_size > 1 else "uni",
        worker_extension_cls=f"{WeightReceiver.__module__}.{WeightReceiver.__name__}",
        max_model_len=s.max_model_len,
        max_num_seqs=s.max_num_seqs,
        gpu_memory_utilization=s.gpu_memory_utilization,
        # vLLM expects the size for each device of the engine.
        kv_cache_memory_bytes=None if s.kv_cache_bytes is None else s.kv_cache_bytes // s.tensor_parallel_size,
        enforce_eager=s.enforce_eager,
        enable_sleep_mode=s.sleep,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        async_scheduling=s.async_scheduling,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend=s.weight_transfer) if s.weight_transfer else None,
        **overrides,
    )


def _head_overrides(settings: VLLMSettings) -> dict[str, Any]:
    """Returns overrides of the model's config for float32 logits under half-precision weights.

    Near 20, a step of bfloat16 is 0.125, an error that every log-prob would have. vLLM refuses the override for
    quantized heads; online quantization does not quantize the head.
    """
    return {} if settings.dtype == "float32" else {"head_dtype": "float32"}


@contextmanager
def inspect_model_in_process() -> Iterator[None]:
    """Makes vLLM inspect the class of its model in this process while the block runs.

    For a model that is new to this machine, vLLM would start another process for the inspection, which imports vLLM
    and so doubles the time of a start. Do not use this with tensor-parallel workers: the inspection initializes CUDA,
    which their forks could not use.
    """
    from vllm.model_executor.models import registry

    run_in_subprocess = registry._run_in_subprocess
    registry._run_in_subprocess = lambda fn: fn()
    try:
        yield
    finally:
        registry._run_in_subprocess = run_in_subprocess
