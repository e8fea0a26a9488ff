"""Makes the plan of a run (`Plan`) from its config and its machine."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan import model_shape
from torchgrpo.plan import plan as plans
from torchgrpo.plan.compilation import compiles_layers, reason_against
from torchgrpo.plan.devices import DevicePlan, choose_transport, plan_devices
from torchgrpo.plan.host_memory import choose_shard_size
from torchgrpo.plan.log_prob_bounds import BOUNDS, coarsest_dtype
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.memory import (
    CONTEXT_BYTES,
    configured_recomputation,
    engine_weight_bytes,
    format_gib,
    kv_bytes_per_sequence,
    usable_bytes,
)
from torchgrpo.plan.microbatch_sizes import (
    chunk_size,
    longest_row_tokens,
    microbatch_rows,
    rank_microbatches,
    uses_packing,
)
from torchgrpo.plan.model_shape import DTYPE_BYTES, GIB, ModelShape
from torchgrpo.plan.plan import EnginePlan, LearnerPlan, Plan, ReferencePlan, WeightCheckPlan

AUTOCAST_DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}
GPU_MAX_NUM_SEQS, CPU_MAX_NUM_SEQS = 512, 256
MAX_RESIDENT_SHARE = 0.9
"""Largest share of a GPU for a resident reference, kept activations or an awake engine.

The rest covers errors of the estimate.
"""
AWAKE_CACHE_FACTORS = (2, 1)
"""Candidates for the KV cache of an awake engine, as multiples of `max_num_seqs`."""
SLEEPING_CACHE_FACTOR, MIN_SLEEPING_CACHE = 2, GIB
"""KV cache of a sleeping engine: its sequences as a multiple of `max_num_seqs`, and the minimum bytes.

