"""The plan of a run: every value that depends on more than one field, or on the machine, resolved once.

    Config ─┐
            ├─▶ make_plan ─▶ Plan ─▶ problems (plan/problems.py), remedies (plan/remedies.py), text (plan/plan_text.py)
    Machine ┘                  └────▶ the objects of the run, which resolve none of this again

`plan/make_plan.py` makes it. No device is touched, no weight loaded, no torch imported.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from config.schema.config import Config
from torchgrpo.plan import memory
from torchgrpo.plan.devices import DevicePlan
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.model_shape import GIB, ModelShape
from torchgrpo.plan.weight_bounds import BOUNDS, Bounds

ReferenceHome = Literal[
    "none", "own devices", "base of the LoRA policy", "learner ranks", "training GPU", "host memory"
]
SCORER_KNOBS = "ref_model.num_devices, ref_model.shard_size, ref_model.dtype"


@dataclass(frozen=True)
class EnginePlan:
    """Every rollout engine of the run.

    dtype: of its weights. arithmetic: the same, or `tf32` where products of float32 take ten bits of each factor, as
    vLLM's attention does on a GPU. gpu_memory_utilization: share of a GPU that vLLM takes. kv_cache_bytes: of
    one engine, all its devices together; None: what that share leaves. max_num_batched_tokens: None leaves it to the
    engine. async_scheduling: vLLM prepares a step while the one before it runs; only where no push can fall between the
    two, for nothing is in flight then or all of it is finished first. sleeps: while the learner works, for they take
    turns on its GPUs.
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
    """The sequences that engines and learner score, and the bounds on their difference.

    dtype: the coarsest arithmetic of both sides, whose `bounds` hold. learner: bounds within the learner alone.
    count, length: of the fixed sequences, longer than a block of the engine's prefix cache (128 tokens on a CPU), if it
    has one. prompts: lengths of those that are decoded at the start; one reaches beyond the model's window, if it has
    one.
    """

    dtype: str
    bounds: Bounds
    learner: Bounds
    count: int
    length: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class LearnerPlan:
    """The learner, or each of its ranks.

    shard_size: ranks that share one copy of the parameters; the others hold copies of their own.
    autocast: dtype of forward and backward under autocast, None: that of the weights.
    gathered_dtype: several ranks have no autocast; they gather their parameters in this dtype and compute in it. None:
        in that of the weights.
    packs: a microbatch is one sequence, where the model can.
    microbatch_rows: completions that one rank takes at a time without a limit on positions. microbatches: that it takes
        in an optimizer step.
    chunk_size: response tokens whose logits exist at one time; None: by the head, which is not known yet.
    num_threads: of its process; None: all that torch takes.
    """

    shard_size: int
    autocast: str | None
    gathered_dtype: str | None
    packs: bool
    microbatch_rows: int
    microbatches: int
    chunk_size: int | None
    num_threads: int | None


@dataclass(frozen=True)
class ReferencePlan:
    """The reference model. With `host memory` it visits the training GPU to score; on a CPU it lives there. With
    `learner ranks` it is sharded over them and scores in turns with the policy.

    With `own devices` it is `ranks` Ray actors that score while the learner works, `shard_size` of which share one copy
    of its parameters. devices: a GPU index for each; empty on a CPU, and on a cluster only their number counts.
    num_threads: of each; None: all that torch takes.
    packs, chunk_size: as those of `LearnerPlan`, of this model. prompts, bounds: as `prompts` and `learner` of
    `WeightCheckPlan`, of this model.
    """

    home: ReferenceHome
    devices: tuple[int, ...] = ()
    ranks: int = 0
    shard_size: int = 1
    num_threads: int | None = None
    packs: bool = False
    chunk_size: int | None = None
    prompts: tuple[int, ...] = ()
    bounds: Bounds = BOUNDS["float32"]


