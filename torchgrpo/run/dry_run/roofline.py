"""Minimum seconds of an optimizer step by the roofline model, and theoretical bytes of collectives.

    a microbatch = max(FLOPs / arithmetic, bytes moved / memory, bytes sent / link)
    an optimizer step = all microbatches, plus the bytes that the optimizer moves / memory

The result is the minimum time if all work overlaps; real kernels are slower. The `machine.*` settings contain the
rates.
"""

from collections import Counter
from dataclasses import dataclass

from torchgrpo.plan.fsdp_buffers import gathered_bytes
from torchgrpo.plan.memory import learner_widths
from torchgrpo.plan.model_shape import GIB, ModelShape
from torchgrpo.plan.plan import Plan
from torchgrpo.run.dry_run.step import DryRun

TERA = 1e12


@dataclass(frozen=True)
class StepSeconds:
    """Minimum seconds of the work of one rank.

    arithmetic, memory, links: seconds of one microbatch. optimizer: seconds of clipping and optimizer update.
    microbatches: microbatches of a rank in an optimizer step.
    """

    arithmetic: float
    memory: float
    links: float
    optimizer: float
    microbatches: int

    @property
    def total(self) -> float:
        """Seconds of an optimizer step."""
        return self.microbatches * max(self.arithmetic, self.memory, self.links) + self.optimizer


def step_seconds(plan: Plan, dry_run: DryRun) -> StepSeconds:
    """Computes the minimum seconds of an optimizer step.

    All-gather and reduce-scatter run in a ring over the n ranks of a shard group, and each sends (n - 1) / n of the
    whole tensor. An all-reduce is a reduce-scatter and an all-gather over the groups.
    """
    rates, sent_bytes = plan.config.machine, dry_run.sent_bytes
    devices, shards = plan.devices, plan.learner.shard_size
    groups = devices.ranks // shards
    inside = rates.link_gib_s if shards <= devices.ranks_per_node else rates.network_gib_s
    across = rates.link_gib_s if devices.ranks == devices.ranks_per_node else rates.network_gib_s
    sharded = (sent_bytes["all-gather"] + sent_bytes["reduce-scatter"]) * (shards - 1) / shards / (inside * GIB)
    return StepSeconds(
        arithmetic=dry_run.flops / (rates.gpu_tflops * TERA),
        memory=dry_run.moved_bytes / (rates.gpu_bandwidth_gib_s * GIB),
        links=sharded + 2 * sent_bytes["all-reduce"] * (groups - 1) / groups / (across * GIB),
        optimizer=dry_run.optimizer_moved_bytes / (rates.gpu_bandwidth_gib_s * GIB),
        microbatches=plan.learner.microbatches,
    )


def collective_bytes(plan: Plan, shape: ModelShape) -> Counter[str]:
    """Computes the theoretical bytes of each collective of a microbatch, comparable with `DryRun.sent_bytes`.

    Layers are gathered for the forward pass, and again for the backward pass if they are freed in between;
    parameters outside the layers once. All gradients are summed in float32; over shard groups their shards are summed.
    """
    devices, shards = plan.devices, plan.learner.shard_size
    if devices.ranks == 1:
        return Counter()
    gathered = gathered_bytes(shape, learner_widths(plan.config, devices.on_cpu), devices.ranks)
    sums = shape.num_layers * gathered.layer_sum + gathered.outside_sum
    counts = Counter({"reduce-scatter": round(sums)})
    gathers = 2 if plan.config.train_model.reshard_after_forward else 1
    counts["all-gather"] = round(gathers * shape.num_layers * gathered.layer + gathered.outside)
    if shards < devices.ranks:
        counts["all-reduce"] = round(sums / shards)
    return counts
