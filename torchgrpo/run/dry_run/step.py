"""Runs one rank's optimizer step on fake tensors, and returns peak memory, FLOPs and traffic.

    score ──▶ forward ──▶ backward ──▶ clip ──▶ optimizer step      peak memory of each phase, in bytes by kind
              a second run: FLOPs, bytes moved, bytes of each collective

The step runs the code of `Worker`. The process group is PyTorch's `fake` backend, which has any number of ranks in this
process and whose collectives do nothing. No numbers are computed, so a step is always finite. Not included are a
reference on devices of its own, the scaling of float16 gradients, which needs CUDA, and the copy of a layer's shards
that is in flight from host memory (`train_model.offload=all`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchgrpo.batches.batch import Batch, CompletionRewards, Tokens
from torchgrpo.plan.microbatch_sizes import longest_microbatch_rows
from torchgrpo.plan.plan import Plan, ReferencePlan
from torchgrpo.run.dry_run.fake_tensors import use_fake_tensors
from torchgrpo.run.dry_run.flops import attention_flops
from torchgrpo.run.dry_run.measured_worker import MeasuredWorker, label_tensors
from torchgrpo.run.dry_run.operation_prices import Kernel, PriceTracker, fuse_layers
from torchgrpo.run.dry_run.tensor_tracker import BytesByKind, MemoryTracker, TrafficTracker
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.context_parallel import ContextGroup, join_context_group
from torchgrpo.training.learner_models import make_models, make_sharded_models
from torchgrpo.training.model_loading import load_model
from torchgrpo.training.sharding import decoder_layers, learner_mesh
from torchgrpo.training.step_speed import PackedSizes, packed_sizes
from torchgrpo.training.worker import MicrobatchTask

Peaks = dict[str, BytesByKind]
"""Peak memory by phase, in bytes by kind."""


@dataclass(frozen=True)
class DryRun:
    """Memory and work of one rank in an optimizer step.

    peaks: peak memory by phase. flops: operations of one microbatch, forward and backward. moved_bytes: bytes that the
    operations of one microbatch read and write, without fusion. kernels: kernels of one microbatch, with the fusion of
    compiled layers. sent_bytes, collective_calls: bytes and calls of one microbatch by collective, as `TrafficTracker`
    counts them. optimizer_moved_bytes, optimizer_kernels: bytes that clipping and the optimizer read and write, and
    their kernels. sizes: sizes of the microbatch.
    """

    peaks: Peaks
    sizes: PackedSizes
    flops: int
    moved_bytes: int
    kernels: list[Kernel]
    sent_bytes: Counter[str]
    collective_calls: Counter[str]
    optimizer_moved_bytes: int
    optimizer_kernels: list[Kernel]


def peak_phase(peaks: Peaks) -> str:
    """Returns the phase with the largest peak."""
    return max(peaks, key=lambda phase: peaks[phase].total())


def peak_bytes(peaks: Peaks) -> int:
    """Returns the bytes of the largest peak."""
    return peaks[peak_phase(peaks)].total()


def dry_run_step(plan: Plan) -> DryRun:
    """Runs one optimizer step on fake tensors and returns its memory and work.

    plan: the plan of a model whose config.json is known.
    """
    traffic: dict[str, TrafficTracker] = {}
    with _prepared_worker(plan) as (worker, task):
        sizes = packed_sizes(task.batch.tokens)
        formulas = attention_flops(sizes.pairs)
        microbatch, update = PriceTracker(formulas), PriceTracker(formulas)
        prices = {"forward": microbatch, "backward": microbatch, "clip": update, "optimizer step": update}

        @contextmanager
        def count_phase(phase: str) -> Iterator[None]:
            traffic[phase] = TrafficTracker()
            with traffic[phase], prices[phase]:
                yield

        compiled = decoder_layers(worker.model) if plan.learner.compiles else ()
        with patch.object(worker, "measure_phase", count_phase):
            with fuse_layers(microbatch, compiled):
                worker.gradients([task])
            worker.take_output()
            worker.update()
        peaks = _peaks(plan, worker, task)
    forward, backward = traffic["forward"], traffic["backward"]
    return DryRun(
        peaks=peaks,
        sizes=sizes,
        flops=sum(kernel.flops for kernel in microbatch.kernels),
        moved_bytes=forward.moved_bytes + backward.moved_bytes,
        kernels=microbatch.kernels,
        sent_bytes=forward.sent_bytes + backward.sent_bytes,
        collective_calls=forward.collective_calls + backward.collective_calls,
        optimizer_moved_bytes=traffic["clip"].moved_bytes + traffic["optimizer step"].moved_bytes,
        optimizer_kernels=update.kernels,
    )


def dry_run_peaks(plan: Plan) -> Peaks:
    """Returns only the peaks of `dry_run_step`, in less time."""
    with _prepared_worker(plan) as (worker, task):
        return _peaks(plan, worker, task)


def _peaks(plan: Plan, worker: MeasuredWorker, task: MicrobatchTask) -> Peaks:
    memory = MemoryTracker()
    with label_tensors(worker, memory, plan.learner.microbatches):
        with worker.measure_phase("score"):
            if worker.reference is None:  # the policy's own scoring pass before its first update
                worker.log_prob([task.batch])
            else:
                worker.reference_log_prob([task.batch])
        worker.gradients([task])
        worker.take_output()
        worker.update()
    return memory.peaks


def make_longest_microbatch(plan: Plan) -> Batch:
    """Makes a microbatch in which every prompt and response has the maximum length.

    The prompts of a group are equal.
    """
    config, rows = plan.config, longest_microbatch_rows(plan.config, plan.shape)
    prompt, response = config.env.max_prompt_tokens, config.response_tokens
    group = torch.arange(rows)[:, None] // config.env.repeats

    def full(width: int, value: Any) -> Tensor:
        return torch.full((rows, width), value)

    return Batch(
        tokens=Tokens(
            prompt=group.expand(-1, prompt) % 2,
            prompt_mask=full(prompt, True),
            response=full(response, 1),
            response_mask=full(response, True),
            loss_mask=full(response, True),
            batch_size=[rows],
        ),
        next=CompletionRewards(reward=full(1, 1.0), reward_status=full(1, 0), batch_size=[rows]),
        group_id=group,
        sample_log_prob=full(response, -1.0),
        policy_version=full(response, 0),
        finish_reason=full(1, 0),
        temperature=full(1, 1.0),
        ref_log_prob=full(response, -1.0),
        advantage=full(1, 1.0),
        mask=full(response, True),
        batch_size=[rows],
    )


@contextmanager
def _prepared_worker(plan: Plan) -> Iterator[tuple[MeasuredWorker, MicrobatchTask]]:
    """Yields the worker of a rank after one step, and a microbatch."""
    batch = make_longest_microbatch(plan)
    assert batch.mask is not None, "`make_longest_microbatch` sets the mask"
    policy = plan.config.policy
    if policy.has_batchwide_weights:  # present in steps of several microbatches
        batch.weight = batch.penalty = torch.ones_like(batch.sample_log_prob)
    totals = BatchTotals.from_batch(policy, batch)
    task = MicrobatchTask(batch, totals, policy.entropy_coef)
    with _fake_process_group(plan) as groups, use_fake_tensors(imitates_gpu=not plan.devices.on_cpu):
        device = torch.device("cpu")
        # Compiled code runs on no fake tensor; the uncompiled layers keep at least as much memory.
        learner, reference = replace(plan.learner, compiles=False), replace(plan.reference, compiles=False)
        if plan.reference.home == "own devices":
            reference = ReferencePlan("none")
        rank_plan = replace(plan, learner=learner, reference=reference)
        if groups is None:
            models = make_models(plan.config, load_model(plan.config.model, device), rank_plan)
        else:
            models = make_sharded_models(plan.config, rank_plan, groups[0], device, groups[1])
        worker = MeasuredWorker(plan, models)
        # The first step is not measured: the optimizer makes its states, and DTensor derives the sharding of Muon's
        # operations from whole tensors, which no rank holds in a real run.
        worker.make_gradients()
        worker.update()
        yield worker, task


@contextmanager
def _fake_process_group(plan: Plan) -> Iterator[tuple[DeviceMesh, ContextGroup | None] | None]:
    """Yields mesh and context group of a fake process group; None for one rank.

    Both must be made outside the fake mode.
    """
    ranks = plan.devices.ranks
    if ranks == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = learner_mesh("cpu", ranks, plan.learner.shard_size)
        yield mesh, join_context_group(plan.config.train_model.context_parallel)
    finally:
        dist.destroy_process_group()
