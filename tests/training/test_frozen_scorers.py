"""Tests of frozen scorers: equality with one process, and order of work."""

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
from config.schema.errors import ConfigError, RunError
from config.schema.models import RefModelConfig
from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group
from tests.groups import credit_groups, sample_groups
from tests.processes import wait_for_exit
from tests.script_runner import compose_run_config
from tests.tiny_models import numbered_examples
from tests.training.test_ranks import (
    assert_equal_training,
    config_of,
    in_one_process,
    length_verdict,
    plan_of,
    small_llama,
    two_ranks,
    weights,
)
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.cluster.actor_calls import CallReference as Call
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.training.frozen_scorers import FrozenScorers, scorer_slots
from torchgrpo.training.kl import ESTIMATORS
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_models import load_base_model, make_models
from torchgrpo.training.published_weights import push_tensor_source
from torchgrpo.training.rank_workers import RankWorkers
from torchgrpo.training.ranks import Ranks
from torchgrpo.training.worker import MicrobatchTask, Worker
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
def ranks(local_ray: None) -> Iterator[Ranks]:
    there = two_ranks()
    yield there
    there.close()


def make_scorers(config: Config, folder: Path, way: str = "copies") -> FrozenScorers:
    scorers = FrozenScorers(config, scored_plan(config, folder, way))
    scorers.wait_until_loaded()
    return scorers


@pytest.fixture(scope="module", params=list(SHARD_SIZES))
def scorers(
    request: pytest.FixtureRequest, local_ray: None, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrozenScorers]:
    there = make_scorers(scored_config(model, 1), tmp_path_factory.mktemp("run"), request.param)
    yield there
    there.close()


def local_learner(config: Config, folder: Path, scorers: FrozenScorers) -> Learner:
    plan = scored_plan(config, folder)
    models = make_models(config, load_base_model(config, plan), plan)
    workers = LocalWorkers(Worker(config, models, push_tensor_source(config, plan)))
    return Learner(config, workers, folder, scorers=scorers)


def score_batch(scorers: FrozenScorers, batch: Batch, times: int = 1) -> list[Tensor]:
    return [scorers.wait_for_log_probs(one) for one in [scorers.submit(batch) for _ in range(times)]]


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_two_learner_ranks_and_two_scorer_ranks_are_one_process(
    placement: str,
    estimator: str,
    ranks: Ranks,
    scorers: FrozenScorers,
    model: str,
    groups: list[Group],
    tmp_path: Path,
) -> None:
    policy = PolicyConfig(kl_coef=0.1, kl_placement=placement, kl_estimator=estimator)
    one = in_one_process(config_of(model, 1, policy, gradient_accumulation_steps=2), tmp_path)
    config = scored_config(model, 2, policy)
    two = Learner(config, RankWorkers(config, scored_plan(config, tmp_path), ranks), tmp_path, scorers=scorers)
    assert_equal_training(one, two, groups)


