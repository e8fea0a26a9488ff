"""From the config to engines, and the weights' way to them: the half of the composition root that generates.

One engine lives in this process, several (or `ray.enabled=true`, or a `ray.address`) as Ray actors in a pool;
both speak the protocol of rollout/engines/sampler.py, so nothing above knows which it is.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.folders import ENGINE_LOG
from config.schema import Config
from envs.turns import Conversation, make_answerers
from plan.model_shape import model_path
from plan.plan import Plan
from rollout.engines.pool import PoolSettings, RayPool
from rollout.engines.ray_runtime import EnginePlace, own_address
from rollout.engines.sampler import Engine
from rollout.engines.transformers_engine import TransformersEngine
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.vllm_settings import AdapterShape, VLLMSettings
from rollout.weights.canary import Canary, Tolerance, canary_sequences
from rollout.weights.outgoing import Outgoing, adapter_weights, named_weights
from rollout.weights.transports import InProcess, Transport
from training.engine_arithmetic import learner_scores, rounding_error
from training.model import (
    causal_model,
    eos_token_ids,
    linear_names,
    load_model,
    saved_eos_token_ids,
)

CANARY_COUNT, CANARY_LENGTH = 3, 160  # longer than a block of vLLM's prefix cache, 128 tokens on a CPU
PLAIN_CANARY_COUNT, PLAIN_CANARY_LENGTH = 1, 24  # no prefix cache, nothing to find in a longer one


def build_engine(
    config: Config,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    run_dir: Path | None = None,
) -> Engine:
    """One engine or a pool. What vLLM prints while it starts goes to `engine.log` in the run's folder, if it has one.

    model: the learner's, which says where completions end and what an adapter adapts; None: there is no learner.
    Every engine starts from the weights of `model.name`.
    """
    inference, devices = config.inference_model, plan.devices
    name = config.model.name
    eos = tuple(saved_eos_token_ids(name, tokenizer) if model is None else eos_token_ids(model, tokenizer))
    factory: Callable[[], Engine]
    if plan.engine.backend == "vllm":
        settings = vllm_settings(config, eos, plan, adapter_shape(config, model))
        log = None if run_dir is None else str(run_dir.resolve() / ENGINE_LOG)
        factory = partial(VLLMEngine, replace(settings, log=log))
    else:
        factory = partial(_transformers_engine, config, eos, plan)
    if devices.in_process:
        if plan.engine.backend == "vllm":
            return factory()
        device = torch.device(devices.train_device)
        return TransformersEngine(
            load_model(config.model, [device]), eos, plan.engine.max_num_seqs, inference.update
        )
    pool = PoolSettings(
        start_timeout_s=inference.start_timeout_s,
        request_timeout_s=inference.request_timeout_s,
        # Half of it waits in the engine, so that no place there stays empty.
        window=2 * plan.engine.max_num_seqs,
        num_cpus_per_engine=config.ray.num_cpus_per_engine,
        address=config.ray.address,
    )
    return RayPool(factory, engine_places(plan), pool)


def engine_places(plan: Plan) -> list[EnginePlace]:
    """Where the engines of a pool live; on a cluster Ray chooses their GPUs."""
    places = []
    for index, gpus in enumerate(plan.devices.engines):
        name = f"engine {index}"
        if plan.devices.on_cluster:
            places.append(EnginePlace(name, num_gpus=len(gpus)))
        else:
            places.append(EnginePlace(name, plan.machine.physical(gpus)))
    return places


def make_conversation(config: Config, tokenizer: PreTrainedTokenizerBase) -> Conversation | None:
    """What answers between turns; None where a completion has but one."""
    if config.env.max_steps == 1:
        return None
    return Conversation(tokenizer, make_answerers(config.env), config.env.max_steps)


def adapter_shape(config: Config, model: PreTrainedModel | None) -> AdapterShape | None:
    """The adapter that pushes will carry; None where they carry full weights, or where nobody trains."""
    if config.inference_model.lora == "merge" or model is None:
        return None
    return AdapterShape(config.train_model.lora.r, config.train_model.lora.alpha, linear_names(model))


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
        sleep=plan.devices.colocated,
        weight_transfer=plan.transport if plan.transport in ("nccl", "ipc") else None,
        request_timeout_s=inference.request_timeout_s,
    )


def _transformers_engine(config: Config, eos: tuple[int, ...], plan: Plan) -> Engine:
    """Built inside an actor: one thread, so that several on one machine do not slow each other down."""
    if plan.devices.on_cpu:
        torch.set_num_threads(config.ray.num_cpus_per_engine)
    model = load_model(config.model, [torch.device("cpu" if plan.devices.on_cpu else "cuda")])
    return TransformersEngine(model, eos, plan.engine.max_num_seqs, config.inference_model.update)


class Sleeper(Protocol):
    """An engine that can give its GPU's memory to the learner: `VLLMEngine`, or a pool of them."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class Weights:
    """Learner to engines, proven by the canary. Version 0 is what a run starts from; each later push adds 1.

    Args:
        named: the tensors of the policy that a push carries.
        sleeper: the engine, where it shares the learner's GPUs in turns.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        canary: Canary,
        transport: Transport,
        named: Callable[[nn.Module], Outgoing] = named_weights,
        sleeper: Sleeper | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.canary = canary
        self.transport = transport
        self.named = named
        self.sleeper = sleeper
        self.asleep = False
        self.version = -1
        self.requested = threading.Event()
        self.pushing = False

    def push(self) -> dict[str, float]:
        """Metrics of the canary, its seconds among them.

        Raises:
            CanaryError: an engine does not have the learner's weights; the message names the cause.
        """
        self._wake_engines()
        began = time.perf_counter()
        with self._push_under_way():
            self.canary.before_push()
            watched = time.perf_counter() - began
            self.version += 1
            self.push_again()
        began = time.perf_counter()
        metrics = self.canary.after_push(self.version, _received(self.engine))
        return metrics | {"canary/seconds": watched + time.perf_counter() - began}

    def push_again(self) -> None:
        """The present version once more, for an engine that was replaced."""
        with self._push_under_way():
            self.transport.push(self.named(self.model), self.version)

    @contextmanager
    def _push_under_way(self) -> Iterator[None]:
        """An engine that is replaced now needs no push of its own: this one waits for it."""
        self.pushing = True
        try:
            yield
        finally:
            self.pushing = False

    def rest_engines(self) -> None:
        """The GPUs are the learner's now, until the next push; nothing where engines have their own."""
        if self.sleeper is not None and not self.asleep:
            self.sleeper.sleep()
            self.asleep = True

    def _wake_engines(self) -> None:
        if self.sleeper is not None and self.asleep:
            gc.collect()
            torch.cuda.empty_cache()  # what the learner's allocator keeps, no other process can have
            self.sleeper.wake()
            self.asleep = False


