"""Odd groups through the real engine, credit and step, under every preset: all defined, nowhere NaN."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.inference import InferenceModelConfig
from config.schema.models import ModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig, load_policy
from config.schema.train import TrainConfig
from envs.group import Group, Verdict
from tests.groups import credited, drawn_groups
from tests.tiny import EOS, numbered_examples, tiny_llama
from tests.training.presets import EVERY_PRESET
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.credit import credit
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_models import Models
from torchgrpo.training.published_weights import named_weights
from torchgrpo.training.reference import Reference
from torchgrpo.training.worker import Worker
from torchgrpo.training.workers import LocalWorkers

PROMPTS, REPEATS, MAX_TOKENS = 3, 4, 6
FIRST_ROW = 2


def ends_at_once() -> LlamaForCausalLM:
    """The end-of-sequence token outweighs every other one, whatever came before."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        model.lm_head.bias[EOS] = 50.0
    return model


def sampled(
    verdicts: Sequence[Verdict],
    model: LlamaForCausalLM,
    repeats: int = REPEATS,
    num_groups: int = PROMPTS,
) -> list[Group]:
    """Groups that the model drew, with these verdicts, completion by completion."""
    examples = numbered_examples(50)[FIRST_ROW : FIRST_ROW + num_groups]

    def given(group_id: int, place: int, text: str) -> Verdict:
        return verdicts[group_id * repeats + place]

    return drawn_groups(model, examples, repeats, MAX_TOKENS, judge=given)


def learner_of(
    policy: PolicyConfig, run_dir: Path, model: LlamaForCausalLM, repeats: int = REPEATS
) -> Learner:
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=PROMPTS, repeats=repeats),
        model=ModelConfig(name="tiny"),
        train=TrainConfig(epochs=2),
        policy=policy,
        optimizer=OptimizerConfig(lr=1e-2),
        inference_model=InferenceModelConfig(max_tokens=MAX_TOKENS),
    )
    config.derive()
    frozen = Reference(ResponseScorer(tiny_llama()))
    reference = frozen if policy.uses_reference else None
    models = Models(model, ResponseScorer(model), reference)
    return Learner(config, LocalWorkers(Worker(config, models, named_weights)), run_dir)


def trained(learner: Learner, groups: Sequence[Group]) -> Batch:
    """The batch of these groups after two updates on it; asserts that every number on the way is finite."""
    return stepped(learner, credited(learner, groups))


def stepped(learner: Learner, batch: Batch) -> Batch:
    assert batch.advantage.isfinite().all()
    for _ in range(2):
        report = learner.step(batch)
        assert not report.skipped
        assert all(math.isfinite(value) for value in report.metrics.values()), report.metrics
    assert all(parameter.isfinite().all() for parameter in learner.worker.model.parameters())
    return batch


def plain(*scores: float) -> list[Verdict]:
    return [Verdict(score, {"accuracy": float(score >= 1)}, "scored") for score in scores]


MIXED = (1.0, 0.0, 0.0, 0.0)
ODD = {
    "equal": plain(0.7, 0.7, 0.7, 0.7),
    "an error": [Verdict(9.0, {}, "error"), *plain(1.0, 0.0, 0.0)],
    "only errors": [Verdict(math.nan, {}, "error")] * REPEATS,
    "an infinite reward": plain(math.inf, 1.0, 0.0, 0.0),
    "huge": plain(1e8, 1e8 + 1, 1e8, 0.0),
    "plain": plain(*MIXED),
}


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_odd_rewards(preset: str, tmp_path: Path) -> None:
    rewards = [reward for group in ODD.values() for reward in group]
    batch = sampled(rewards, tiny_llama(), num_groups=len(ODD))
    prepared = trained(learner_of(load_policy(preset), tmp_path, tiny_llama()), batch)
    advantage = dict(zip(ODD, prepared.advantage.view(-1, REPEATS), strict=True))
    policy = load_policy(preset)
    assert not advantage["only errors"].any()
    assert len(advantage["equal"].unique()) == 1
    if policy.whiten == "none":  # else it depends on the whole batch, the huge rewards in it too
        assert advantage["equal"].any() == (policy.baseline == "none")
        assert advantage["plain"][0] > 0


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_a_group_of_one_without_a_baseline(preset: str, tmp_path: Path) -> None:
    """The reward itself where nothing is divided; where a deviation divides, `group_of_one` decides."""
    policy = load_policy(
        preset,
        baseline="none",
        whiten="none",
        filter_range=None,
        dynamic_batching=False,
        overlong_cache=None,
    )
    prepared = trained(
        learner_of(policy, tmp_path, tiny_llama(), repeats=1),
        sampled(plain(1.0, 0.0, 0.5), tiny_llama(), repeats=1),
    )
    raw = policy.scale == "none" or policy.group_of_one == "raw"
    expected = [1.0, 0.0, 0.5] if raw else [0.0, 0.0, 0.0]
    assert prepared.advantage[:, 0].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_completions_that_end_at_once(preset: str, tmp_path: Path) -> None:
    groups = sampled(plain(*MIXED * 3), ends_at_once())
    assert [one.token_ids for group in groups for one in group.completions] == [[EOS]] * 12
    trained(learner_of(load_policy(preset), tmp_path, tiny_llama()), groups)


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_completions_without_a_token(preset: str, tmp_path: Path) -> None:
    """An engine that aborts a request may return nothing at all: in one completion, in a group, in a batch."""
    few, all_of_them = [0, 4, 5, 6, 7], list(range(12))
    learner = learner_of(load_policy(preset), tmp_path, tiny_llama())
    for empty in (few, all_of_them):
        groups = without_tokens(empty)
        batch = credited(learner, groups)
        batch.sample_log_prob[empty] = math.nan  # never read
        credit(learner.config.policy, Rollout(groups, batch), MAX_TOKENS)
        assert not stepped(learner, batch).mask[empty].any()


def without_tokens(empty: list[int]) -> list[Group]:
    groups = sampled(plain(*MIXED * 3), tiny_llama())
    completions = [one for group in groups for one in group.completions]
    for row in empty:
        completions[row].token_ids, completions[row].log_probs, completions[row].policy_versions = [], [], []
    return groups


def test_rewards_of_1e8_and_1e8_plus_1(tmp_path: Path) -> None:
    """Doubles tell the two apart: the advantages of 0 and 1. As float32, which cannot, they are equal: zeros."""
    groups = sampled(plain(*MIXED * 3), tiny_llama())
    learner = learner_of(load_policy("grpo"), tmp_path, tiny_llama())
    batch = credited(learner, groups)
    usual = batch.advantage
    batch.next.reward = batch.next.reward.double() + 1e8
    assert torch.equal(
        credit(learner.config.policy, Rollout(groups, batch), MAX_TOKENS).batch.advantage, usual
    )
    huge = sampled(plain(*(score + 1e8 for score in MIXED * 3)), tiny_llama())
    assert (trained(learner, huge).advantage == 0).all()
