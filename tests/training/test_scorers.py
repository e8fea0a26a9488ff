"""Scorers: the numbers of one process, the order of work, and lost copies."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from config.schema.config import Config
from config.schema.errors import ConfigError, RankLost, RunError
from config.schema.models import RefModelConfig
from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group
from tests.groups import credited, drawn_groups
from tests.killed_ranks import Killer
from tests.logged import Logged
from tests.processes import wait_until_gone
from tests.scripts import configured
from tests.tiny import numbered_examples
from tests.training.test_ranks import (
    GROUPS,
    MAX_TOKENS,
    REPEATS,
    assert_equal_training,
    config_of,
    in_one_process,
    judged,
    plan_of,
    small_llama,
    two_ranks,
    weights,
)
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.cluster.calls import Reference as Call
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.training.kl import ESTIMATORS
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_models import load_base, make_models
from torchgrpo.training.published_weights import pushed_tensors
from torchgrpo.training.ranked_workers import RankedWorkers
from torchgrpo.training.ranks import Ranks
from torchgrpo.training.scorers import Copy, Scorers, places
from torchgrpo.training.worker import Piece, Worker
from torchgrpo.training.workers import LocalWorkers

pytestmark = pytest.mark.long

SHARD_SIZES = {"copies": 1, "shards": 2}


def scored_config(model: str, ranks: int, policy: PolicyConfig | None = None, **train: Any) -> Config:
    config = config_of(model, ranks, policy, gradient_accumulation_steps=2, **train)
    return replace(config, ref_model=RefModelConfig(num_devices=2))


def scored_plan(config: Config, folder: Path, way: str = "copies") -> Plan:
    plan = plan_of(config, folder)
    return replace(plan, reference=replace(plan.reference, shard_size=SHARD_SIZES[way], num_threads=1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small_llama().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return drawn_groups(small_llama(), numbered_examples(50)[:GROUPS], REPEATS, MAX_TOKENS, judge=judged)


@pytest.fixture(scope="module")
def ranks(local_ray: None) -> Iterator[Ranks]:
    there = two_ranks()
    yield there
    there.close()


def make_scorers(config: Config, folder: Path, way: str = "copies") -> Scorers:
    scorers = Scorers(config, scored_plan(config, folder, way))
    scorers.wait_ready()
    return scorers


@pytest.fixture(scope="module", params=list(SHARD_SIZES))
def scorers(
    request: pytest.FixtureRequest, local_ray: None, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scorers]:
    there = make_scorers(scored_config(model, 1), tmp_path_factory.mktemp("run"), request.param)
    yield there
    there.close()


@pytest.fixture
def two_copies(local_ray: None, model: str, tmp_path: Path) -> Iterator[Scorers]:
    there = make_scorers(scored_config(model, 1), tmp_path)
    yield there
    there.close()


def local_learner(config: Config, folder: Path, scorers: Scorers) -> Learner:
    plan = scored_plan(config, folder)
    models = make_models(config, load_base(config, plan), plan)
    workers = LocalWorkers(Worker(config, models, pushed_tensors(config, plan)))
    return Learner(config, workers, folder, scorers=scorers)


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_two_learner_ranks_and_two_scorer_ranks_are_one_process(
    placement: str,
    estimator: str,
    ranks: Ranks,
    scorers: Scorers,
    model: str,
    groups: list[Group],
    tmp_path: Path,
) -> None:
    policy = PolicyConfig(kl_coef=0.1, kl_placement=placement, kl_estimator=estimator)
    one = in_one_process(config_of(model, 1, policy, gradient_accumulation_steps=2), tmp_path)
    config = scored_config(model, 2, policy)
    two = Learner(
        config, RankedWorkers(config, scored_plan(config, tmp_path), ranks), tmp_path, scorers=scorers
    )
    assert_equal_training(one, two, groups)


@pytest.mark.parametrize("train", [{"epochs": 2}, {"max_tokens_per_microbatch": 40}])
def test_one_learner_and_scorers_are_one_process(
    train: dict[str, Any], scorers: Scorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    one = in_one_process(config_of(model, 1, gradient_accumulation_steps=2, **dict(train)), tmp_path)
    other = local_learner(scored_config(model, 1, **dict(train)), tmp_path, scorers)
    assert_equal_training(one, other, groups)


@pytest.mark.parametrize("select_tokens", ["none", "clip_covariance"])
def test_a_teacher_scores_first_where_a_batch_is_weighed_as_a_whole(
    select_tokens: str, ranks: Ranks, scorers: Scorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    policy = load_policy("opd", select_tokens=select_tokens, covariance_range=[-5.0, 5.0], reward_coef=1.0)
    one = in_one_process(config_of(model, 1, policy, gradient_accumulation_steps=2), tmp_path)
    config = scored_config(model, 2, policy)
    two = Learner(
        config, RankedWorkers(config, scored_plan(config, tmp_path), ranks), tmp_path, scorers=scorers
    )
    assert_equal_training(one, two, groups)


def test_groups_that_were_begun_are_not_scored_again(
    scorers: Scorers, model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overlapped schedule begins a group as it enters the batch, and forgets stale ones."""
    learner = local_learner(scored_config(model, 1), tmp_path, scorers)
    expected = credited(in_one_process(config_of(model, 1), tmp_path), groups[1:]).ref_log_prob
    for group in groups:
        learner.begin_scoring(group)
    learner.drop_scores(groups[:1])
    monkeypatch.setattr(scorers, "begin", None)
    batch = credited(learner, groups[1:], 1)
    assert batch.ref_log_prob is not None and expected is not None
    torch.testing.assert_close(batch.ref_log_prob, expected, rtol=1e-6, atol=1e-6)
    assert not learner._begun
    learner.step(batch)


