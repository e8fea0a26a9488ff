"""The number of scorers that share one copy of the frozen model. No torch here."""

from dataclasses import replace

from torchgrpo.plan.host_memory import host_bytes
from torchgrpo.plan.memory import Phase, usable_bytes
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan, most_on_a_node, scorer_phase


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


def fits_gpu(scorer: Phase | None, gpu_memory_gib: float | None) -> bool:
    """Whether a scorer fits a GPU, as far as both sizes are known."""
    return scorer is None or gpu_memory_gib is None or scorer.bytes <= usable_bytes(gpu_memory_gib)
