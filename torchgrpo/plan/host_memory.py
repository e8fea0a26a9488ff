"""What a run takes of a node's memory: everything on a CPU, beside GPUs what lives there for them. No torch here."""

from dataclasses import replace

from torchgrpo.plan import memory
from torchgrpo.plan.disk import checkpoint_bytes
from torchgrpo.plan.memory import Use
from torchgrpo.plan.model_shape import GIB, ModelShape
from torchgrpo.plan.plan import SCORER_KNOBS, Plan, cache_on_device, fits_gpu, most_on_a_node, scorer_phase


def host_uses(plan: Plan, shape: ModelShape) -> list[Use]:
    """Memory of the machine that the run takes.

    Everything on a CPU; beside GPUs a reference that visits them.

    To that come the copies that a checkpoint is written from and that the last push leaves, or the whole models that
    shards of scorers are filled from before there are any, whichever are more.
    """
    config, devices = plan.config, plan.devices
    if devices.on_cpu:
        on_vllm = plan.engine.backend == "vllm"
        weights = memory.engine_weights(config, shape, plan.engine.dtype, on_cpu=on_vllm)
        apart = plan.overlapped or devices.ranks > 1 or not devices.in_process
        if apart and not on_vllm:
            # Packed too (running_decoder.py): only a learner of the same process uses that memory again.
            weights *= 2
        engines = config.inference_model.num_devices * (weights + (cache_on_device(plan, shape) or 0.0))
        learner = devices.ranks_per_node * max(phase.bytes for phase in plan.phases)
        scorer = scorer_phase(plan)
        scorers = 0.0 if scorer is None else devices.scorers_per_node * scorer.bytes
        uses = [
            Use("learner", learner, "train.gradient_accumulation_steps"),
            Use("scorers", scorers, SCORER_KNOBS),
            Use("engines", engines, "inference_model.num_devices, max_num_seqs"),
        ]
    else:
        frozen = plan.reference_shape if plan.reference.home == "host memory" else None
        visits = 0.0 if frozen is None else memory.reference_bytes(config, frozen, devices.ranks)
        uses = [Use(f"visiting {memory.frozen_role(config)}", visits, "ref_model.num_devices")]
        offload, ranks = config.train_model.offload, devices.ranks_per_node
        # A reference that is sharded with the policy goes where it goes.
        kept = () if offload == "none" else memory.learner_states(config, shape)
        if offload == "all":
            kept += (*memory.learner_weights(config, shape), memory.learner_gradients(config, shape))
        for use in kept:
            uses.append(Use(f"{use.what} of {ranks} rank(s)", ranks * use.bytes, "train_model.offload"))
    here = devices.ranks_per_node / devices.ranks  # each rank writes its shards
    state = checkpoint_bytes(config, shape) * here if config.train.async_checkpoint else 0.0
    copy = 0.0 if plan.transport == "in_process" else memory.pushed_bytes(config, shape, plan.weight_dtype)
    copies = [
        Use("copy for a checkpoint", state, "train.async_checkpoint"),
        Use("copy of the last push", copy, "model.name, inference_model.dtype"),
    ]
    teacher, shards, whole = plan.reference_shape, plan.reference.shard_size, 0.0
    if teacher is not None and shards > 1:  # whole models, from which the ranks of copies fill their shards
        copies_here = -(-min(devices.scorers_per_node, most_on_a_node(plan)) // shards)
        whole = copies_here * memory.reference_bytes(config, teacher, shards)
    loading = [Use("scorers while they load", whole, SCORER_KNOBS)]
    uses += max(copies, loading, key=lambda moment: sum(use.bytes for use in moment))
    return [use for use in uses if use.bytes]


def host_bytes(plan: Plan, shape: ModelShape) -> float:
    return sum(use.bytes for use in host_uses(plan, shape))


def share_copies(plan: Plan) -> Plan:
    """Choose the fewest scorers on one node whose memory a copy fits.

    Every copy scores microbatches of its own, so more copies are better. As many as can share one where it does not
    fit at all; where a size is not known, each has a copy.
    """
    ranks = plan.reference.ranks
    if not ranks or plan.config.ref_model.shard_size is not None:
        return plan
    divisors = [size for size in range(1, most_on_a_node(plan) + 1) if ranks % size == 0]
    split = [replace(plan, reference=replace(plan.reference, shard_size=size)) for size in divisors]
    for each in split:
        host = each.machine.host_memory_gib
        if not plan.devices.on_cpu:
            fits = fits_gpu(scorer_phase(each), each.machine.gpu_memory_gib)
        else:
            fits = host is None or each.shape is None or host_bytes(each, each.shape) <= host * GIB
        if fits:
            return each
    return split[-1]
