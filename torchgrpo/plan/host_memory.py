"""Estimates host memory of one node, and chooses how many scorers share a reference.

On a CPU the estimate covers learner, scorers and engines; beside GPUs it covers offloaded tensors and copies. The
module imports no torch.
"""

from contextlib import suppress
from dataclasses import replace

from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan import memory
from torchgrpo.plan.disk import checkpoint_bytes
from torchgrpo.plan.memory import MemoryUse
from torchgrpo.plan.model_shape import DTYPE_BYTES, GIB, ModelShape, find_model_config, make_shape
from torchgrpo.plan.plan import (
    SCORER_KNOBS,
    Plan,
    kv_cache_per_device,
    max_scorers_per_node,
    scorer_fits_gpu,
    scorer_phase,
)


def host_uses(plan: Plan, shape: ModelShape) -> list[MemoryUse]:
    """Returns the uses of host memory on one node.

    On a CPU they are learner, scorers and engines; beside GPUs a reference in host memory, weights of sleeping engines
    and offloaded tensors. In addition, the larger of two sums counts: the copies for a checkpoint and of the last push,
    or the whole models from which sharded scorers load.
    """
    config, devices = plan.config, plan.devices
    if devices.on_cpu:
        on_vllm = plan.engine.backend == "vllm"
        weights = memory.engine_weight_bytes(config, shape, plan.engine.dtype, on_cpu=on_vllm)
        has_packed_copy = plan.is_overlapped or devices.ranks > 1 or not devices.in_process
        if has_packed_copy and not on_vllm:
            # continuous_batching_decoder.py also holds packed weights; only a learner in the same process reuses
            # their memory.
            weights *= 2
        engines = config.inference_model.num_devices * (weights + (kv_cache_per_device(plan, shape) or 0.0))
        if plan.engine.backend == "http":  # the memory of servers is not the run's
            engines = 0.0
        learner = devices.ranks_per_node * max(phase.bytes for phase in plan.phases)
        scorer = scorer_phase(plan)
        scorers = 0.0 if scorer is None else devices.scorers_per_node * scorer.bytes
        uses = [
            MemoryUse("learner", learner, "train.gradient_accumulation_steps"),
            MemoryUse("scorers", scorers, SCORER_KNOBS),
            MemoryUse("engines", engines, "inference_model.num_devices, max_num_seqs"),
        ]
    else:
        shape_on_host = plan.reference_shape if plan.reference.home == "host memory" else None
        size = 0.0 if shape_on_host is None else memory.reference_bytes(config, shape_on_host, devices.ranks)
        uses = [MemoryUse(f"{memory.reference_role(config)} in host memory", size, "ref_model.num_devices")]
        uses.append(_sleeping_engines_use(plan, shape))
        offload, ranks = config.train_model.offload, devices.ranks_per_node
        # Not counted: a sharded reference, which is offloaded together with the policy.
        kept = () if offload == "none" else memory.optimizer_state_uses(config, shape)
        if offload == "all":
            kept += (*memory.weight_uses(config, shape), memory.gradient_use(config, shape))
        for use in kept:
            uses.append(MemoryUse(f"{use.name} of {ranks} rank(s)", ranks * use.bytes, "train_model.offload"))
    node_share = devices.ranks_per_node / devices.ranks  # each rank writes its shards
    state = checkpoint_bytes(config, shape) * node_share if config.train.async_checkpoint else 0.0
    has_copy = plan.transport not in ("in_process", "weight_folder")
    copy = memory.pushed_bytes(config, shape, plan.weight_dtype) if has_copy else 0.0
    copies = [
        MemoryUse("copy for a checkpoint", state, "train.async_checkpoint"),
        MemoryUse("copy of the last push", copy, "model.name, inference_model.dtype"),
    ]
    reference, shards, loaded_bytes = plan.reference_shape, plan.reference.shard_size, 0.0
    if reference is not None and shards > 1:
        # the upper bound: one rank of each copy loads a whole model if its shards cannot be read from files
        node_copies = -(-min(devices.scorers_per_node, max_scorers_per_node(plan)) // shards)
        loaded_bytes = node_copies * memory.reference_bytes(config, reference, shards)
    loading = [MemoryUse("scorers while they load", loaded_bytes, SCORER_KNOBS)]
    uses += max(copies, loading, key=lambda moment: sum(use.bytes for use in moment))
    uses.append(_reward_model_use(config))
    return [use for use in uses if use.bytes]


def _sleeping_engines_use(plan: Plan, shape: ModelShape) -> MemoryUse:
    """Memory of the base weights of engines that sleep; engines without adapters drop their weights."""
    config, engine = plan.config, plan.engine
    size = 0.0
    if engine.sleeps and config.inference_model.lora == "adapter":
        size = config.inference_model.num_devices * memory.engine_weight_bytes(config, shape, engine.dtype, False)
    return MemoryUse("weights of sleeping engines", size, "inference_model.lora=merge, inference_model.quantization")


def _reward_model_use(config: Config) -> MemoryUse:
    """Memory of a reward model on the CPU; 0 bytes where its sizes are unknown."""
    model, size, raw = config.env.reward_model, 0.0, None
    if model.name is not None and model.device == "cpu":
        raw = find_model_config(model.name, "env.reward_model.name")
    if raw is not None:
        with suppress(ConfigError):  # an encoder may lack the sizes that a decoder has
            # A classifier has no head over the vocabulary.
            shape = make_shape({**raw, "tie_word_embeddings": True}, str(model.name))
            size = shape.parameters * DTYPE_BYTES[model.dtype]
    return MemoryUse("reward model", size, "env.reward_model.dtype, env.reward_model.device")


def host_bytes(plan: Plan, shape: ModelShape) -> float:
    """Bytes of host memory that the run takes on one node."""
    return sum(use.bytes for use in host_uses(plan, shape))


def choose_shard_size(plan: Plan) -> Plan:
    """Chooses the smallest number of scorers per copy of the reference that fits.

    The scorers of a copy are on one node. Copies score different microbatches, so more copies are faster. Where no
    number fits, all scorers of a node share one copy; where a size is unknown, each scorer has a copy.
    """
    ranks = plan.reference.ranks
    if not ranks or plan.config.ref_model.shard_size is not None:
        return plan
    divisors = [size for size in range(1, max_scorers_per_node(plan) + 1) if ranks % size == 0]
    candidates = [replace(plan, reference=replace(plan.reference, shard_size=size)) for size in divisors]
    for candidate in candidates:
        host = candidate.machine.host_memory_gib
        if not plan.devices.on_cpu:
            fits = scorer_fits_gpu(scorer_phase(candidate), candidate.machine.gpu_memory_gib)
        else:
            shape = candidate.shape
            fits = host is None or shape is None or host_bytes(candidate, shape) <= host * GIB
        if fits:
            return candidate
    return candidates[-1]
