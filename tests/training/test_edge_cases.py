"""Odd groups through the real engine, prepare and step, under every preset: all defined, nowhere NaN."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from envs.token_env import TokenEnv
from rollout.collector import EnginePolicy, Rollouts
from tensordict import TensorDictBase
from transformers import LlamaForCausalLM

from config.env import EnvConfig
from config.inference import InferenceModelConfig
from config.optimizer import OptimizerConfig
from config.policy import PRESETS, PolicyConfig, load_policy
from config.schema import Config, ModelConfig, TrainConfig
from envs.group import Sampling
from envs.task import Completion, Example, Reward
from rollout.engines.transformers_engine import TransformersEngine
from tests.tiny import EOS, ImmediateRewards, LetterTokenizer, numbered_examples, tiny_llama
from training.forward import ResponseScorer
from training.learner import Learner
from training.reference import Reference

PROMPTS, REPEATS, MAX_TOKENS = 3, 4, 6
FIRST_ROW = 2
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


class Given(ImmediateRewards):
    """Rewards as listed, row by row, of groups whose examples are numbered from FIRST_ROW."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = rewards

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Reward]:
        start = (examples[0].row - FIRST_ROW) * len(completions)
        return list(self.rewards[start : start + len(completions)])


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
    rewards: Sequence[Reward], model: LlamaForCausalLM, repeats: int = REPEATS, num_groups: int = PROMPTS
) -> TensorDictBase:
    examples = numbered_examples(50)
    env = TokenEnv(lambda n: examples[FIRST_ROW : FIRST_ROW + n], LetterTokenizer(), Given(rewards), repeats)
    policy = EnginePolicy(TransformersEngine(model, [EOS]), Sampling(max_tokens=MAX_TOKENS), repeats, 0, 60.0)
    return Rollouts(env, policy).collect(num_groups)


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
    frozen = Reference(ResponseScorer(tiny_llama(), repeats, True), rows=repeats)
    reference = frozen if policy.uses_reference else None
    return Learner(model, ResponseScorer(model, repeats, True), reference, config, run_dir)


def trained(learner: Learner, batch: TensorDictBase) -> TensorDictBase:
    """The prepared batch after two updates on it; asserts that every number on the way is finite."""
    prepared = learner.prepare(batch)
    assert prepared["advantage"].isfinite().all()
    for _ in range(2):
        report = learner.step(prepared)
        assert not report.skipped
        assert all(math.isfinite(value) for value in report.metrics.values()), report.metrics
    assert all(parameter.isfinite().all() for parameter in learner.model.parameters())
    return prepared


def plain(*scores: float) -> list[Reward]:
    return [Reward(score, {"accuracy": float(score >= 1)}) for score in scores]


MIXED = (1.0, 0.0, 0.0, 0.0)
ODD = {
    "equal": plain(0.7, 0.7, 0.7, 0.7),
    "an error": [Reward(9.0, outcome="error"), *plain(1.0, 0.0, 0.0)],
    "only errors": [Reward(math.nan, outcome="error")] * REPEATS,
    "an infinite reward": plain(math.inf, 1.0, 0.0, 0.0),
    "huge": plain(1e8, 1e8 + 1, 1e8, 0.0),
    "plain": plain(*MIXED),
}


@pytest.mark.parametrize("preset", NAMES)
def test_odd_rewards(preset: str, tmp_path: Path) -> None:
    rewards = [reward for group in ODD.values() for reward in group]
    batch = sampled(rewards, tiny_llama(), num_groups=len(ODD))
    prepared = trained(learner_of(load_policy(preset), tmp_path, tiny_llama()), batch)
    advantage = dict(zip(ODD, prepared["advantage"].view(-1, REPEATS), strict=True))
    assert not advantage["only errors"].any()
    assert advantage["equal"].any() == (load_policy(preset).baseline == "none")
    assert advantage["plain"][0] > 0


@pytest.mark.parametrize("preset", NAMES)
def test_a_group_of_one_without_a_baseline(preset: str, tmp_path: Path) -> None:
    """The reward itself where nothing is divided; where a deviation divides, `group_of_one` decides."""
    policy = load_policy(
        preset, baseline="none", filter_range=None, dynamic_batching=False, overlong_cache=None
    )
    prepared = trained(
        learner_of(policy, tmp_path, tiny_llama(), repeats=1),
        sampled(plain(1.0, 0.0, 0.5), tiny_llama(), repeats=1),
    )
    raw = policy.scale == "none" or policy.group_of_one == "raw"
    expected = [1.0, 0.0, 0.5] if raw else [0.0, 0.0, 0.0]
    assert prepared["advantage"][:, 0].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("preset", NAMES)
def test_completions_that_end_at_once(preset: str, tmp_path: Path) -> None:
    batch = sampled(plain(*MIXED * 3), ends_at_once())
    assert batch["tokens", "response"].tolist() == [[EOS]] * 12
    trained(learner_of(load_policy(preset), tmp_path, tiny_llama()), batch)


@pytest.mark.parametrize("preset", NAMES)
def test_completions_without_a_token(preset: str, tmp_path: Path) -> None:
    """An engine that aborts a request may return nothing at all: in one completion, in a group, in a batch."""
    few, all_of_them = [0, 4, 5, 6, 7], list(range(12))
    learner = learner_of(load_policy(preset), tmp_path, tiny_llama())
    for empty in (few, all_of_them):
        assert not trained(learner, without_tokens(empty))["mask"][empty].any()


def without_tokens(empty: list[int]) -> TensorDictBase:
    batch = sampled(plain(*MIXED * 3), tiny_llama())
    for key in ("response_mask", "loss_mask"):
        batch["tokens", key][empty] = False
    batch["sample_log_prob"][empty] = math.nan  # never read
    return batch


def test_equal_rewards_move_nothing(tmp_path: Path) -> None:
    learner = learner_of(load_policy("grpo", kl_coef=0.0), tmp_path, tiny_llama())
    before = [parameter.clone() for parameter in learner.model.parameters()]
    prepared = trained(learner, sampled(plain(*[0.1] * 12), tiny_llama()))
    assert (prepared["advantage"] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_an_errored_completion_leaves_the_advantages_of_the_others(tmp_path: Path) -> None:
    batch = sampled([*ODD["an error"], *plain(*MIXED * 2)], tiny_llama())
    prepared = trained(learner_of(load_policy("grpo"), tmp_path, tiny_llama()), batch)
    alone = 1 / math.sqrt(3)  # of 1, 0, 0: the mean is 1/3 and the deviation 1/sqrt(3)
    expected = [0.0, (2 / 3) / (alone + 1e-4), *[-(1 / 3) / (alone + 1e-4)] * 2]
    assert prepared["advantage"][:4, 0].tolist() == pytest.approx(expected, rel=1e-6)
    assert not prepared["mask"][0].any()
    assert prepared["mask"][1].any()


def test_rewards_of_1e8_and_1e8_plus_1(tmp_path: Path) -> None:
    """Doubles tell the two apart: the advantages of 0 and 1. As float32, which cannot, they are equal: zeros."""
    batch = sampled(plain(*MIXED * 3), tiny_llama())
    learner = learner_of(load_policy("grpo"), tmp_path, tiny_llama())
    usual = learner.prepare(batch.clone())["advantage"]
    batch["next", "reward"] = batch["next", "reward"].double() + 1e8
    assert torch.equal(trained(learner, batch.clone())["advantage"], usual)
    batch["next", "reward"] = batch["next", "reward"].float()
    assert (trained(learner, batch)["advantage"] == 0).all()
