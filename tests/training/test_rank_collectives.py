"""Collectives of two gloo ranks: their bytes, and equal results with every setting of FSDP2."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config.schema.models import LoraConfig
from envs.group import Group
from tests.training.test_ranks import config_of, ranked_learner, step_metrics, two_ranks, weights
from torchgrpo.run.dry_run.tensor_tracker import TrafficTracker
from torchgrpo.training.published_weights import PolicyTensor, make_tensors
from torchgrpo.training.ranks import Ranks

RANK = LoraConfig().r


@pytest.fixture(scope="module")
def ranks(local_ray: None) -> Iterator[Ranks]:
    ranks = two_ranks()
    yield ranks
    ranks.close()


@dataclass(frozen=True)
class RecordedPush:
    """Sender that saves the tensors of a push and the bytes of its collectives.

    dtype: dtype of the pushed tensors.
    """

    folder: Path
    dtype: torch.dtype

    def __call__(self, tensors: Sequence[PolicyTensor], is_first_rank: bool, version: int, engines: Any) -> None:
        cast = [replace(tensor, dtype=self.dtype) for tensor in tensors]
        made = make_tensors(cast)
        with TrafficTracker() as traffic:  # under which no tensor may be read, for it does not wait for collectives
            for tensor in cast:
                tensor.make()
        torch.save((made, dict(traffic.sent_bytes)), self.folder / f"{is_first_rank}.pt")

    def read(self, is_first_rank: bool) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        tensors, sent_bytes = torch.load(self.folder / f"{is_first_rank}.pt")
        return tensors, sent_bytes


@pytest.mark.parametrize("lora", [False, True])
def test_a_push_gathers_the_bytes_of_the_pushed_dtype(
    lora: bool, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """Float32 weights go to engines in bfloat16: shards are merged and rounded, then gathered."""
    learner = ranked_learner(ranks, config_of(model, 2, lora=lora), tmp_path)
    step_metrics(learner, groups, 1)
    expected = weights(learner)
    push = RecordedPush(tmp_path, torch.bfloat16)
    ranks.send(push, 1, None)
    for is_first_rank in (True, False):
        pushed, sent_bytes = push.read(is_first_rank)
        assert pushed.keys() == expected.keys()
        assert all(torch.equal(pushed[name], tensor.bfloat16()) for name, tensor in expected.items())
        # The first factor of an adapter, float32 [r, in], is gathered for the product of a shard.
        factors = [4 * RANK * one.shape[1] for name, one in pushed.items() if lora and "proj" in name]
        assert sent_bytes == {"all-gather": sum(one.nbytes for one in pushed.values()) + sum(factors)}


@pytest.mark.parametrize(
    "schedule",
    [{"prefetch_layers": 2}, {"reshard_after_forward": False}, {"prefetch_layers": 2, "reshard_after_forward": False}],
    ids=str,
)
@pytest.mark.parametrize("train", [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_the_schedule_of_gathers_changes_no_bit(
    schedule: dict[str, Any], train: dict[str, Any], ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    config = config_of(model, 2, **train)
    default = ranked_learner(ranks, config, tmp_path)
    expected = step_metrics(default, groups, 2), weights(default)
    other = replace(config, train_model=replace(config.train_model, **schedule))
    learner = ranked_learner(ranks, other, tmp_path)
    assert step_metrics(learner, groups, 2) == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in weights(learner).items())