def test_a_teacher_that_is_the_policy_moves_nothing(
    scorers: Scorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """Not by the rounding of another process either, of which Adam would make whole steps."""
    learner = local_learner(scored_config(model, 1, load_policy("opd")), tmp_path, scorers)
    before = weights(learner)
    reports = [learner.step(credited(learner, groups)) for _ in range(2)]
    assert all(report.metrics["grad_norm"] == 0 for report in reports)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


def test_the_base_of_a_lora_policy_and_its_copy_score_alike(
    scorers: Scorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    one = in_one_process(config_of(model, 1, gradient_accumulation_steps=2, lora=True), tmp_path)
    torch.manual_seed(0)
    other = local_learner(scored_config(model, 1, lora=True), tmp_path, scorers)
    batch, own = credited(other, groups), credited(one, groups)
    assert batch.ref_log_prob is None and own.ref_log_prob is not None
    (log_prob,) = scored(scorers, batch)
    torch.testing.assert_close(log_prob, own.ref_log_prob, rtol=1e-6, atol=1e-6)
    assert other.step(batch).metrics["kl/ref"] == pytest.approx(one.step(own).metrics["kl/ref"], abs=1e-9)


def test_a_step_that_is_not_finite_is_saved_with_its_scores(
    scorers: Scorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    learner = local_learner(scored_config(model, 1), tmp_path, scorers)
    batch = credited(learner, groups)
    batch.sample_log_prob[-1, 0] = torch.nan
    assert learner.step(batch).skipped
    saved = torch.load(tmp_path / "nonfinite" / "optimizer_step_1.pt", weights_only=True)
    assert saved["ref_log_prob"][batch.tokens.loss_mask].lt(0).all()
    assert batch.ref_log_prob is None


class Watched:
    """Scorers of zeros, and the order in which they and the worker were at work."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def begin(self, batch: Batch) -> "Future[Tensor]":
        self.order.append("begin")
        scored: Future[Tensor] = Future()
        scored.set_result(torch.zeros_like(batch.sample_log_prob))
        return scored

    def wait(self, scored: "Future[Tensor]") -> Tensor:
        self.order.append("wait")
        return scored.result()


def test_every_microbatch_is_begun_before_the_first_is_learned(
    model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    learner = local_learner(scored_config(model, 1), tmp_path, watched)  # type: ignore[arg-type]
    learn = learner.worker._learn

    def learned(piece: Piece) -> Any:
        watched.order.append("learn")
        return learn(piece)

    monkeypatch.setattr(learner.worker, "_learn", learned)
    learner.step(credited(learner, groups))
    assert watched.order == ["begin", "begin", "wait", "learn", "wait", "learn"]


def process_ids(scorers: Scorers) -> list[int]:
    return [pid for copy in scorers.copies if copy.ranks is not None for pid in copy.ranks.process_ids]


def test_scores_that_nobody_wants_are_not_made(
    two_copies: Scorers, model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = local_learner(scored_config(model, 1), tmp_path, two_copies)
    asked: list[int] = []
    free = threading.Event()
    log_prob = Copy.log_prob

    def waiting(copy: Copy, batch: Batch) -> Tensor:
        asked.extend(dict.fromkeys(batch.group_id[:, 0].tolist()))
        assert free.wait(600)
        return log_prob(copy, batch)

    monkeypatch.setattr(Copy, "log_prob", waiting)
    for group in groups:
        learner.begin_scoring(group)
    learner.drop_scores(groups[2:])
    free.set()
    scored(two_copies, collate(groups[:1]))
    assert set(asked) <= {groups[0].group_id, groups[1].group_id}


def test_an_end_does_not_wait_for_a_copy_that_loads(
    local_ray: None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C the ranks that load are killed, and no process is left."""
    loading = threading.Event()
    begin = Ranks.begin
    seen: list[int] = []

    def noted(ranks: Ranks, called: str, arguments: Sequence[Sequence[Any]]) -> list[Call]:
        begun = begin(ranks, called, arguments)
        if called == "build":
            seen.extend(ranks.process_ids)
            loading.set()
        return begun

    monkeypatch.setattr(Ranks, "begin", noted)
    config = scored_config(model, 1)
    scorers = Scorers(config, scored_plan(config, tmp_path, "shards"))
    waits = scorers.begin(collate(drawn_groups(small_llama(), numbered_examples(1), 2, 4, judge=judged)))
    assert loading.wait(600)
    scorers.close()
    for pid in seen:
        wait_until_gone(pid)
    with pytest.raises(RunError):
        waits.result(timeout=0)
    with pytest.raises(RunError):
        scorers.begin(Batch.__new__(Batch)).result(timeout=0)


def kill(scorers: Scorers, number: int = 0) -> None:
    os.kill(process_ids(scorers)[number], signal.SIGKILL)


def scored(scorers: Scorers, batch: Batch, times: int = 1) -> list[Tensor]:
    return [scorers.wait(one) for one in [scorers.begin(batch) for _ in range(times)]]


def test_lost_scorers_are_replaced(
    two_copies: Scorers,
    model: str,
    groups: list[Group],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
) -> None:
    """Two die idle at once, one in a score, and one while it loads."""
    batch = credited(local_learner(scored_config(model, 1), tmp_path, two_copies), groups)
    (expected,) = scored(two_copies, batch)
    before = process_ids(two_copies)
    back = threading.Semaphore(0)
    load_copy = Copy.load

    def loaded(copy: Copy) -> None:
        load_copy(copy)
        back.release()

    monkeypatch.setattr(Copy, "load", loaded)
    kill(two_copies, 0)
    kill(two_copies, 1)
    assert all(torch.equal(one, expected) for one in scored(two_copies, batch, 4))
    assert not set(before) & set(process_ids(two_copies))
    killer = Killer(monkeypatch, "scorer", ("log_prob", 1), ("build", 1))
    assert all(torch.equal(one, expected) for one in scored(two_copies, batch, 6))
    assert all(back.acquire(timeout=600) for _ in range(3))
    assert not killer.left
    assert all(torch.equal(one, expected) for one in scored(two_copies, batch, 2))
    assert "is lost and replaced: scorer rank" in logged.text
    assert "is lost while it loads, and replaced" in logged.text


def test_a_microbatch_that_every_copy_dies_of_ends_the_run(
    two_copies: Scorers, model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = credited(local_learner(scored_config(model, 1), tmp_path, two_copies), groups)
    Killer(monkeypatch, "scorer", *[("log_prob", 1)] * 9)
    with pytest.raises(RankLost, match=r"scorer rank [01] \(CPU\) died in log-probs"):
        scored(two_copies, batch)
    with pytest.raises(RankLost):
        scored(two_copies, batch)


@pytest.mark.parametrize("way", list(SHARD_SIZES))
def test_half_precision(way: str, local_ray: None, model: str, groups: list[Group], tmp_path: Path) -> None:
    """Copies round as a reference in the learner's process does, shards where they are gathered."""
    config = config_of(model, 1, mixed_precision="bf16")
    batch = credited(in_one_process(config, tmp_path), groups)
    scorers = make_scorers(replace(config, ref_model=RefModelConfig(num_devices=2)), tmp_path, way)
    (log_prob,) = scored(scorers, batch)
    scorers.close()
    mask = batch.tokens.loss_mask
    assert batch.ref_log_prob is not None
    torch.testing.assert_close(log_prob[mask], batch.ref_log_prob[mask], rtol=0.02, atol=0.02)
    if way == "copies":
        assert torch.equal(log_prob, batch.ref_log_prob)


def gpu_places(*overrides: str) -> list[list[str]]:
    """Physical GPUs of every copy's ranks, on a machine of six."""
    config = configured("device=cuda", *overrides, name="grpo_gsm8k")
    plan = make_plan(config, False, Machine(6, 80.0, 200.0, 500.0, "0.32.0", tuple("234567")), Path())
    return [[",".join(place.devices) for place in copy] for copy in places(plan)]


def test_scorers_are_on_the_gpus_of_the_plan() -> None:
    two = ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
    assert gpu_places(*two) == [["6"], ["7"]]
    by_hand = ("train_model.devices=[0,1]", "ref_model.devices=[2,3]", "inference_model.devices=[4,5]")
    assert gpu_places(*by_hand) == [["4"], ["5"]]
    assert gpu_places(*by_hand, "ref_model.shard_size=2") == [["4", "5"]]


def test_a_model_that_is_not_there_is_one_message(local_ray: None, model: str, tmp_path: Path) -> None:
    config = scored_config(model, 1)
    plan = scored_plan(config, tmp_path)
    missing = replace(config, ref_model=RefModelConfig(name=str(tmp_path / "nothing"), num_devices=2))
    scorers = Scorers(missing, plan)
    with pytest.raises(ConfigError, match="nothing"):
        scorers.wait_ready()
    scorers.close()
