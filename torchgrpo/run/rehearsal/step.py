"""One optimizer step of one learner rank: `Worker` itself, on tensors without memory.

    score ──▶ forward ──▶ backward ──▶ clip ──▶ optimizer step      the fullest moment of each, in bytes by kind
              once more: FLOPs, bytes moved, bytes of each collective

The process group is PyTorch's `fake` one: a world of any size in this process, whose collectives do nothing. Numbers
are not computed, so a step is always finite. Left out: a reference on devices of its own; the scaling of float16
gradients, which wants CUDA; the copy of a layer's shards on their way from host memory (`train_model.offload=all`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from torchgrpo.batches.batch import environment_tokens
from torchgrpo.plan.plan import Plan, ReferencePlan
from torchgrpo.run.rehearsal.fakes import longest_rows, without_memory
from torchgrpo.run.rehearsal.flops import attention_flops, pairs_seen
from torchgrpo.run.rehearsal.tracking import Held, Memory, Traffic
from torchgrpo.run.rehearsal.watched import WatchedWorker, kinds_told
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.learner_models import make_models, make_sharded_models
from torchgrpo.training.model_loading import load_model
from torchgrpo.training.packed_sequence import pack
from torchgrpo.training.sharding import learner_mesh
from torchgrpo.training.worker import Piece

Peaks = dict[str, Held]
"""By phase, the bytes of each kind at its fullest moment."""


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in an optimizer step.

    flops, moved: of one microbatch, forward and backward; bytes that its operations read and write, each for itself.
    sent, calls: by collective, of one microbatch; bytes as `Traffic` counts them.
    moved_by_step: bytes that clipping and the optimizer read and write.
    """

    peaks: Peaks
    flops: int
    moved: int
    sent: Counter[str]
    calls: Counter[str]
    moved_by_step: int


def fullest(peaks: Peaks) -> str:
    """The phase with the peak."""
    return max(peaks, key=lambda phase: peaks[phase].total())


def peak(peaks: Peaks) -> int:
    """Bytes of the fullest moment of all."""
    return peaks[fullest(peaks)].total()


def rehearse(plan: Plan) -> Rehearsal:
    """plan: of a model whose config.json is known."""
    traffic: dict[str, Traffic] = {}
    flops: Counter[str] = Counter()
    with _rehearsed(plan) as (worker, piece):
        attention = attention_flops(pairs_seen(pack(piece.batch.tokens).segments))

        @contextmanager
        def counted(phase: str) -> Iterator[None]:
            traffic[phase] = Traffic()
            counter = FlopCounterMode(display=False, custom_mapping=attention)
            with traffic[phase], counter:
                yield
            flops[phase] = counter.get_total_flops()

        with patch.object(worker, "watch", counted):
            worker.gradients([piece])
            worker.update()
        peaks = _peaks(plan, worker, piece)
    forward, backward = traffic["forward"], traffic["backward"]
    return Rehearsal(
        peaks=peaks,
        flops=flops["forward"] + flops["backward"],
        moved=forward.moved + backward.moved,
        sent=forward.sent + backward.sent,
        calls=forward.calls + backward.calls,
        moved_by_step=traffic["clip"].moved + traffic["optimizer step"].moved,
    )


def rehearse_memory(plan: Plan) -> Peaks:
    """The peaks of `rehearse` alone, in less time."""
    with _rehearsed(plan) as (worker, piece):
        return _peaks(plan, worker, piece)


def _peaks(plan: Plan, worker: WatchedWorker, piece: Piece) -> Peaks:
    memory = Memory()
    with kinds_told(worker, memory, plan.learner.microbatches):
        with worker.watch("score"):
            if worker.reference is None:  # the policy's own pass before its first update
                worker.log_prob([piece.batch])
            else:
                worker.reference_log_prob([piece.batch])
        worker.gradients([piece])
        worker.update()
    return memory.peaks


@contextmanager
def _rehearsed(plan: Plan) -> Iterator[tuple[WatchedWorker, Piece]]:
    """The worker of a rank, between two steps, and a microbatch."""
    batch = longest_rows(plan)
    assert batch.mask is not None, "`longest_rows` fills it in"
    policy = plan.config.policy
    if policy.weighs_whole_batches:  # as a step of several microbatches has it
        batch.weight = batch.penalty = torch.ones_like(batch.sample_log_prob)
    totals = BatchTotals.of(policy, batch.mask, environment_tokens(batch.tokens, batch.mask))
    piece = Piece(batch, totals, policy.entropy_coef)
    with _world(plan) as mesh, without_memory(as_on_a_gpu=not plan.devices.on_cpu):
        device, own = torch.device("cpu"), plan
        if plan.reference.home == "own devices":
            own = replace(plan, reference=ReferencePlan("none"))
        if mesh is None:
            models = make_models(plan.config, load_model(plan.config.model, device), own)
        else:
            models = make_sharded_models(plan.config, own, mesh, device)
        worker = WatchedWorker(plan, models)
        # A first step, unwatched: the optimizer makes its states, and DTensor works out on whole tensors, which nobody
        # holds, how Muon's operations are sharded.
        worker.make_gradients()
        worker.update()
        yield worker, piece


@contextmanager
def _world(plan: Plan) -> Iterator[DeviceMesh | None]:
    """The mesh of all ranks, made outside the fake mode; None for one."""
    ranks = plan.devices.ranks
    if ranks == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield learner_mesh("cpu", ranks, plan.learner.shard_size)
    finally:
        dist.destroy_process_group()
