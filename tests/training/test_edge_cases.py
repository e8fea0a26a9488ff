"""Tests of unusual groups under all presets, from engine to optimizer step, without NaN."""

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
from tests.groups import credit_groups, sample_groups
from tests.tiny_models import EOS, numbered_examples, tiny_llama
from tests.training.presets import EVERY_PRESET
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_models import LearnerModels
from torchgrpo.training.published_weights import named_weights
from torchgrpo.training.reference_model import ReferenceModel
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.worker import Worker
from torchgrpo.training.workers import LocalWorkers

PROMPTS, REPEATS, MAX_TOKENS = 3, 4, 6
FIRST_ROW = 2


def make_eos_model() -> LlamaForCausalLM:
    """Returns a model that always samples the end-of-sequence token."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        model.lm_head.bias[EOS] = 50.0
    return model


def sample_groups_with_verdicts(
    verdicts: Sequence[Verdict], model: LlamaForCausalLM, repeats: int = REPEATS, num_groups: int = PROMPTS
) -> list[Group]:
    """Samples groups and gives their completions these verdicts in order."""
    examples = numbered_examples(50)[FIRST_ROW : FIRST_ROW + num_groups]

    def next_verdict(group_id: int, index: int, text: str) -> Verdict:
        return verdicts[group_id * repeats + index]

    return sample_groups(model, examples, repeats, MAX_TOKENS, judge=next_verdict)


def learner_title(policy: PolicyConfig, run_dir: Path, model: LlamaForCausalLM, repeats: int = REPEATS) -> Learner:
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=PROMPTS, repeats=repeats),
        model=ModelConfig(name="tiny"),
        train=TrainConfig(epochs=2),
        policy=policy,
        optimizer=OptimizerConfig(lr=1e-2),
        inference_model=InferenceModelConfig(max_tokens=MAX_TOKENS),
    )
    config.derive_fields()
    frozen = ReferenceModel(ResponseScorer(tiny_llama()))
    reference = frozen if policy.uses_reference else None
    models = LearnerModels(model, ResponseScorer(model), reference)
    return Learner(config, LocalWorkers(Worker(config, models, named_weights)), run_dir)


def train_on(learner: Learner, groups: Sequence[Group]) -> Batch:
    """Trains twice on the groups; asserts finite numbers and returns the batch."""
    return take_steps(learner, credit_groups(learner, groups))


def take_steps(learner: Learner, batch: Batch) -> Batch:
    assert batch.advantage.isfinite().all()
    for _ in range(2):
        report = learner.step(batch)
        assert not report.is_skipped
        assert all(math.isfinite(value) for value in report.metrics.values()), report.metrics
    assert all(parameter.isfinite().all() for parameter in learner.worker.model.parameters())
    return batch


def scored_verdicts(*scores: float) -> list[Verdict]:
    return [Verdict(score, {"accuracy": float(score >= 1)}, "scored") for score in scores]


MIXED_SCORES = (1.0, 0.0, 0.0, 0.0)
UNUSUAL_VERDICTS = {
    "equal": scored_verdicts(0.7, 0.7, 0.7, 0.7),
    "an error": [Verdict(9.0, {}, "error"), *scored_verdicts(1.0, 0.0, 0.0)],
    "only errors": [Verdict(math.nan, {}, "error")] * REPEATS,
    "an infinite reward": scored_verdicts(math.inf, 1.0, 0.0, 0.0),
    "huge": scored_verdicts(1e8, 1e8 + 1, 1e8, 0.0),
    "plain": scored_verdicts(*MIXED_SCORES),
}


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_odd_rewards(preset: str, tmp_path: Path) -> None:
    rewards = [reward for group in UNUSUAL_VERDICTS.values() for reward in group]
    batch = sample_groups_with_verdicts(rewards, tiny_llama(), num_groups=len(UNUSUAL_VERDICTS))
    prepared = train_on(learner_title(load_policy(preset), tmp_path, tiny_llama()), batch)
    advantage = dict(zip(UNUSUAL_VERDICTS, prepared.advantage.view(-1, REPEATS), strict=True))
    policy = load_policy(preset)
    assert not advantage["only errors"].any()
    assert len(advantage["equal"].unique()) == 1
    if policy.whiten == "none":  # other presets depend on the whole batch and its huge rewards
        assert advantage["equal"].any() == (policy.baseline == "none")
        assert advantage["plain"][0] > 0


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_a_group_of_one_without_a_baseline(preset: str, tmp_path: Path) -> None:
    """The advantage is the reward unless a deviation divides; then `group_of_one` decides."""
    policy = load_policy(
        preset, baseline="none", whiten="none", filter_range=None, dynamic_batching=False, overlong_cache=None
    )
    prepared = train_on(
        learner_title(policy, tmp_path, tiny_llama(), repeats=1),
        sample_groups_with_verdicts(scored_verdicts(1.0, 0.0, 0.5), tiny_llama(), repeats=1),
    )
    raw = policy.scale == "none" or policy.group_of_one == "raw"
    expected = [1.0, 0.0, 0.5] if raw else [0.0, 0.0, 0.0]
    assert prepared.advantage[:, 0].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_completions_that_end_at_once(preset: str, tmp_path: Path) -> None:
    groups = sample_groups_with_verdicts(scored_verdicts(*MIXED_SCORES * 3), make_eos_model())
    assert [one.token_ids for group in groups for one in group.completions] == [[EOS]] * 12
    train_on(learner_title(load_policy(preset), tmp_path, tiny_llama()), groups)


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_completions_without_a_token(preset: str, tmp_path: Path) -> None:
    """Completions without tokens, as of an aborted request, work in any number of rows."""
    few, all_of_them = [0, 4, 5, 6, 7], list(range(12))
    learner = learner_title(load_policy(preset), tmp_path, tiny_llama())
    for empty in (few, all_of_them):
        groups = without_tokens(empty)
        batch = credit_groups(learner, groups)
        batch.sample_log_prob[empty] = math.nan  # not used
        assign_credit(learner.config.policy, Rollout(groups, batch), MAX_TOKENS)
        assert not take_steps(learner, batch).mask[empty].any()


def without_tokens(empty: list[int]) -> list[Group]:
    groups = sample_groups_with_verdicts(scored_verdicts(*MIXED_SCORES * 3), tiny_llama())
    completions = [one for group in groups for one in group.completions]
    for row in empty:
        completions[row].token_ids, completions[row].log_probs, completions[row].policy_versions = [], [], []
    return groups


def test_rewards_of_1e8_and_1e8_plus_1(tmp_path: Path) -> None:
    """Rewards 1e8 and 1e8 + 1 have advantages of 0 and 1 in float64.

    They are equal in float32, where the advantages are zero.
    """
    groups = sample_groups_with_verdicts(scored_verdicts(*MIXED_SCORES * 3), tiny_llama())
    learner = learner_title(load_policy("grpo"), tmp_path, tiny_llama())
    batch = credit_groups(learner, groups)
    usual = batch.advantage
    batch.next.reward = batch.next.reward.double() + 1e8
    assert torch.equal(assign_credit(learner.config.policy, Rollout(groups, batch), MAX_TOKENS).batch.advantage, usual)
    huge = sample_groups_with_verdicts(scored_verdicts(*(score + 1e8 for score in MIXED_SCORES * 3)), tiny_llama())
    assert (train_on(learner, huge).advantage == 0).all()
