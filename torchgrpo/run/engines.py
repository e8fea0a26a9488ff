"""From the config and the plan to engines, and to the weights' way to them: what is built, and from what.

One engine lives in this process, several (or `ray.enabled=true`, or a `ray.address`) as Ray actors in a pool;
both speak the protocols of rollout/engines/sampler.py, so nothing above knows which it is. Engines are started from
the files of `model.name` alone.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from config.run_folder.folders import ENGINE_LOG
from config.schema.config import Config
from torchgrpo.plan.model_shape import model_path
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.sampler import Engine
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.engines.vllm_settings import AdapterShape, VLLMSettings
from torchgrpo.rollout.weights.push import Weights
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.training.adapters import linear_names
from torchgrpo.training.learner import Learner
from torchgrpo.training.model_loading import load_model, saved_eos_token_ids, skeleton

if TYPE_CHECKING:  # Ray costs a second, which one engine in this process need not wait for
    from torchgrpo.cluster.runtime import Place


def build_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    run_dir: Path | None = None,
    adapter: AdapterShape | None = None,
) -> Engine:
    """One engine or a pool. What vLLM prints while it starts goes to `engine.log` in the run's folder, if it has one.

    adapter: that pushes will carry; None where they carry full weights, or where nobody trains.
    """
    eos = tuple(saved_eos_token_ids(config.model.name, tokenizer))
    factory: Callable[[], Engine]
    if plan.engine.backend == "vllm":
        from torchgrpo.rollout.engines.vllm_engine import VLLMEngine

        log = None if run_dir is None else str(run_dir.resolve() / ENGINE_LOG)
        factory = partial(VLLMEngine, replace(vllm_settings(config, eos, plan, adapter), log=log))
    else:
        factory = partial(_transformers_engine, config, eos, plan)
    return factory() if plan.devices.in_process else _pool(config, plan, factory)


def _pool(config: Config, plan: Plan, factory: Callable[[], Engine]) -> Engine:
    from torchgrpo.rollout.engines.pool import RayPool
    from torchgrpo.rollout.engines.supervisor import PoolSettings
    from torchgrpo.rollout.weights.transports import TRANSPORTS

    inference = config.inference_model
    settings = PoolSettings(
        start_timeout_s=inference.start_timeout_s,
        request_timeout_s=inference.request_timeout_s,
        # Half of it waits in the engine, so that no place there stays empty.
        window=2 * plan.engine.max_num_seqs,
        num_cpus_per_engine=config.ray.num_cpus_per_engine,
        ray_cpus=plan.ray_cpus,
        address=config.ray.address,
    )
    return RayPool(factory, engine_places(plan), settings, TRANSPORTS[plan.transport](plan))


def engine_places(plan: Plan) -> "list[Place]":
    """Where the engines of a pool live; on a cluster Ray chooses their GPUs."""
    from torchgrpo.cluster.runtime import Place

    numbered = [(f"engine {index}", gpus) for index, gpus in enumerate(plan.devices.engines)]
    if plan.devices.on_cluster:
        return [Place(name, num_gpus=len(gpus)) for name, gpus in numbered]
    return [Place(name, plan.machine.physical(gpus)) for name, gpus in numbered]


def adapter_shape(config: Config) -> AdapterShape | None:
    """The adapter that pushes will carry; None where they carry full weights."""
    if config.inference_model.lora == "merge":
        return None
    lora = config.train_model.lora
    return AdapterShape(lora.r, lora.alpha, linear_names(skeleton(config.model)))


def vllm_settings(
    config: Config, eos: tuple[int, ...], plan: Plan, adapter: AdapterShape | None = None
) -> VLLMSettings:
    """What a vLLM engine is started with."""
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


def _transformers_engine(config: Config, eos: tuple[int, ...], plan: Plan) -> Engine:
    """In the learner's process, or inside an actor: there with one thread, so that several on one machine do not slow
    each other down, and on the first GPU that the actor sees."""
    device = torch.device(plan.devices.train_device)
    if not plan.devices.in_process:
        device = torch.device("cpu" if plan.devices.on_cpu else "cuda")
        if plan.devices.on_cpu:
            torch.set_num_threads(config.ray.num_cpus_per_engine)
    model = load_model(config.model, device)
    return TransformersEngine(model, eos, plan.engine.max_num_seqs, config.inference_model.update)


def build_weights(config: Config, learner: Learner, engine: Engine, plan: Plan) -> Weights:
    train = config.train
    check = WeightCheck(plan.weight_check, engine, learner, train.weight_check_every, train.wait_timeout_s)
    return Weights(learner, engine, check, plan.engine.sleeps)