def _received(engine: Engine) -> frozenset[str]:
    """Names that the last push brought to every engine."""
    return engine.received if isinstance(engine, RayPool | VLLMEngine | TransformersEngine) else frozenset()


def build_weights(config: Config, model: nn.Module, engine: Engine, plan: Plan) -> Weights:
    causal = causal_model(model)
    plain = isinstance(engine, TransformersEngine)
    count, length = (PLAIN_CANARY_COUNT, PLAIN_CANARY_LENGTH) if plain else (CANARY_COUNT, CANARY_LENGTH)
    sequences = canary_sequences(causal.config.vocab_size, config.max_model_len, count, length)
    merged = config.inference_model.lora == "merge"
    tied = "lm_head.weight" if causal.config.tie_word_embeddings and merged else None
    canary = Canary(
        sequences,
        engine_scores(engine),
        partial(learner_scores, model),
        partial(measure_tolerance, config, model, plan, sequences),
        tied,
        scores_anew=not plain and not plan.devices.colocated,
    )
    sleeps = plan.devices.colocated and plan.engine.backend == "vllm"
    sleeper = engine if sleeps and isinstance(engine, RayPool | VLLMEngine) else None
    weights = Weights(
        model, engine, canary, _transport(config, engine, plan), outgoing(plan, merged), sleeper
    )
    if isinstance(engine, RayPool):
        # Beside a learner that runs, weights are changing: a replaced engine waits until it pushes, or waits too.
        push = weights.requested.set if plan.overlapped else weights.push_again
        engine.request_push = lambda: None if weights.pushing else push()
    return weights


def outgoing(plan: Plan, merged: bool) -> Callable[[nn.Module], Outgoing]:
    """What a push carries: full weights in the engines' dtype, whatever the way; adapters as they are."""
    if not merged:
        return adapter_weights
    dtype = getattr(torch, plan.weight_dtype)
    return lambda model: named_weights(model).cast(dtype)


def measure_tolerance(
    config: Config, model: nn.Module, plan: Plan, sequences: Sequence[Sequence[int]]
) -> Tolerance:
    """What the dtypes of learner and engine explain; `inference_model.canary_tolerance` instead, where it is given."""
    given = config.inference_model.canary_tolerance
    if given is not None:
        return Tolerance.within(given)
    dtype, float8 = plan.engine.dtype, config.inference_model.quantization is not None
    errors = rounding_error(model, sequences, getattr(torch, dtype), float8)
    return Tolerance.measured(dtype, errors)


def _transport(config: Config, engine: Engine, plan: Plan) -> Transport:
    """The weights' way, as the plan says."""
    if plan.transport == "in_process":
        return InProcess(engine)
    assert isinstance(engine, RayPool)
    if plan.transport not in ("nccl", "ipc"):
        return engine.transport
    from rollout.weights.transfer import LOOPBACK, NativeTransfer

    return NativeTransfer(
        plan.transport,
        engine,
        config.inference_model.tensor_parallel_size,
        own_address() if plan.devices.on_cluster else LOOPBACK,
        timeout=config.inference_model.request_timeout_s,
    )


def engine_scores(engine: Engine) -> Callable[[Sequence[Sequence[int]]], Mapping[str, list[list[float]]]]:
    if isinstance(engine, RayPool):
        return engine.score_all
    return lambda sequences: {"the engine": engine.score(sequences)}
