"""Makes the plan of a run (`Plan`) from its config and its machine, one decision after the other."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan import model_shape
from torchgrpo.plan import plan as plans
from torchgrpo.plan.devices import DevicePlan, plan_devices, transport
from torchgrpo.plan.host_memory import share_copies
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.memory import CONTEXT_BYTES, gib, kv_bytes_per_sequence, usable_bytes
from torchgrpo.plan.microbatches import chunk_size, longest_row, microbatch_rows, packs, rank_microbatches
from torchgrpo.plan.model_shape import DTYPE_BYTES, GIB, ModelShape
from torchgrpo.plan.plan import EnginePlan, LearnerPlan, Plan, ReferencePlan, WeightCheckPlan
from torchgrpo.plan.weight_bounds import BOUNDS, coarsest

AUTOCAST = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}
GPU_SEQUENCES, CPU_SEQUENCES = 512, 256
ROOM_TO_STAY = 0.9
"""Share of a GPU up to which a reference may fill it: what is only estimated keeps the rest."""
SEQUENCES_IN_TURNS, SMALLEST_CACHE = 2, GIB
"""What an engine that sleeps has a cache for, times `max_num_seqs`: those that run, and as much for what waits."""
ROOM_FOR_A_CACHE = 0.75
"""Share of the estimated room up to which a size is given; above it vLLM measures what is left."""


def make_plan(config: Config, overlapped: bool, machine: Machine, folder: Path = Path()) -> Plan:
    """The plan of a run, whether it can work (`check`) or not.

    Args:
        overlapped: the script is grpo_async.py.
        folder: where checkpoints will lie.
    Raises:
        ConfigError: devices that cannot be allocated, a backend that is not there.
    """
    gpus = 0 if config.device == "cpu" else machine.num_gpus
    # Another machine has no cluster of this one.
    on_cluster = machine.nodes > 1 or (config.ray.address is not None and config.plan.gpus is None)
    if config.device == "cuda" and on_cluster and config.train_model.ranks > 1:
        gpus = max(gpus, 1)  # those of the cluster's nodes: the driver's own needs none
    if config.device == "cuda" and gpus == 0:
        raise ConfigError(
            "device=cuda: this machine has no NVIDIA GPU; `--config-name grpo_quickstart` trains on a CPU, "
            "device=cpu tries this config there, and run=plan plan.gpus=N plan.gpu_memory_gib=G plans for a "
            "machine that has some"
        )
    devices = plan_devices(config, gpus, overlapped, on_cluster)
    shape = model_shape.find_shape(config.model.name)
    name = config.ref_model.name
    frozen = (
        model_shape.find_shape(name, "ref_model.name") if name and config.policy.uses_reference else shape
    )
    engine = _engine(config, overlapped, machine, devices, shape)
    learner = _learner(config, overlapped, devices, shape)
    # Adapters are files to vLLM, and offloaded shards are gathered in host memory.
    full = config.inference_model.lora == "merge" and config.train_model.offload != "all"
    plan = Plan(
        config=config,
        machine=machine,
        devices=devices,
        shape=shape,
        reference_shape=frozen,
        overlapped=overlapped,
        folder=folder,
        engine=engine,
        learner=learner,
        reference=_reference(config, overlapped, devices, frozen),
        transport=transport(devices, engine.backend == "vllm" and full),
        weight_check=_weight_check(config, engine, learner, shape),
        notes=devices.notes,
    )
    ranks, rows = config.train_model.ranks, config.optim_batch_size
    if rows < ranks:
        idle = (
            f"an optimizer step has {rows} completions, so {ranks - rows} of {ranks} learner ranks have nothing to do: "
            "raise train.optim_batch_size, or lower train_model.num_devices"
        )
        plan = replace(plan, notes=(*plan.notes, idle))
    for decide in (_place_reference, share_copies, _share_gpu, _bound_cache):
        plan = decide(plan)
    return replace(plan, notes=(*plan.notes, *_notes(plan)))


def _notes(plan: Plan) -> Iterator[str]:
    """Sentences on the plan as it was decided."""
    config, machine, shape = plan.config, plan.machine, plan.shape
    split, there = config.inference_model.tensor_parallel_size, machine.num_gpus * machine.nodes
    unused = there - plans.gpus_used(plan)
    known = machine.imagined or not plan.devices.on_cluster
    if not plan.devices.on_cpu and known and unused >= split:
        more = split * (len(plan.devices.engines) + unused // split)
        yield (
            f"{unused} of {there} GPU(s) are unused: inference_model.num_devices={more} generates on them too"
        )
    if config.train.packing and not plan.learner.packs:
        yield (
            f"{config.model.name} is not known to be plain causal attention in every layer: train.packing has no "
            "effect, its microbatches are whole rows, padded to the longest"
        )
    if shape is not None and not shape.plain and plan.engine.backend == "transformers":
        yield (
            f"engines decode {config.model.name} by transformers' own generate, prompts of one length at a time: "
            "inference_model.backend=vllm is faster, where vLLM has the model"
        )
    if shape is not None and config.train_model.lora.quantized:
        width = DTYPE_BYTES[config.model.dtype]
        small, whole = model_shape.quantized_bytes(shape, width), shape.parameters * width
        yield (
            f"the base of the adapters is in 4 bits (nf4): {gib(small)} in place of {gib(whole)}; "
            f"engines hold it out of 4 bits in {plan.weight_dtype}, the adapter added to it"
        )


def _engine(
    config: Config, overlapped: bool, machine: Machine, devices: DevicePlan, shape: ModelShape | None
) -> EnginePlan:
    inference, on_cpu = config.inference_model, devices.on_cpu
    backend, dtype = inference.backend, inference.dtype
    if backend == "auto":
        backend = "vllm" if not on_cpu and machine.vllm is not None else "transformers"
    if backend == "vllm" and machine.vllm is None:
        raise ConfigError(
            "inference_model.backend=vllm: vLLM is not installed; install it (`make vllm`: the CUDA build where an "
            "NVIDIA GPU is, else the CPU build), or take inference_model.backend=transformers"
        )
    if backend == "transformers":  # which is the learner's model once more
        dtype = config.model.dtype
    elif dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    sequences = inference.max_num_seqs or (CPU_SEQUENCES if on_cpu else GPU_SEQUENCES)
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
        async_scheduling=gpu_vllm and (not overlapped or inference.update == "wait"),
        sleeps=backend == "vllm" and devices.colocated,
    )


def _weight_check(
    config: Config, engine: EnginePlan, learner: LearnerPlan, shape: ModelShape | None
) -> WeightCheckPlan:
    of_learner = coarsest([config.model.dtype, learner.autocast, learner.gathered_dtype])
    of_both = coarsest([of_learner, engine.arithmetic, config.inference_model.quantization and "fp8"])
    longest = config.max_model_len
    return WeightCheckPlan(
        dtype=of_both,
        bounds=BOUNDS[of_both],
        learner=BOUNDS[of_learner],
        count=3 if engine.backend == "vllm" else 1,
        length=min(160 if engine.backend == "vllm" else 24, longest),
        prompts=_checked_prompts(shape, longest),
    )


def _checked_prompts(shape: ModelShape | None, longest: int) -> tuple[int, ...]:
    """Lengths of the prompts that a forward pass is checked with. longest: tokens of prompt and response."""
    window = shape.window if shape is not None and shape.window < longest else 0
    prompts = [8, 12, *([window + 4] if window else [])]
    return tuple(max(1, min(length, longest - 8)) for length in prompts)


def _learner(config: Config, overlapped: bool, devices: DevicePlan, shape: ModelShape | None) -> LearnerPlan:
    half = AUTOCAST[config.train.mixed_precision]
    return LearnerPlan(
        shard_size=config.train_model.shards,
        autocast=half if devices.ranks == 1 else None,
        gathered_dtype=None if devices.ranks == 1 else half,
        packs=packs(config, shape),
        microbatch_rows=microbatch_rows(config),
        microbatches=rank_microbatches(config, shape),
        chunk_size=None if shape is None else chunk_size(config, shape, devices.on_cpu),
        num_threads=config.train_model.num_threads or _threads(overlapped, devices),
    )


def _reference(
    config: Config, overlapped: bool, devices: DevicePlan, shape: ModelShape | None
) -> ReferencePlan:
    """The reference, before a place is found for one that has none."""
    home, scorers = devices.reference_home, devices.scorers
    rounding = coarsest([config.reference_model.dtype, AUTOCAST[config.train.mixed_precision]])
    return ReferencePlan(
        "host memory" if home == "shared" else home,
        devices.reference,
        scorers,
        shard_size=(config.ref_model.shard_size or 1) if scorers else 1,
        num_threads=_threads(overlapped, devices) if scorers else None,
        packs=packs(config, shape),
        chunk_size=None if shape is None else chunk_size(config, shape, devices.on_cpu),
        prompts=_checked_prompts(shape, longest_row(config)),
        bounds=BOUNDS[rounding],
    )


def _threads(overlapped: bool, devices: DevicePlan) -> int | None:
    """CPU threads of a learner rank or scorer, one core left to engines beside it; None: all that torch takes."""
    beside = overlapped and devices.on_cpu
    sharing = devices.ranks_per_node + (devices.scorers_per_node if devices.on_cpu else 0)
    if sharing == 1 and not beside:
        return None
    cores = len(os.sched_getaffinity(0)) - (1 if beside else 0)
    return max(1, cores // sharing)


def _place_reference(plan: Plan) -> Plan:
    """A reference without a GPU of its own stays on the training GPU where it fits beside all that the learner holds;
    where an engine needs that room too, it lives in host memory and visits."""
    if plan.devices.on_cpu or plan.devices.reference_home != "shared":
        return plan
    staying = replace(plan, reference=replace(plan.reference, home="training GPU"))
    size = plan.machine.gpu_memory_gib
    known = plan.shape is not None and plan.reference_shape is not None and size is not None
    fits = known and not plan.devices.colocated
    left = "no GPU is left for ref_model"
    if plan.devices.on_cluster:
        left = "ref_model.num_devices is unset, so it takes no GPU of the Ray cluster"
    if fits and max(phase.bytes for phase in staying.phases) <= ROOM_TO_STAY * usable_bytes(size or 0.0):
        return replace(staying, notes=(*plan.notes, f"{left}: it stays on the training GPU"))
    note = f"{left}: it lives in host memory and visits the first training GPU to score"
    return replace(plan, notes=(*plan.notes, note))


def _share_gpu(plan: Plan) -> Plan:
    """An engine that takes turns with the learner may have what the learner keeps on the GPU between its steps leaves:
    the learner's weights are there before the engine starts, its optimizer states whenever the engine wakes."""
    size = plan.machine.gpu_memory_gib
    if not plan.devices.colocated or plan.engine.backend != "vllm" or size is None or plan.shape is None:
        return plan
    asked = plan.engine.gpu_memory_utilization
    left = 1 - (plans.resident(plan, plan.shape) + CONTEXT_BYTES) / (size * GIB)
    share = max(0.0, math.floor(100 * min(asked, left)) / 100)
    if share >= asked:
        return plan
    note = (
        f"the engine takes {share:g} of the GPU and not inference_model.gpu_memory_utilization={asked:g}: "
        "the learner's weights and optimizer state stay there beside it"
    )
    engine = replace(plan.engine, gpu_memory_utilization=share)
    return replace(plan, engine=engine, notes=(*plan.notes, note))


def _bound_cache(plan: Plan) -> Plan:
    """An engine that takes turns with the learner has a KV cache for `SEQUENCES_IN_TURNS` times the sequences that run
    at once, though more would fit: each GiB is given back and taken again at every turn, and no prefix outlives a push.
    """
    engine, shape = plan.engine, plan.shape
    if not engine.sleeps or engine.kv_cache_bytes is not None or shape is None:
        return plan
    sequences = SEQUENCES_IN_TURNS * engine.max_num_seqs
    needed = max(SMALLEST_CACHE, sequences * kv_bytes_per_sequence(plan.config, shape, engine.dtype))
    left = plans.cache_on_device(plan, shape)
    if left is None or needed > ROOM_FOR_A_CACHE * left:
        return plan
    whole = int(needed) * plan.config.inference_model.tensor_parallel_size
    return replace(plan, engine=replace(engine, kv_cache_bytes=whole))