@dataclass(frozen=True)
class Plan:
    """A resolved run: machine, devices, engines, learner and reference.

    shape: None for a hub model whose config.json is not known here. reference_shape: likewise, of the model that is
    the reference. folder: of the checkpoints. weight_dtype: that full weights travel in. notes: what was decided for
    the user, one sentence each."""

    config: Config
    machine: Machine
    devices: DevicePlan
    shape: ModelShape | None
    reference_shape: ModelShape | None
    overlapped: bool
    folder: Path
    engine: EnginePlan
    learner: LearnerPlan
    reference: ReferencePlan
    transport: str
    weight_check: WeightCheckPlan
    notes: tuple[str, ...]

    @property
    def weight_dtype(self) -> str:
        return self.engine.dtype

    @property
    def ray_cpus(self) -> int:
        """CPU cores that a local Ray runtime promises to engines, learner ranks and scorers."""
        devices = self.devices
        engines = 0 if devices.in_process else len(devices.engines)
        ranks = devices.ranks if devices.ranks > 1 else 0
        return engines * self.config.ray.num_cpus_per_engine + ranks + self.reference.ranks

    @property
    def phases(self) -> list[memory.Phase]:
        """What a learner rank holds, phase by phase; empty where the model's sizes are not known."""
        if self.shape is None:
            return []
        at, frozen = reference_at(self), self.reference_shape
        return memory.train_phases(self.config, self.shape, self.devices.on_cpu, at, frozen)


def gpus_used(plan: Plan) -> int:
    """GPUs of all nodes that anything of the run is on."""
    devices = plan.devices
    if devices.on_cluster:  # which chooses them: only their number counts
        return len(devices.train) + len(devices.reference) + sum(map(len, devices.engines))
    return len({*devices.train, *devices.reference, *chain.from_iterable(devices.engines)})


def resident(plan: Plan, shape: ModelShape) -> float:
    """Bytes that a learner rank keeps on its GPU between two steps, a reference that stays there included."""
    return memory.between_steps(plan.config, shape, reference_at(plan), plan.reference_shape).bytes


def scorer_phase(plan: Plan) -> memory.Phase | None:
    """Memory of each scorer; None without scorers, or where their model's sizes are not known."""
    shape, ranks = plan.reference_shape, plan.reference.shard_size
    if shape is None or not plan.reference.ranks:
        return None
    what = f"weights of the {memory.frozen_role(plan.config)}"
    weights = memory.Use(what, memory.reference_bytes(plan.config, shape, ranks) / ranks, SCORER_KNOBS)
    widths = memory.frozen_arithmetic(plan.config, plan.devices.on_cpu, ranks)
    uses = (weights, *memory.scoring(plan.config, shape, widths, ranks, SCORER_KNOBS))
    return memory.Phase("scorer", tuple(use for use in uses if use.bytes))


def fits_gpu(scorer: memory.Phase | None, gpu_memory_gib: float | None) -> bool:
    """Whether a scorer fits a GPU, as far as both sizes are known."""
    return scorer is None or gpu_memory_gib is None or scorer.bytes <= memory.usable_bytes(gpu_memory_gib)


def most_on_a_node(plan: Plan) -> int:
    """Scorers that one node can have: as many as it has GPUs, if known."""
    ranks, machine = plan.reference.ranks, plan.machine
    several = machine.nodes > 1 and not plan.devices.on_cpu
    return min(ranks, max(1, machine.num_gpus)) if several else ranks


def reference_at(plan: Plan) -> memory.ReferenceAt:
    """Place of the reference as a learner rank sees it; one of unknown sizes takes no room in an estimate."""
    home = plan.reference.home
    if plan.reference_shape is None:
        return "elsewhere"
    if home == "learner ranks":
        return "sharded"
    if home == "training GPU" or (home == "host memory" and plan.devices.on_cpu):
        return "resident"
    return "visiting" if home == "host memory" else "elsewhere"


def cache_on_device(plan: Plan, shape: ModelShape) -> float | None:
    """KV cache on one device of an engine in bytes; None where a GPU's memory is not known."""
    split = plan.config.inference_model.tensor_parallel_size
    if plan.engine.backend != "vllm":
        rows = min(plan.engine.max_num_seqs, plan.config.completions_per_iteration)
        return rows * memory.kv_bytes_per_sequence(plan.config, shape, plan.engine.dtype)
    if plan.engine.kv_cache_bytes is not None:
        return plan.engine.kv_cache_bytes / split
    size = plan.machine.gpu_memory_gib
    if size is None:
        return None
    taken = memory.engine_weights(plan.config, shape, plan.engine.dtype, plan.devices.on_cpu)
    batched = plan.engine.max_num_batched_tokens or 0
    work = memory.engine_work_bytes(shape, batched, plan.engine.max_num_seqs, split)
    return plan.engine.gpu_memory_utilization * size * GIB - taken - work
