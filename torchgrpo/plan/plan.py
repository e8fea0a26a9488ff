"""Dataclasses of a run's plan, and device and memory figures derived from them.

    Config ─┐
            ├─▶ make_plan ─▶ Plan ─▶ problems (problems.py), remedies (remedies.py), table (plan_report.py)
    Machine ┘                  └────▶ the objects of the run, which read the resolved values

`plan/make_plan.py` makes the plan, whose values depend on several fields or the machine. The
module touches no device, loads no weight and imports no torch.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from config.schema.config import Config
from torchgrpo.plan import memory
from torchgrpo.plan.devices import DevicePlan
from torchgrpo.plan.log_prob_bounds import BOUNDS, Bounds
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.model_shape import GIB, ModelShape

ReferenceHome = Literal[
    "none", "own devices", "base of the LoRA policy", "learner ranks", "training GPU", "host memory"
]
SCORER_KNOBS = "ref_model.num_devices, ref_model.shard_size, ref_model.dtype"


@dataclass(frozen=True)
class EnginePlan:
    """Settings of each rollout engine.

    dtype: dtype of the weights. arithmetic: the same dtype, or `tf32` if float32 products use ten bits of each factor,
    as in vLLM's attention on a GPU. gpu_memory_utilization: share of a GPU for vLLM. kv_cache_bytes: cache of one
    engine on all its devices; None: the memory that the share leaves. max_num_batched_tokens: None for the engine's
    default. async_scheduling: whether vLLM prepares a step while the previous step runs, which requires that no push
    falls between the two steps. sleeps: whether the engine sleeps while the learner works on the same GPUs; false if
    learner and engine fit the GPUs together.
    """

    backend: str
    dtype: str
    arithmetic: str
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enforce_eager: bool
    async_scheduling: bool
    sleeps: bool


@dataclass(frozen=True)
class WeightCheckPlan:
    """Sequences of the weight check, and bounds on the difference between engine and learner.

    dtype: the coarsest arithmetic of engine and learner, which determines `bounds`. learner: bounds within the learner
    alone. count, length: number and length of the fixed sequences, which are longer than a block of the engine's prefix
    cache (128 tokens on a CPU), if there is one. prompts: prompt lengths of the forward check at the start; one prompt
    is longer than the model's attention window, if there is one.
    """

    dtype: str
    bounds: Bounds
    learner: Bounds
    count: int
    length: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class LearnerPlan:
    """Settings of the learner, or of each learner rank.

    shard_size: ranks that share one copy of the parameters; each group of that size has a copy.
    autocast: autocast dtype of forward and backward pass; None: the dtype of the weights. Weights in the dtype of
        `train.mixed_precision` need no autocast: one rank then computes as several do.
    gathered_dtype: dtype in which several ranks, which use no autocast, gather their parameters and compute. None: the
        dtype of the weights.
    packs: whether a microbatch is one packed sequence, if the model supports that.
    compiles: whether decoder layers are compiled.
    recomputation: activations that the backward pass recomputes: `none`, `selective` or `full`.
    microbatch_rows: completions of one rank's microbatch without a limit on positions. microbatches: microbatches of
        one rank in an optimizer step.
    chunk_size: response tokens whose logits exist at one time; None if the size of the head is unknown.
    num_threads: CPU threads of a rank's process; None: torch's default.
    """

    shard_size: int
    autocast: str | None
    gathered_dtype: str | None
    packs: bool
    compiles: bool
    recomputation: memory.Recomputation
    microbatch_rows: int
    microbatches: int
    chunk_size: int | None
    num_threads: int | None


@dataclass(frozen=True)
class ReferencePlan:
    """Location and settings of the reference model.

    home: `host memory` copies the reference to the training GPU for scoring (on a CPU it stays where it is). `learner
    ranks` shards the reference over them; it scores in turns with the policy. `own devices` runs `ranks` Ray actors
    that score while the learner works, and `shard_size` of them share one copy of the parameters.
    devices: a GPU index for each actor; empty on a CPU, and on a cluster only their number counts. num_threads: CPU
    threads of each actor; None: torch's default. packs, compiles, chunk_size: as in `LearnerPlan`, for this model.
    prompts, bounds: as `prompts` and `learner` of `WeightCheckPlan`, for this model. half_dtype: dtype in which the
    model computes, by autocast or gathered parameters; None: the dtype of its weights.
    """

    home: ReferenceHome
    devices: tuple[int, ...] = ()
    ranks: int = 0
    shard_size: int = 1
    num_threads: int | None = None
    packs: bool = False
    compiles: bool = False
    chunk_size: int | None = None
    prompts: tuple[int, ...] = ()
    bounds: Bounds = BOUNDS["float32"]
    half_dtype: str | None = None


@dataclass(frozen=True)
class Plan:
    """Resolved settings of a run: machine, devices, engines, learner and reference.

    shape: sizes of the policy; None for a hub model whose config.json is not on this machine. reference_shape: sizes
    of the reference model, or None. folder: folder of the checkpoints. notes: decisions that the plan made for the
    user, one sentence each.
    """

    config: Config
    machine: Machine
    devices: DevicePlan
    shape: ModelShape | None
    reference_shape: ModelShape | None
    is_overlapped: bool
    folder: Path
    engine: EnginePlan
    learner: LearnerPlan
    reference: ReferencePlan
    transport: str
    weight_check: WeightCheckPlan
    notes: tuple[str, ...]

    @property
    def weight_dtype(self) -> str:
        """The dtype in which full weights are sent."""
        return self.engine.dtype

    @property
    def ray_cpus(self) -> int:
        """CPU cores that a local Ray runtime reserves for engines, learner ranks and scorers."""
        devices = self.devices
        engines = 0 if devices.in_process else len(devices.engines)
        ranks = devices.ranks if devices.ranks > 1 else 0
        return engines * self.config.ray.num_cpus_per_engine + ranks + self.reference.ranks

    @property
    def phases(self) -> list[memory.Phase]:
        """Memory of a learner rank by phase; empty if the model's sizes are unknown."""
        if self.shape is None:
            return []
        location, on_cpu = reference_location(self), self.devices.on_cpu
        recomputation = self.learner.recomputation
        return memory.train_phases(self.config, self.shape, on_cpu, location, self.reference_shape, recomputation)


