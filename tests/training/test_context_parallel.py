"""Two gloo ranks that share each microbatch compute the same as one process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.schema.policy import AGGREGATIONS, PolicyConfig, load_policy
from envs.group import Group
from tests.groups import credit_groups
from tests.training.test_ranks import (
    assert_equal_training,
    config_of,
    in_one_process,
    plan_of,
    step_metrics,
    two_ranks,
)
from torchgrpo.training.learner import Learner
from torchgrpo.training.rank_workers import RankWorkers
from torchgrpo.training.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(local_ray: None) -> Iterator[Ranks]:
    ranks = two_ranks()
    yield ranks
    ranks.close()


def sharing_learner(
    ranks: Ranks, model: str, folder: Path, policy: PolicyConfig | None = None, **train: object
) -> Learner:
    """Builds a learner whose two ranks share each microbatch."""
    config = config_of(model, 2, policy, **train)
    config = replace(config, train_model=replace(config.train_model, context_parallel=2))
    return Learner(config, RankWorkers(config, plan_of(config, folder), ranks), folder)


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"max_tokens_per_microbatch": 40},
        {"gradient_checkpointing": True},
        {"epochs": 2},
        {"lora": True},
    ],
    ids=lambda train: ",".join(train),
)
def test_training_options(
    train: dict[str, object], ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    one = in_one_process(config_of(model, 1, **train), tmp_path)
    assert_equal_training(one, sharing_learner(ranks, model, tmp_path, **train), groups)
