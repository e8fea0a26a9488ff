"""Tests that all schedules and TorchRL's own rollout give the same episodes."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torchrl.collectors import Collector
from transformers import AutoTokenizer

from config.schema.models import ModelConfig
from envs.group import Group, Sampling
from envs.prompts import PromptQueue
from tests.group_collection import assert_same, make_group_collector
from tests.rollout.games import Game, Games, Opening, Window
from tests.rollout.recording import EOS, QUICKSTART, RecordingRewards, addition_examples
from torchgrpo.batches.batch import collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.group_buffer import GroupBuffer
from torchgrpo.rollout.group_env import EnginePolicy, GroupEnv, collect_rollout
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.rollout.group_stream import GroupStream
from torchgrpo.training.model_loading import load_model

GROUPS, BATCHES, REPEATS = 3, 2, 4


class DigitReward(Game):
    """Gives a reward for each turn with an even digit."""

    async def step(self, turn: dict[str, Any]) -> Any:
        self.reward = float(any(letter in "02468" for letter in turn["content"]))
        return await super().step(turn)


class WindowOfDigits(DigitReward, Window):
    """Gives these rewards for turns in sequences of their own."""


class OpeningWithDigits(DigitReward, Opening):
    """Gives these rewards for turns after a prompt of its own."""


@pytest.fixture(params=[DigitReward, WindowOfDigits, OpeningWithDigits])
def make_components(request: pytest.FixtureRequest) -> Any:
    """Returns a function that makes loop, group rollout and prompts of a run."""
    model = load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu"))
    loops = []

    def make() -> tuple[EngineLoop, GroupRollout, PromptQueue]:
        collector = make_group_collector(
            TransformersEngine(model, [EOS]),
            RecordingRewards(),
            addition_examples(60),
            REPEATS,
            Sampling(max_tokens=48),
            seed=5,
            tokenizer=AutoTokenizer.from_pretrained(QUICKSTART),
            environments=Games(request.param),
        )
        loops.append(collector.loop)
        return collector.loop, collector.group_rollout, collector.prompts

    yield make
    for loop in loops:
        loop.close()


def collect_in_overlap(loop: EngineLoop, rollout: GroupRollout, prompts: PromptQueue) -> list[Rollout]:
    buffer: GroupBuffer[Group] = GroupBuffer(
        batch_groups=GROUPS, max_age=0, batches_per_version=BATCHES, capacity=8, keep_order=True
    )
    with GroupStream(loop, rollout, prompts, buffer, in_flight=2, timeout=600.0) as stream:
        return [Rollout.from_groups(stream.take_batch()) for _ in range(BATCHES)]


def collect_in_lockstep(loop: EngineLoop, rollout: GroupRollout, prompts: PromptQueue) -> list[Rollout]:
    env = GroupEnv(loop, rollout, prompts, GROUPS)
    policy = EnginePolicy(env)
    return [collect_rollout(env, policy) for _ in range(BATCHES)]


def collect_by_torchrl(loop: EngineLoop, rollout: GroupRollout, prompts: PromptQueue) -> list[Rollout]:
    env = GroupEnv(loop, rollout, prompts, GROUPS)
    rollouts = []
    for _ in range(BATCHES):
        step = env.rollout(1, EnginePolicy(env))[:, 0]
        completions = [one for group in env.groups for one in group.completions]
        scores = [verdict.score for group in env.groups for verdict in group.verdicts]
        assert step["next", "reward"][:, 0].tolist() == scores and step["next", "done"].all()
        assert step["tokens", "response"][step["tokens", "response_mask"]].tolist() == list(
            chain.from_iterable(one.token_ids for one in completions)
        )
        rollouts.append(env.make_rollout(step))
    return rollouts


def collect_by_a_collector(loop: EngineLoop, rollout: GroupRollout, prompts: PromptQueue) -> list[Rollout]:
    env, rows = GroupEnv(loop, rollout, prompts, GROUPS), GROUPS * REPEATS
    frames = Collector(
        env,
        EnginePolicy(env),
        frames_per_batch=rows,
        total_frames=rows * BATCHES,
        auto_register_policy_transforms=False,
    )
    return [env.make_rollout(frame[:, 0]) for frame in frames]


def comparable_episodes(rollouts: Sequence[Rollout]) -> list[object]:
    """Returns the fields of groups that do not depend on the schedule."""
    return [
        (
            group.group_id,
            group.prompt,
            [
                (
                    one.token_ids,
                    one.sampled_mask,
                    one.sequence_starts,
                    one.finish_reason,
                    one.text,
                    [(turn.message, turn.start, turn.end, turn.replies, turn.reward) for turn in one.turns],
                    one.verdict and (one.verdict.score, one.verdict.components, one.verdict.outcome),
                )
                for one in group.completions
            ],
        )
        for rollout in rollouts
        for group in rollout.groups
    ]


def test_all_schedules_give_the_same_episodes(make_components: Any) -> None:
    expected = collect_in_lockstep(*make_components())
    scores = {verdict.score for rollout in expected for group in rollout.groups for verdict in group.verdicts}
    assert len(scores) > 1
    for collect in (collect_in_overlap, collect_by_torchrl, collect_by_a_collector):
        rollouts = collect(*make_components())
        assert comparable_episodes(rollouts) == comparable_episodes(expected)
        for rollout, other in zip(rollouts, expected, strict=True):
            assert_same(rollout.batch, collate(rollout.groups))
            assert torch.equal(rollout.batch.tokens.response, other.batch.tokens.response)
            assert torch.equal(rollout.batch.next.reward, other.batch.next.reward)
            torch.testing.assert_close(rollout.batch.sample_log_prob, other.batch.sample_log_prob)