def count_used_gpus(plan: Plan) -> int:
    """Number of GPUs that the run uses on all nodes."""
    devices = plan.devices
    if devices.on_cluster:  # the cluster chooses the GPUs, so only their number counts
        return len(devices.train) + len(devices.reference) + sum(map(len, devices.engines))
    return len({*devices.train, *devices.reference, *chain.from_iterable(devices.engines)})


def resident_bytes(plan: Plan, shape: ModelShape) -> float:
    """Bytes that a learner rank keeps on its GPU between steps, including a resident reference."""
    return memory.resident_phase(plan.config, shape, reference_location(plan), plan.reference_shape).bytes


def scorer_phase(plan: Plan) -> memory.Phase | None:
    """Memory of each scorer; None without scorers or for a model of unknown sizes."""
    shape, ranks = plan.reference_shape, plan.reference.shard_size
    if shape is None or not plan.reference.ranks:
        return None
    name = f"weights of the {memory.reference_role(plan.config)}"
    weights = memory.MemoryUse(name, memory.reference_bytes(plan.config, shape, ranks) / ranks, SCORER_KNOBS)
    widths = memory.reference_widths(plan.config, plan.devices.on_cpu, ranks)
    uses = (weights, *memory.scoring_uses(plan.config, shape, widths, ranks, SCORER_KNOBS))
    return memory.Phase("scorer", tuple(use for use in uses if use.bytes))


def scorer_fits_gpu(scorer: memory.Phase | None, gpu_memory_gib: float | None) -> bool:
    """Whether a scorer fits a GPU; True if either size is unknown."""
    return scorer is None or gpu_memory_gib is None or scorer.bytes <= memory.usable_bytes(gpu_memory_gib)


def max_scorers_per_node(plan: Plan) -> int:
    """Maximum number of scorers on one node: one per GPU if there are several nodes."""
    ranks, machine = plan.reference.ranks, plan.machine
    has_several_nodes = machine.nodes > 1 and not plan.devices.on_cpu
    return min(ranks, max(1, machine.num_gpus)) if has_several_nodes else ranks


def reference_location(plan: Plan) -> memory.ReferenceLocation:
    """Returns the location of the reference for a learner rank.

    A reference of unknown sizes counts as `elsewhere`, so that an estimate contains no memory for it.
    """
    home = plan.reference.home
    if plan.reference_shape is None:
        return "elsewhere"
    if home == "learner ranks":
        return "sharded"
    if home == "training GPU" or (home == "host memory" and plan.devices.on_cpu):
        return "resident"
    return "visiting" if home == "host memory" else "elsewhere"


def kv_cache_per_device(plan: Plan, shape: ModelShape) -> float | None:
    """Bytes of KV cache on one device of an engine; None for unknown GPU memory."""
    split = plan.config.inference_model.tensor_parallel_size
    if plan.engine.backend != "vllm":
        rows = min(plan.engine.max_num_seqs, plan.config.completions_per_iteration)
        return rows * memory.kv_bytes_per_sequence(plan.config, shape, plan.engine.dtype)
    if plan.engine.kv_cache_bytes is not None:
        return plan.engine.kv_cache_bytes / split
    size = plan.machine.gpu_memory_gib
    if size is None:
        return None
    return plan.engine.gpu_memory_utilization * size * GIB - engine_bytes_without_cache(plan, shape)


def engine_bytes_without_cache(plan: Plan, shape: ModelShape) -> float:
    """Bytes of a vLLM engine on one of its devices, without the KV cache."""
    engine, split = plan.engine, plan.config.inference_model.tensor_parallel_size
    weights = memory.engine_weight_bytes(plan.config, shape, engine.dtype, plan.devices.on_cpu)
    return weights + memory.engine_work_bytes(shape, engine.max_num_batched_tokens or 0, engine.max_num_seqs, split)


def learner_peak_bytes(plan: Plan) -> float:
    """Bytes of the largest phase of a learner rank.

    They include the CUDA context of an engine in another process.
    """
    peak = max((phase.bytes for phase in plan.phases), default=0.0)
    return peak if plan.devices.in_process else peak + memory.CONTEXT_BYTES