The multiple covers the running sequences and as many waiting ones.
"""
MAX_CACHE_SHARE = 0.75
"""Share of the estimated free memory up to which the plan sets the cache size; above it vLLM measures the memory."""


def make_plan(config: Config, is_overlapped: bool, machine: Machine, folder: Path = Path()) -> Plan:
    """Makes the plan of a run; `check_plan` decides whether the plan can work.

    Args:
        is_overlapped: whether the script is grpo_async.py.
        folder: folder of the checkpoints.
    Raises:
        ConfigError: devices cannot be allocated, or a backend is not installed.
    """
    gpus = 0 if config.device == "cpu" else machine.num_gpus
    # A configured machine does not use this machine's Ray cluster.
    on_cluster = machine.nodes > 1 or (config.ray.address is not None and config.machine.gpus is None)
    if config.device == "cuda" and on_cluster and config.train_model.ranks > 1:
        gpus = max(gpus, 1)  # the GPUs are on the cluster's nodes; this node needs none
    if config.device == "cuda" and gpus == 0:
        raise ConfigError(
            "device=cuda: this machine has no NVIDIA GPU; train on a CPU with `--config-name grpo_quickstart`, try "
            "this config on the CPU with device=cpu, or plan for a machine with GPUs with run=plan machine.gpus=N "
            "machine.gpu_memory_gib=G"
        )
    devices = plan_devices(config, gpus, is_overlapped, on_cluster)
    shape = model_shape.find_shape(config.model.name)
    name = config.ref_model.name
    reference_shape = model_shape.find_shape(name, "ref_model.name") if name and config.policy.uses_reference else shape
    engine = _engine(config, is_overlapped, machine, devices, shape)
    compiles = partial(compiles_layers, config, is_overlapped, machine, devices, engine)
    learner = _learner(config, is_overlapped, devices, shape, compiles(shape))
    # vLLM reads adapters from files, and offloaded shards are gathered in host memory.
    has_full_weights = config.inference_model.lora == "merge" and config.train_model.offload != "all"
    plan = Plan(
        config=config,
        machine=machine,
        devices=devices,
        shape=shape,
        reference_shape=reference_shape,
        is_overlapped=is_overlapped,
        folder=folder,
        engine=engine,
        learner=learner,
        reference=_reference(config, is_overlapped, devices, reference_shape, compiles(reference_shape)),
        transport=(
            "weight_folder"
            if engine.backend == "http"
            else choose_transport(devices, engine.backend == "vllm" and has_full_weights)
        ),
        weight_check=_weight_check(config, engine, learner, shape),
        notes=devices.notes,
    )
    completions = (
        _note_idle_ranks,
        _choose_reference_home,
        _choose_recomputation,
        choose_shard_size,
        _choose_sleep,
        _limit_gpu_share,
        _limit_kv_cache,
    )
    for complete in completions:
        plan = complete(plan)
    return replace(plan, notes=(*plan.notes, *_notes(plan)))


def _note_idle_ranks(plan: Plan) -> Plan:
    """Adds a note if an optimizer step has fewer completions than groups of ranks."""
    model, rows = plan.config.train_model, plan.config.optim_batch_size
    groups, size = model.microbatch_groups, model.context_parallel
    if rows >= groups:
        return plan
    idle = (
        f"an optimizer step has {rows} completions, so {(groups - rows) * size} of {groups * size} learner ranks "
        "are idle: raise train.optim_batch_size, or lower train_model.num_devices"
    )
    return replace(plan, notes=(*plan.notes, idle))


def _notes(plan: Plan) -> Iterator[str]:
    """Yields notes about the plan, one sentence each."""
    config, machine, shape, devices = plan.config, plan.machine, plan.shape, plan.devices
    split, gpus = config.inference_model.tensor_parallel_size, machine.num_gpus * machine.nodes
    unused, has_known_gpus = gpus - plans.count_used_gpus(plan), machine.is_hypothetical or not plan.devices.on_cluster
    if not devices.on_cpu and has_known_gpus and unused >= split and plan.engine.backend != "http":
        more = split * (len(plan.devices.engines) + unused // split)
        yield f"{unused} of {gpus} GPU(s) are unused: set inference_model.num_devices={more} to generate on all GPUs"
    if config.train.packing and not plan.learner.packs:
        yield (
            f"model.name={config.model.name}: not every layer is known to use plain causal attention, so "
            "train.packing has no effect; microbatches are whole rows, padded to the longest"
        )
    if shape is not None and not shape.has_plain_attention and plan.engine.backend == "transformers":
        yield (
            f"model.name={config.model.name}: engines decode with transformers' own generate, prompts of one "
            "length at a time; set inference_model.backend=vllm to decode faster, where vLLM supports the model"
        )
    reason = reason_against(config, plan.is_overlapped, machine, plan.devices, plan.engine, shape)
    if config.train.compile is None and not plan.devices.on_cpu and reason is not None:
        yield f"model.name={config.model.name}: decoder layers are not compiled (train.compile): {reason}"
    reward_device = config.env.reward_model.device
    used = {f"cuda:{gpu}" for gpus in (*devices.engines, devices.train, devices.reference) for gpu in gpus}
    first = reward_device if ":" in reward_device else f"{reward_device}:0"
    if first in used and not plan.devices.on_cluster:  # a cluster chooses the GPUs itself
        yield (
            f"env.reward_model.device={reward_device}: learner, reference or engines use this GPU, and their memory is "
            "estimated without the reward model; choose a GPU that they leave free, or lower "
            "inference_model.gpu_memory_utilization"
        )
    if shape is not None and plan.engine.sleeps and config.inference_model.lora == "adapter":
        size = format_gib(engine_weight_bytes(config, shape, plan.engine.dtype, False))
        yield (
            f"inference_model.lora=adapter: each turn of the learner moves {size} of base weights to host memory and "
            "back; inference_model.lora=merge avoids this (docs/lora.md)"
        )
    if shape is not None and config.train_model.lora.quantized:
        width = DTYPE_BYTES[config.model.dtype]
        small, whole = format_gib(model_shape.quantized_bytes(shape, width)), format_gib(shape.parameters * width)
        yield (
            f"the base of the adapters is in 4 bits (nf4): {small} in place of {whole}; engines hold it "
            f"dequantized in {plan.weight_dtype}, with the adapter added"
        )


def _engine(
    config: Config, is_overlapped: bool, machine: Machine, devices: DevicePlan, shape: ModelShape | None
) -> EnginePlan:
    inference, on_cpu = config.inference_model, devices.on_cpu
    backend, dtype = inference.backend, inference.dtype
    if backend == "auto":
        backend = "vllm" if not on_cpu and machine.vllm is not None else "transformers"
    if backend == "vllm" and machine.vllm is None:
        raise ConfigError(
            "inference_model.backend=vllm: vLLM is not installed; install it (`make vllm`: the CUDA build if an NVIDIA "
            "GPU is present, otherwise the CPU build), or set inference_model.backend=transformers"
        )
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    dtype = config.model.dtype if backend == "transformers" else dtype  # a copy of the learner's model
    sequences = inference.max_num_seqs or (CPU_MAX_NUM_SEQS if on_cpu else GPU_MAX_NUM_SEQS)
    cache = None if inference.kv_cache_gib is None else int(inference.kv_cache_gib * GIB)
    if cache is None and on_cpu and backend == "vllm" and shape is not None:
        cache = model_shape.kv_cache_bytes(shape, config.max_model_len, sequences, DTYPE_BYTES[dtype])
    gpu_vllm = backend == "vllm" and not on_cpu
    return EnginePlan(
        backend=backend,
        dtype=dtype,
        arithmetic="tf32" if gpu_vllm and dtype == "float32" else dtype,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        kv_cache_bytes=cache,
        max_num_seqs=sequences,
        max_num_batched_tokens=(inference.max_num_batched_tokens or 8192) if gpu_vllm else None,
        enforce_eager=on_cpu if inference.enforce_eager is None else inference.enforce_eager,
        async_scheduling=gpu_vllm and (not is_overlapped or inference.update == "wait"),
        sleeps=backend == "vllm" and devices.colocated,
    )


def _weight_check(
    config: Config, engine: EnginePlan, learner: LearnerPlan, shape: ModelShape | None
) -> WeightCheckPlan:
    learner_dtype = coarsest_dtype([config.model.dtype, learner.autocast, learner.gathered_dtype])
    shared_dtype = coarsest_dtype([learner_dtype, engine.arithmetic, config.inference_model.quantization and "fp8"])
    longest = config.max_model_len
    return WeightCheckPlan(
        dtype=shared_dtype,
        bounds=BOUNDS[shared_dtype],
        learner=BOUNDS[learner_dtype],
        count=1 if engine.backend == "transformers" else 3,
        length=min(24 if engine.backend == "transformers" else 160, longest),
        prompts=_checked_prompt_lengths(shape, longest),
    )


def _checked_prompt_lengths(shape: ModelShape | None, longest: int) -> tuple[int, ...]:
    """Returns the prompt lengths of the forward check. longest: tokens of prompt and response."""
    window = shape.window if shape is not None and shape.window < longest else 0
    prompts = [8, 12, *([window + 4] if window else [])]
    return tuple(max(1, min(length, longest - 8)) for length in prompts)


def _learner(
    config: Config, is_overlapped: bool, devices: DevicePlan, shape: ModelShape | None, compiles: bool
) -> LearnerPlan:
    half = AUTOCAST_DTYPES[config.train.mixed_precision]
    return LearnerPlan(
        shard_size=config.train_model.shards,
        autocast=half if devices.ranks == 1 and half != config.model.dtype else None,
        gathered_dtype=None if devices.ranks == 1 else half,
        packs=uses_packing(config, shape),
        compiles=compiles,
        recomputation=configured_recomputation(config, devices.on_cpu),
        microbatch_rows=microbatch_rows(config),
        microbatches=rank_microbatches(config, shape),
        chunk_size=None if shape is None else chunk_size(config, shape, devices.on_cpu),
        num_threads=config.train_model.num_threads or _num_threads(is_overlapped, devices),
    )


def _reference(
    config: Config, is_overlapped: bool, devices: DevicePlan, shape: ModelShape | None, compiles: bool
) -> ReferencePlan:
    """Plans the reference; a reference without devices starts in host memory."""
    home, scorers = devices.reference_home, devices.scorers
    half, own_dtype = AUTOCAST_DTYPES[config.train.mixed_precision], config.reference_model.dtype
    return ReferencePlan(
        "host memory" if home == "shared" else home,
        devices.reference,
        scorers,
        shard_size=(config.ref_model.shard_size or 1) if scorers else 1,
        num_threads=_num_threads(is_overlapped, devices) if scorers else None,
        packs=uses_packing(config, shape),
        compiles=compiles,
        chunk_size=None if shape is None else chunk_size(config, shape, devices.on_cpu),
        prompts=_checked_prompt_lengths(shape, longest_row_tokens(config)),
        bounds=BOUNDS[coarsest_dtype([own_dtype, half])],
        half_dtype=half if half != own_dtype else None,
    )


def _num_threads(is_overlapped: bool, devices: DevicePlan) -> int | None:
    """Returns the CPU threads of a learner rank or scorer; None for torch's default.

    One core is left to engines that work at the same time on the CPU.
    """
    beside_engines = is_overlapped and devices.on_cpu
    processes = devices.ranks_per_node + (devices.scorers_per_node if devices.on_cpu else 0)
    if processes == 1 and not beside_engines:
        return None
    cores = len(os.sched_getaffinity(0)) - (1 if beside_engines else 0)
    return max(1, cores // processes)


def _choose_reference_home(plan: Plan) -> Plan:
    """Chooses the location of a reference without a GPU of its own.

    The reference stays on the training GPU if it fits beside the learner's memory. Otherwise, or where an engine needs
    that memory too, the reference stays in host memory and is copied to the GPU for scoring.
    """
    if plan.devices.on_cpu or plan.devices.reference_home != "shared":
        return plan
    staying = replace(plan, reference=replace(plan.reference, home="training GPU"))
    size = plan.machine.gpu_memory_gib
    has_known_sizes = plan.shape is not None and plan.reference_shape is not None and size is not None
    may_stay = has_known_sizes and not plan.devices.colocated
    reason = "no GPU is left for ref_model"
    if plan.devices.on_cluster:
        reason = "ref_model.num_devices is unset, so no GPU of the Ray cluster is used for ref_model"
    if may_stay and max(phase.bytes for phase in staying.phases) <= MAX_RESIDENT_SHARE * usable_bytes(size or 0.0):
        return replace(staying, notes=(*plan.notes, f"{reason}: the reference stays on the training GPU"))
    note = f"{reason}: the reference stays in host memory and is copied to the first training GPU to score"
    return replace(plan, notes=(*plan.notes, note))


def _choose_recomputation(plan: Plan) -> Plan:
    """Chooses the least recomputation whose memory fits the GPU, unless it is configured.

    The formulas of activations are those of a dense decoder.
    """
    size, shape = plan.machine.gpu_memory_gib, plan.shape
    is_known = size is not None and shape is not None and shape.can_compile_layers
    if plan.config.train.gradient_checkpointing is not None or plan.devices.on_cpu or not is_known:
        return plan
    limit = MAX_RESIDENT_SHARE * usable_bytes(size or 0.0)
    if plan.engine.sleeps and plan.config.inference_model.sleep is False and shape is not None:
        limit -= plans.engine_bytes_without_cache(plan, shape) + _awake_cache_sizes(plan, shape)[-1]
    for recomputation in ("none", "selective"):
        candidate = replace(plan, learner=replace(plan.learner, recomputation=recomputation))
        if max(phase.bytes for phase in candidate.phases) <= limit:
            return candidate
    return plan


def _choose_sleep(plan: Plan) -> Plan:
    """Decides whether an engine on the learner's GPU sleeps while the learner trains.

    The engine stays awake if both fit the GPU together.
    Weights and KV cache of an awake engine stay in place between optimizer steps. Its cache and its share of the GPU
    leave the learner's peak free. Where a size is unknown, the engine sleeps.
    """
    engine, size, shape = plan.engine, plan.machine.gpu_memory_gib, plan.shape
    inference = plan.config.inference_model
    if not engine.sleeps or inference.sleep:
        return plan
    if size is None or shape is None:
        return replace(plan, engine=replace(engine, sleeps=inference.sleep is None))
    peak, fixed = plans.learner_peak_bytes(plan), plans.engine_bytes_without_cache(plan, shape)
    share = max(0.0, math.floor(100 * (1 - (peak + CONTEXT_BYTES) / (size * GIB))) / 100)
    share = min(share, engine.gpu_memory_utilization)
    split, sizes = inference.tensor_parallel_size, _awake_cache_sizes(plan, shape)
    limit = min(MAX_RESIDENT_SHARE * usable_bytes(size) - peak, share * size * GIB)
    fitting = [cache for cache in sizes if fixed + cache <= limit]
    if not fitting and inference.sleep is None:
        return plan
    cache = int(fitting[0] if fitting else sizes[-1])
    engine = replace(engine, sleeps=False, kv_cache_bytes=cache * split, gpu_memory_utilization=share)
    note = (
        f"the engine stays awake while the learner trains: {format_gib(fixed + cache)} of the engine and at most "
        f"{format_gib(peak)} of the learner are on the GPU together; inference_model.sleep=true frees the former"
    )
    return replace(plan, engine=engine, notes=(*plan.notes, note))


def _awake_cache_sizes(plan: Plan, shape: ModelShape) -> list[float]:
    """Returns candidates for the KV cache of an awake engine on one device, in bytes."""
    engine = plan.engine
    if engine.kv_cache_bytes is not None:
        return [engine.kv_cache_bytes / plan.config.inference_model.tensor_parallel_size]
    one = kv_bytes_per_sequence(plan.config, shape, engine.dtype)
    return [max(MIN_SLEEPING_CACHE, factor * engine.max_num_seqs * one) for factor in AWAKE_CACHE_FACTORS]


def _limit_gpu_share(plan: Plan) -> Plan:
    """Limits the GPU share of an engine that takes turns with the learner.

    The engine gets the memory that the learner leaves between optimizer steps: the learner's weights are on the GPU
    before the engine starts, and its optimizer states whenever the engine wakes.
    """
    size = plan.machine.gpu_memory_gib
    if not plan.devices.colocated or plan.engine.backend != "vllm" or size is None or plan.shape is None:
        return plan
    configured_share = plan.engine.gpu_memory_utilization
    free_share = 1 - (plans.resident_bytes(plan, plan.shape) + CONTEXT_BYTES) / (size * GIB)
    share = max(0.0, math.floor(100 * min(configured_share, free_share)) / 100)
    if share >= configured_share:
        return plan
    note = (
        f"inference_model.gpu_memory_utilization={configured_share:g}: the engine gets only {share:g} of the "
        "GPU, since the learner's weights and optimizer state stay on the same GPU"
    )
    engine = replace(plan.engine, gpu_memory_utilization=share)
    return replace(plan, engine=engine, notes=(*plan.notes, note))


def _limit_kv_cache(plan: Plan) -> Plan:
    """Limits the KV cache of an engine that takes turns with the learner.

    The cache holds `SLEEPING_CACHE_FACTOR` times `max_num_seqs` sequences even if more would fit: every GiB is freed
    and allocated again at each turn, and a push invalidates all cached prefixes.
    """
    engine, shape = plan.engine, plan.shape
    if not engine.sleeps or engine.kv_cache_bytes is not None or shape is None:
        return plan
    sequences = SLEEPING_CACHE_FACTOR * engine.max_num_seqs
    needed = max(MIN_SLEEPING_CACHE, sequences * kv_bytes_per_sequence(plan.config, shape, engine.dtype))
    free_bytes = plans.kv_cache_per_device(plan, shape)
    if free_bytes is None or needed > MAX_CACHE_SHARE * free_bytes:
        return plan
    cache_bytes = int(needed) * plan.config.inference_model.tensor_parallel_size
    return replace(plan, engine=replace(engine, kv_cache_bytes=cache_bytes))