@pytest.mark.parametrize("train", [{"epochs": 2}, {"max_tokens_per_microbatch": 40}])
def test_one_learner_and_scorers_are_one_process(
    train: dict[str, Any], scorers: FrozenScorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    one = in_one_process(config_of(model, 1, gradient_accumulation_steps=2, **dict(train)), tmp_path)
    other = local_learner(scored_config(model, 1, **dict(train)), tmp_path, scorers)
    assert_equal_training(one, other, groups)


@pytest.mark.parametrize("select_tokens", ["none", "clip_covariance"])
def test_a_teacher_scores_first_for_batch_wide_weights(
    select_tokens: str, ranks: Ranks, scorers: FrozenScorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    policy = load_policy("opd", select_tokens=select_tokens, covariance_range=[-5.0, 5.0], reward_coef=1.0)
    one = in_one_process(config_of(model, 1, policy, gradient_accumulation_steps=2), tmp_path)
    config = scored_config(model, 2, policy)
    two = Learner(config, RankWorkers(config, scored_plan(config, tmp_path), ranks), tmp_path, scorers=scorers)
    assert_equal_training(one, two, groups)


def test_groups_submitted_earlier_are_not_scored_again(
    scorers: FrozenScorers, model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overlapped schedule submits groups as they enter the batch and drops stale ones."""
    learner = local_learner(scored_config(model, 1), tmp_path, scorers)
    expected = credit_groups(in_one_process(config_of(model, 1), tmp_path), groups[1:]).ref_log_prob
    for group in groups:
        learner.begin_scoring(group)
    learner.drop_scores(groups[:1])
    monkeypatch.setattr(scorers, "submit", None)
    batch = credit_groups(learner, groups[1:], 1)
    assert batch.ref_log_prob is not None and expected is not None
    torch.testing.assert_close(batch.ref_log_prob, expected, rtol=1e-6, atol=1e-6)
    assert not learner._pending_scores
    learner.step(batch)


def test_a_teacher_equal_to_the_policy_gives_no_gradient(
    scorers: FrozenScorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """Rounding differences to another process, which Adam would amplify, give no gradient."""
    learner = local_learner(scored_config(model, 1, load_policy("opd")), tmp_path, scorers)
    before = weights(learner)
    reports = [learner.step(credit_groups(learner, groups)) for _ in range(2)]
    assert all(report.metrics["grad_norm"] == 0 for report in reports)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


def test_the_base_of_a_lora_policy_and_its_copy_score_alike(
    scorers: FrozenScorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    one = in_one_process(config_of(model, 1, gradient_accumulation_steps=2, lora=True), tmp_path)
    torch.manual_seed(0)
    other = local_learner(scored_config(model, 1, lora=True), tmp_path, scorers)
    batch, own = credit_groups(other, groups), credit_groups(one, groups)
    assert batch.ref_log_prob is None and own.ref_log_prob is not None
    (log_prob,) = score_batch(scorers, batch)
    torch.testing.assert_close(log_prob, own.ref_log_prob, rtol=1e-6, atol=1e-6)
    assert other.step(batch).metrics["kl/ref"] == pytest.approx(one.step(own).metrics["kl/ref"], abs=1e-9)


def test_a_step_that_is_not_finite_is_saved_with_its_scores(
    scorers: FrozenScorers, model: str, groups: list[Group], tmp_path: Path
) -> None:
    learner = local_learner(scored_config(model, 1), tmp_path, scorers)
    batch = credit_groups(learner, groups)
    batch.sample_log_prob[-1, 0] = torch.nan
    assert learner.step(batch).is_skipped
    saved = torch.load(tmp_path / "nonfinite" / "optimizer_step_1.pt", weights_only=True)
    assert saved["ref_log_prob"][batch.tokens.loss_mask].lt(0).all()
    assert batch.ref_log_prob is None


class RecordingScorers:
    """Scorers that return zeros and record the order of submits, waits and training."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def submit(self, batch: Batch) -> "Future[Tensor]":
        self.order.append("submit")
        future: Future[Tensor] = Future()
        future.set_result(torch.zeros_like(batch.sample_log_prob))
        return future

    def wait_for_log_probs(self, future: "Future[Tensor]") -> Tensor:
        self.order.append("wait")
        return future.result()


def test_microbatches_are_submitted_before_the_first_is_trained_on(
    model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = RecordingScorers()
    learner = local_learner(scored_config(model, 1), tmp_path, recording)  # type: ignore[arg-type]
    learn = learner.worker._accumulate_gradients

    def train_recorded(task: MicrobatchTask) -> Any:
        recording.order.append("learn")
        return learn(task)

    monkeypatch.setattr(learner.worker, "_accumulate_gradients", train_recorded)
    learner.step(credit_groups(learner, groups))
    assert recording.order == ["submit", "submit", "wait", "learn", "wait", "learn"]


def test_close_does_not_wait_for_a_loading_copy(
    local_ray: None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C the loading ranks are killed and no process remains."""
    loading = threading.Event()
    begin = Ranks.begin_call
    process_ids_started: list[int] = []

    def begin_recorded(ranks: Ranks, method: str, arguments: Sequence[Sequence[Any]]) -> list[Call]:
        calls = begin(ranks, method, arguments)
        if method == "build":
            process_ids_started.extend(ranks.process_ids)
            loading.set()
        return calls

    monkeypatch.setattr(Ranks, "begin_call", begin_recorded)
    config = scored_config(model, 1)
    scorers = FrozenScorers(config, scored_plan(config, tmp_path, "shards"))
    batch = collate(sample_groups(small_llama(), numbered_examples(1), 2, 4, judge=length_verdict))
    future = scorers.submit(batch)
    assert loading.wait(600)
    scorers.close()
    for pid in process_ids_started:
        wait_for_exit(pid)
    with pytest.raises(RunError):
        future.result(timeout=0)
    with pytest.raises(RunError):
        scorers.submit(Batch.__new__(Batch)).result(timeout=0)


@pytest.mark.parametrize("way", list(SHARD_SIZES))
def test_half_precision(way: str, local_ray: None, model: str, groups: list[Group], tmp_path: Path) -> None:
    """Half-precision copies and shards round like a reference in the learner's process."""
    config = config_of(model, 1, mixed_precision="bf16")
    batch = credit_groups(in_one_process(config, tmp_path), groups)
    scorers = make_scorers(replace(config, ref_model=RefModelConfig(num_devices=2)), tmp_path, way)
    (log_prob,) = score_batch(scorers, batch)
    scorers.close()
    mask = batch.tokens.loss_mask
    assert batch.ref_log_prob is not None
    torch.testing.assert_close(log_prob[mask], batch.ref_log_prob[mask], rtol=0.02, atol=0.02)
    if way == "copies":
        assert torch.equal(log_prob, batch.ref_log_prob)


def gpu_slots(*overrides: str) -> list[list[str]]:
    """Returns the physical GPUs of each copy's ranks on a machine with six GPUs."""
    config = compose_run_config("device=cuda", *overrides, name="grpo_gsm8k")
    plan = make_plan(config, False, Machine(6, 80.0, 200.0, 500.0, "0.32.0", tuple("234567")), Path())
    return [[",".join(place.devices) for place in copy] for copy in scorer_slots(plan)]


def test_scorers_are_on_the_gpus_of_the_plan() -> None:
    two = ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
    assert gpu_slots(*two) == [["6"], ["7"]]
    by_hand = ("train_model.devices=[0,1]", "ref_model.devices=[2,3]", "inference_model.devices=[4,5]")
    assert gpu_slots(*by_hand) == [["4"], ["5"]]
    assert gpu_slots(*by_hand, "ref_model.shard_size=2") == [["4", "5"]]


def test_a_missing_model_gives_a_single_message(local_ray: None, model: str, tmp_path: Path) -> None:
    config = scored_config(model, 1)
    plan = scored_plan(config, tmp_path)
    missing = replace(config, ref_model=RefModelConfig(name=str(tmp_path / "nothing"), num_devices=2))
    scorers = FrozenScorers(missing, plan)
    with pytest.raises(ConfigError, match="nothing"):
        scorers.wait_until_loaded()
    scorers.close()
