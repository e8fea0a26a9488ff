"""Minimum and priced seconds of an optimizer step, priced MFU, and theoretical bytes of collectives.

    a microbatch = max(FLOPs / arithmetic, bytes moved / memory, bytes sent / link)
    an optimizer step = all microbatches, plus the bytes that the optimizer moves / memory

The result is the minimum time if all work overlaps; real kernels are slower. A priced time sums the kernels of
`operation_prices.py` at reachable rates. The `machine.*` settings contain the rates.
"""

from collections import Counter
from dataclasses import dataclass

from torchgrpo.plan.activations import FLOAT
from torchgrpo.plan.fsdp_buffers import gathered_bytes
from torchgrpo.plan.memory import learner_widths
from torchgrpo.plan.microbatch_sizes import longest_microbatch, longest_microbatch_rows
from torchgrpo.plan.model_shape import GIB, TERA, ModelShape
from torchgrpo.plan.plan import Plan
from torchgrpo.run.dry_run.step import DryRun
from torchgrpo.training.step_speed import useful_flops


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
    whole tensor. An all-reduce is a reduce-scatter and an all-gather over the groups. In an all-to-all of n ranks,
    each sends (n - 1) / n of its tensor.
    """
    rates, sent_bytes = plan.config.machine, dry_run.sent_bytes
    devices, shards = plan.devices, plan.learner.shard_size
    groups = devices.ranks // shards
    inside = rates.link_gib_s if shards <= devices.ranks_per_node else rates.network_gib_s
    across = rates.link_gib_s if devices.ranks == devices.ranks_per_node else rates.network_gib_s
    sharded = (sent_bytes["all-gather"] + sent_bytes["reduce-scatter"]) * (shards - 1) / shards / (inside * GIB)
    size = plan.config.train_model.context_parallel
    near = rates.link_gib_s if devices.ranks_per_node % size == 0 else rates.network_gib_s
    exchange_seconds = sent_bytes["all-to-all"] * (size - 1) / size / (near * GIB)
    return StepSeconds(
        arithmetic=dry_run.flops / (rates.gpu_tflops * TERA),
        memory=dry_run.moved_bytes / (rates.gpu_bandwidth_gib_s * GIB),
        links=sharded + exchange_seconds + 2 * sent_bytes["all-reduce"] * (groups - 1) / groups / (across * GIB),
        optimizer=dry_run.optimizer_moved_bytes / (rates.gpu_bandwidth_gib_s * GIB),
        microbatches=plan.learner.microbatches,
    )


@dataclass(frozen=True)
class PricedStep:
    """Priced seconds of the work of one rank.

    microbatch, optimizer: seconds of one microbatch, and of clipping and optimizer update. products: part of
    `microbatch` in matrix products and attention. useful_flops: this rank's part of `useful_flops`. mfu: share of
    `machine.gpu_tflops` that useful FLOPs take in an optimizer step.
    """

    microbatch: float
    products: float
    optimizer: float
    useful_flops: int
    mfu: float


def priced_step(plan: Plan, shape: ModelShape, dry_run: DryRun) -> PricedStep:
    """Prices an optimizer step. Collectives overlap with kernels, so the longer of the two counts."""
    rates, microbatches = plan.config.machine, plan.learner.microbatches
    microbatch = sum(kernel.seconds(rates) for kernel in dry_run.kernels)
    optimizer = sum(kernel.seconds(rates) for kernel in dry_run.optimizer_kernels)
    whole = useful_flops(shape, dry_run.sizes, has_adapters=plan.config.train_model.lora.enabled)
    useful = whole // plan.config.train_model.context_parallel
    total = microbatches * max(microbatch, step_seconds(plan, dry_run).links) + optimizer
    return PricedStep(
        microbatch=microbatch,
        products=sum(kernel.seconds(rates) for kernel in dry_run.kernels if kernel.flops),
        optimizer=optimizer,
        useful_flops=useful,
        mfu=microbatches * useful / (total * rates.gpu_tflops * TERA),
    )


def collective_bytes(plan: Plan, shape: ModelShape) -> Counter[str]:
    """Computes the theoretical bytes of each collective of a microbatch, comparable with `DryRun.sent_bytes`.

    Layers are gathered for the forward pass, and again for the backward pass if they are freed in between;
    parameters outside the layers once. All gradients are summed in float32; over shard groups their shards are summed.
    Ranks that share a microbatch exchange queries, keys, values and outputs of every layer, and their gradients; they
    sum log-probs and entropies in float32.
    """
    devices, shards = plan.devices, plan.learner.shard_size
    if devices.ranks == 1:
        return Counter()
    widths = learner_widths(plan.config, devices.on_cpu)
    gathered = gathered_bytes(shape, widths, devices.ranks)
    sums = shape.num_layers * gathered.layer_sum + gathered.outside_sum
    counts = Counter({"reduce-scatter": round(sums)})
    gathers = 2 if plan.config.train_model.reshard_after_forward else 1
    counts["all-gather"] = round(gathers * shape.num_layers * gathered.layer + gathered.outside)
    if shards < devices.ranks:
        counts["all-reduce"] = round(sums / shards)
    size = plan.config.train_model.context_parallel
    if size > 1:
        batch = longest_microbatch(plan.config, shape, devices.on_cpu, size)
        heads = 2 * (shape.num_heads + shape.num_kv_heads)
        passes = 2 if plan.learner.recomputation == "none" else 3
        elements = passes * shape.num_layers * batch.positions * heads * shape.head_dim
        counts["all-to-all"] = round(elements * widths.factor)
        tokens = longest_microbatch_rows(plan.config, shape) * plan.config.response_tokens
        counts["all-reduce"] += 2 * tokens * FLOAT
    return counts
