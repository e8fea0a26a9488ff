"""From counts to seconds: the slowest of arithmetic, memory and links, on a machine whose figures the user may change.

    a microbatch = max(FLOPs / arithmetic, bytes moved / memory, bytes sent / link); an optimizer step = all of them,
    and the bytes that the optimizer moves

It is the least that a step takes if everything overlaps; no kernel reaches these figures.
"""

from collections import Counter
from dataclasses import dataclass

from torchgrpo.plan.gathering import gathered
from torchgrpo.plan.memory import arithmetic
from torchgrpo.plan.model_shape import GIB, ModelShape
from torchgrpo.plan.plan import Plan
from torchgrpo.run.rehearsal.step import Rehearsal

TERA = 1e12


@dataclass(frozen=True)
class Seconds:
    """Of one microbatch: arithmetic, memory, links. step: of the optimizer, once. microbatches: of a rank in a step."""

    arithmetic: float
    memory: float
    links: float
    step: float
    microbatches: int

    @property
    def total(self) -> float:
        """Of an optimizer step."""
        return self.microbatches * max(self.arithmetic, self.memory, self.links) + self.step


def seconds(plan: Plan, rehearsal: Rehearsal) -> Seconds:
    """All-gather and reduce-scatter go round the ranks of a shard group, each passing (n - 1) / n of the whole; an
    all-reduce is both, over the groups."""
    figures, sent = plan.config.plan, rehearsal.sent
    devices, shards = plan.devices, plan.learner.shard_size
    groups = devices.ranks // shards
    inside = figures.link_gib_s if shards <= devices.ranks_per_node else figures.network_gib_s
    across = figures.link_gib_s if devices.ranks == devices.ranks_per_node else figures.network_gib_s
    sharded = (sent["all-gather"] + sent["reduce-scatter"]) * (shards - 1) / shards / (inside * GIB)
    return Seconds(
        arithmetic=rehearsal.flops / (figures.gpu_tflops * TERA),
        memory=rehearsal.moved / (figures.gpu_bandwidth_gib_s * GIB),
        links=sharded + 2 * sent["all-reduce"] * (groups - 1) / groups / (across * GIB),
        step=rehearsal.moved_by_step / (figures.gpu_bandwidth_gib_s * GIB),
        microbatches=plan.learner.microbatches,
    )


def theory(plan: Plan, shape: ModelShape) -> Counter[str]:
    """Bytes of each collective of a microbatch, as `Rehearsal.sent` has them: layers are gathered for the forward and
    the backward pass, what is outside once; all gradients are summed in float32, over groups as shards."""
    devices, shards = plan.devices, plan.learner.shard_size
    if devices.ranks == 1:
        return Counter()
    whole = gathered(shape, arithmetic(plan.config, devices.on_cpu), devices.ranks)
    sums = shape.num_layers * whole.layer_sum + whole.outside_sum
    counts = Counter({"reduce-scatter": round(sums)})
    counts["all-gather"] = round(2 * shape.num_layers * whole.layer + whole.outside)
    if shards < devices.ranks:
        counts["all-reduce"] = round(sums / shards)
    return counts
