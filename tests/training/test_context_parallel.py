"""Two gloo ranks that share each microbatch compute the same as one process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config.schema.errors import ConfigError
from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group
from tests.groups import credit_groups
from tests.tiny_models import tiny_llama
from tests.training.context_rank import ContextRank, score_and_differentiate
from tests.training.test_ranks import (
    TWO,
    assert_equal_training,
    config_of,
    in_one_process,
    plan_of,
    two_ranks,
)
from torchgrpo.batches.batch import Tokens
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.training.context_parallel import ContextGroup, join_context_group
from torchgrpo.training.learner import Learner
from torchgrpo.training.rank_actor import RankActor
from torchgrpo.training.rank_workers import RankWorkers
from torchgrpo.training.ranks import Ranks, RankSettings
from torchgrpo.training.response_scorer import ResponseScorer


@pytest.fixture(scope="module")
def ranks(local_ray: None) -> Iterator[Ranks]:
    ranks = two_ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def context_ranks(local_ray: None) -> Iterator[Ranks]:
    ranks = Ranks([DeviceSlot("rank 0"), DeviceSlot("rank 1")], TWO, ContextRank)
    ranks.start()
    call_all(ranks, "join_group")
    yield ranks
    ranks.close()


def call_all(ranks: Ranks, method: str, *arguments: object) -> list[object]:
    return ranks.wait_for_answers(ranks.begin_same_call(method, *arguments), method)


def sharing_learner(
    ranks: Ranks, model: str, folder: Path, policy: PolicyConfig | None = None, **train: object
) -> Learner:
    """Builds a learner of which every two ranks share a microbatch."""
    config = config_of(model, len(ranks.slots), policy, **train)
    config = replace(config, train_model=replace(config.train_model, context_parallel=2))
    return Learner(config, RankWorkers(config, plan_of(config, folder), ranks), folder)


def rows_of(prompts: list[int], responses: list[int], loss: list[range] | None = None) -> Tokens:
    """Builds rows of random tokens by their lengths.

    Prompts of equal length are equal. loss: response tokens of each row in the loss; None: all.
    """
    generator = torch.Generator().manual_seed(3)
    count, width = len(prompts), max(responses)
    ids = torch.randint(2, 20, (max(prompts) + 1, max(prompts)), generator=generator)
    prompt_mask = torch.arange(max(prompts)) >= max(prompts) - torch.tensor(prompts)[:, None]
    mask = torch.arange(width) < torch.tensor(responses)[:, None]
    loss_mask = mask.clone()
    for row, columns in enumerate(loss or []):
        loss_mask[row] = torch.isin(torch.arange(width), torch.tensor(list(columns), dtype=torch.int64))
    response = torch.randint(2, 20, (count, width), generator=generator)
    return Tokens(ids[prompts] * prompt_mask, prompt_mask, response * mask, mask, loss_mask, batch_size=[count])


ROWS = {
    "even": rows_of([3, 3, 5], [4, 6, 2]),
    "odd": rows_of([3, 3, 5], [4, 6, 3]),
    "one row": rows_of([4], [7]),
    "a response longer than the rest": rows_of([2, 2, 3, 3], [2, 40, 3, 1]),
    "loss in the first slice alone": rows_of([2, 9], [3, 3], [range(3), range(0)]),
    "loss in the last slice alone": rows_of([20], [3]),
    "no loss": rows_of([2, 2], [3, 4], [range(0), range(0)]),
    "one position": rows_of([1], [1], [range(0)]),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_scores_and_gradients_equal_those_of_one_process(name: str, checkpointing: bool, context_ranks: Ranks) -> None:
    """The ranks have equal scores, and together the gradients of one process."""
    expected = score_and_differentiate(ROWS[name], None, checkpointing)
    first, second = call_all(context_ranks, "score", ROWS[name], checkpointing)
    for values, other in zip(first[:2], second[:2], strict=True):
        assert torch.equal(values, other)
    for values, wanted in zip(first[:2], expected[:2], strict=True):
        torch.testing.assert_close(values, wanted, rtol=1e-10, atol=1e-10)
    assert first[2].keys() == expected[2].keys()
    for parameter, gradient in expected[2].items():
        torch.testing.assert_close(first[2][parameter], gradient, rtol=1e-10, atol=1e-10, msg=parameter)


def test_each_rank_computes_its_slice(context_ranks: Ranks) -> None:
    """Slices have equal lengths, and each loss token is in one of them."""
    counts = {name: call_all(context_ranks, "count_targets", ROWS[name]) for name in ROWS}
    assert counts["loss in the first slice alone"] == [(7, 3), (7, 0)]
    assert counts["loss in the last slice alone"] == [(12, 0), (12, 3)]
    assert counts["one position"] == [(1, 0), (1, 0)]
    for name, (first, second) in counts.items():
        assert first[0] == second[0], name
        assert first[1] + second[1] == ROWS[name].loss_mask.sum(), name


@pytest.mark.parametrize(
    "train",
    [
        {"gradient_accumulation_steps": 3},
        {"max_tokens_per_microbatch": 40},
        {"gradient_checkpointing": True, "lora": True},
        {"epochs": 2},
    ],
    ids=lambda train: ",".join(train),
)
def test_training_options(
    train: dict[str, object], ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """The loss has a reference."""
    one = in_one_process(config_of(model, 1, **train), tmp_path)
    assert_equal_training(one, sharing_learner(ranks, model, tmp_path, **train), groups, count=3)


@pytest.mark.parametrize("preset", ["dapo", "gspo", "kl_cov", "opsd"])
def test_presets(preset: str, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path) -> None:
    """Covers weights over the whole batch, and a teacher."""
    one = in_one_process(config_of(model, 1, load_policy(preset)), tmp_path)
    assert_equal_training(one, sharing_learner(ranks, model, tmp_path, load_policy(preset)), groups, count=3)


def test_token_scores_are_reported_once_per_group(
    ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    one, two = in_one_process(config_of(model, 1), tmp_path), sharing_learner(ranks, model, tmp_path)
    assert two.workers.count == 1
    reports = [learner.step(credit_groups(learner, groups, trained_at=1)) for learner in (one, two)]
    torch.testing.assert_close(reports[0].log_ratio, reports[1].log_ratio, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reports[0].entropy, reports[1].entropy, rtol=1e-5, atol=1e-5)
    padding = [report.metrics["throughput/padding"] for report in reports]
    assert padding[0] < padding[1] <= padding[0] * 1.05  # each microbatch is padded by one or two positions


def test_microbatches_without_a_gradient(ranks: Ranks, model: str, groups: list[Group], tmp_path: Path) -> None:
    policy = PolicyConfig(kl_coef=0.0)
    one, two = in_one_process(config_of(model, 1, policy), tmp_path), sharing_learner(ranks, model, tmp_path, policy)
    _, ((trained, scored),) = two._partition_step(credit_groups(two, groups, trained_at=1))
    assert trained.has_gradient and not scored.has_gradient
    assert_equal_training(one, two, groups, count=3)


@pytest.mark.long
def test_two_groups_of_two_ranks(local_ray: None, model: str, groups: list[Group], tmp_path: Path) -> None:
    slots = [DeviceSlot(f"learner rank {number}") for number in range(4)]
    ranks = Ranks(slots, RankSettings(nodes=1, ray_cpus=4, on_gpu=False, timeout_s=600.0), RankActor)
    ranks.start()
    try:
        one = in_one_process(config_of(model, 1, gradient_accumulation_steps=2), tmp_path)
        four = sharing_learner(ranks, model, tmp_path, gradient_accumulation_steps=2)
        assert four.workers.count == 2
        assert_equal_training(one, four, groups, count=3)
    finally:
        ranks.close()


def test_models_that_a_group_cannot_compute() -> None:
    assert join_context_group(1) is None
    three = ContextGroup(3, 0, dist.ProcessGroup(0, 1))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"2 key-value heads.*context_parallel to a divisor of 2"):
        ResponseScorer(tiny_llama(), context=three)
    with pytest.raises(ConfigError, match=r"rows are not packed.*context_parallel=1"):
        ResponseScorer(tiny_llama(), packs=False, context=three)
