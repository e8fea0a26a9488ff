"""Engine backend `vllm`: factory and settings of a `VLLMEngine`, from config and plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from config.run_folder.folders import ENGINE_LOG
from config.schema.config import Config
from torchgrpo.plan.model_shape import model_path
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.engines.vllm_settings import AdapterShape, VLLMSettings
from torchgrpo.training.model_loading import saved_eos_token_ids


def engine_factory(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    run_dir: Path | None = None,
    adapter: AdapterShape | None = None,
) -> Callable[[], Engine]:
    """Returns a picklable function that builds one engine; see `build_engine`."""
    from torchgrpo.rollout.engines.vllm_engine import VLLMEngine

    eos = tuple(saved_eos_token_ids(config.model.name, tokenizer))
    log = None if run_dir is None else str(run_dir.resolve() / ENGINE_LOG)
    return partial(VLLMEngine, replace(make_vllm_settings(config, eos, plan, adapter), log=log), tokenizer)


def make_vllm_settings(
    config: Config, eos: tuple[int, ...], plan: Plan, adapter: AdapterShape | None = None
) -> VLLMSettings:
    """Returns the settings that the config and the plan give a vLLM engine."""
    inference, engine = config.inference_model, plan.engine
    return VLLMSettings(
        model=model_path(config.model.name),
        eos_token_ids=eos,
        max_model_len=config.max_model_len,
        device="cpu" if plan.devices.on_cpu else "cuda",
        dtype=engine.dtype,
        tensor_parallel_size=inference.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_bytes=engine.kv_cache_bytes,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        async_scheduling=engine.async_scheduling,
        enforce_eager=engine.enforce_eager,
        quantization=inference.quantization,
        update=inference.update,
        adapter=adapter,
        sleep=plan.engine.sleeps,
        weight_transfer=plan.transport if plan.transport in ("nccl", "ipc") else None,
        request_timeout_s=inference.request_timeout_s,
    )
