"""Tests of episodes that end early: control tokens, failures and deadlines."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config.schema.env import EnvConfig
from config.schema.models import ModelConfig
from envs.chat import ChatEncoder
from envs.environments.interface import EpisodeError, Observation
from envs.example import Example
from envs.group import Group, SampledCompletion, Sampling
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.reward_workers.scoring import ScoringResult
from tests.group_collection import EPISODE_LIMITS, make_group_rollout, make_player
from tests.rollout.games import Game, Games, Window
from tests.rollout.recording import EOS, QUICKSTART, RecordingEngine, RecordingRewards, addition_examples
from torchgrpo.batches.batch import collate
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.model_rewards.model_rewards import make_model_rewards
from torchgrpo.rollout.rollout_components import RolloutComponents
from torchgrpo.training.model_loading import load_model

USER, THREE, EIGHT = 4, 25, 30


class ScriptedSampler:
    """Sampler of fixed turns; a turn without a script never comes."""

    def __init__(self, *turns: Sequence[int]) -> None:
        self.turns = list(turns)
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> list[SampledCompletion]:
        self.requests.append(request)
        if not self.turns:
            await asyncio.get_running_loop().create_future()
        ids = list(self.turns.pop(0))
        return [SampledCompletion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")]

    def outside_engine(self) -> AbstractContextManager[None]:
        return nullcontext()


def play(tokenizer: Any, sampler: ScriptedSampler, games: Games, seconds: float = 600.0) -> SampledCompletion:
    """Plays one episode."""
    encoder, limits = ChatEncoder(tokenizer), replace(EPISODE_LIMITS, seconds=seconds)
    player = make_player(sampler, encoder, games, limits, OutcomeCounts(1.0))
    (example,) = addition_examples(1)
    request = Request(0, encoder.encode(example), 1, Sampling(max_tokens=64), seed=0)

    async def play_once() -> SampledCompletion:
        completion = await player.play(request, example, 0)
        await games.close()
        return completion

    return asyncio.run(play_once())


@pytest.mark.parametrize("foreign", [USER, 10_000], ids=["a control token", "an id without a token"])
def test_a_turn_that_holds_control_tokens_is_not_answered(tokenizer: Any, foreign: int) -> None:
    sampler, games = ScriptedSampler([THREE, EOS], [foreign, THREE, EOS], [THREE, EOS]), Games(Game)
    one = play(tokenizer, sampler, games)
    assert len(games.made_games[0].shown_turns) == 1 and len(one.turns) == 2
    assert one.token_ids[-3:] == [foreign, THREE, EOS]
    assert one.verdict is not None
    assert (one.finish_reason, one.verdict.outcome, one.verdict.components) == (
        "stop",
        "invalid",
        {"control_tokens": 1.0},
    )


def test_without_rewards_of_turns_the_reward_service_finds_control_tokens(tokenizer: Any) -> None:
    one = play(tokenizer, ScriptedSampler([USER, THREE, EOS]), Games(Game, {"reward": None}))
    assert one.verdict is None and len(one.turns) == 1


@pytest.mark.parametrize("game", [Game, Window])
def test_a_deadline_leaves_no_reply_without_a_turn(tokenizer: Any, game: type[Game]) -> None:
    """The second turn never comes, so the reply and its sequence leave the tokens."""
    sampler = ScriptedSampler([THREE, EIGHT, EOS])
    one = play(tokenizer, sampler, Games(game), seconds=0.5)
    assert len(sampler.requests) == 2 and len(sampler.requests[1].prompt) > len(sampler.requests[0].prompt)
    assert (one.finish_reason, one.token_ids) == ("deadline", [THREE, EIGHT, EOS])
    assert one.sampled_mask == [True] * 3 and len(one.log_probs) == len(one.policy_versions) == 3
    assert one.sequence_starts == []
    (turn,) = one.turns
    assert turn.replies == ({"role": "user", "content": "+?"},) and turn.reward == 0.25


class BrokenReset(Game):
    """Fails before the first turn."""

    async def reset(self, example: Example) -> Observation:
        raise EpisodeError("BrokenReset.reset: no board")


class HangingReset(Game):
    """Never returns from its reset."""

    async def reset(self, example: Example) -> Observation:
        await asyncio.get_running_loop().create_future()
        return Observation()


@pytest.mark.parametrize(
    ("game", "reason", "outcome"), [(BrokenReset, "error", "error"), (HangingReset, "deadline", "invalid")]
)
def test_a_group_of_episodes_without_a_turn(tokenizer: Any, game: type[Game], reason: str, outcome: str) -> None:
    """Such a group has no age, and its batch has rows without tokens."""
    engine = RecordingEngine(load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu")))
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    options = {"environments": Games(game), "limits": replace(EPISODE_LIMITS, seconds=0.5), "tokenizer": tokenizer}
    rollout = make_group_rollout(loop, RecordingRewards(), 4, Sampling(max_tokens=8), **options)
    group: Group = loop.run(rollout.run_group(addition_examples(1)[0], 0))
    loop.close()
    assert [(one.finish_reason, one.token_ids) for one in group.completions] == [(reason, [])] * 4
    assert [verdict.outcome for verdict in group.verdicts] == [outcome] * 4
    assert group.oldest_version > 10**9
    batch = collate([group])
    assert len(batch) == 4 and not batch.tokens.response_mask.any() and not batch.tokens.loss_mask.any()


class ManyMessages(Game):
    """Makes the prompt longer than the limit."""

    async def reset(self, example: Example) -> Observation:
        return Observation(({"role": "user", "content": "1+" * 40},))


def test_a_prompt_beyond_the_limit_is_the_failure_of_its_episode(tokenizer: Any) -> None:
    one = play(tokenizer, ScriptedSampler(), Games(ManyMessages))
    assert one.finish_reason == "error"
    assert "more than env.max_prompt_tokens=64; raise env.max_prompt_tokens" in one.error


def test_failures_of_environments_count_in_the_totals(tokenizer: Any) -> None:
    counts = OutcomeCounts(1.0)
    for outcome in ("scored", "error", "error", "invalid"):
        counts.add(addition_examples(1)[0], ScoringResult(0.0, {}, outcome, 0.5))  # type: ignore[arg-type]
    rewards = SimpleNamespace(metrics=counts.metrics)
    rollout = SimpleNamespace(player=SimpleNamespace(error_counts=counts, driver=SimpleNamespace(metrics=dict)))
    none = make_model_rewards(EnvConfig(), set())
    parts = RolloutComponents(None, None, rollout, None, rewards, none, None)  # type: ignore[arg-type]
    metrics = parts.outcome_metrics()
    assert metrics["reward/errors_total"] == 4 and metrics["reward/invalid_total"] == 2
    assert metrics["reward_latency/p50_s"] == 0.5
