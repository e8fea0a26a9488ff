"""Tests of episodes on a real engine: tokens, sequences, rewards, limits, failures and deadlines."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.group import Group, SampledCompletion, Sampling
from tests.group_collection import EPISODE_LIMITS, EpisodeLimits, make_group_rollout
from tests.log_capture import LogCapture
from tests.rollout.games import Failing, Game, Games, Hanging, Opening, SameHistory, Window
from tests.rollout.recording import (
    EOS,
    RecordingEngine,
    RecordingRewards,
    addition_examples,
    assert_every_sampled_token_is_trained_once,
)
from tests.rollout.virtual_clock import VirtualClock
from torchgrpo.batches.batch import collate
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.training.response_scorer import ResponseScorer

REPEATS, GROUPS = 4, 5
LIMITS = EPISODE_LIMITS


@pytest.fixture
def engine(model: Any) -> RecordingEngine:
    return RecordingEngine(model)


@pytest.fixture
def loop(engine: RecordingEngine) -> Iterator[EngineLoop]:
    started = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    yield started
    started.close()


Play = Callable[..., list[Group]]


@pytest.fixture
def play(loop: EngineLoop, tokenizer: PreTrainedTokenizerBase) -> Play:
    return make_play(loop, tokenizer)


@pytest.fixture
def play_on_virtual_clock(engine: RecordingEngine, tokenizer: PreTrainedTokenizerBase) -> Iterator[Play]:
    """Plays where engine steps take no time, so that only hanging steps reach the deadline."""
    with VirtualClock().loops():
        started = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    yield make_play(started, tokenizer)
    started.close()


def make_play(loop: EngineLoop, tokenizer: PreTrainedTokenizerBase) -> Play:
    """Returns a function that plays groups of episodes and returns them."""

    def play_groups(
        games: Games, limits: EpisodeLimits = LIMITS, max_tokens: int = 48, groups: int = GROUPS, **options: Any
    ) -> list[Group]:
        options |= {"tokenizer": tokenizer, "environments": games, "limits": limits}
        rollout = make_group_rollout(loop, RecordingRewards(), REPEATS, Sampling(max_tokens=max_tokens), **options)
        examples = addition_examples(groups)
        return loop.run_all([rollout.run_group(example, number) for number, example in enumerate(examples)])

    return play_groups


def completions_of(groups: Sequence[Group]) -> list[SampledCompletion]:
    return [one for group in groups for one in group.completions]


def test_replies_extend_one_sequence(engine: RecordingEngine, play: Play, tokenizer: Any) -> None:
    groups = play(Games(Game))
    completions = completions_of(groups)
    assert all(len(one.turns) == 3 and not one.sequence_starts for one in completions)
    batch = collate(groups)
    assert len(batch) == GROUPS * REPEATS and batch.episode is None
    assert_every_sampled_token_is_trained_once(engine, batch)
    environment = batch.tokens.response_mask & ~batch.tokens.loss_mask
    reply = tokenizer.encode("<user>+?<assistant>", add_special_tokens=False)
    assert batch.tokens.response[environment].tolist() == reply * (2 * GROUPS * REPEATS)
    assert (batch.sample_log_prob[environment] == 0).all()


def test_rewritten_history_starts_sequences(engine: RecordingEngine, play: Play, model: Any) -> None:
    groups = play(Games(Window))
    completions = completions_of(groups)
    assert {one.num_sequences for one in completions} == {3}
    batch = collate(groups)
    assert len(batch) == 3 * GROUPS * REPEATS
    assert batch.episode is not None and batch.episode.flatten().unique().tolist() == list(range(GROUPS * REPEATS))
    assert_every_sampled_token_is_trained_once(engine, batch)
    with torch.no_grad():
        scored = ResponseScorer(model, True, chunk_size=64)(batch.tokens).log_prob
    mask = batch.tokens.loss_mask
    torch.testing.assert_close(scored[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=1e-4)


def test_a_history_that_is_the_chat_extends_the_sequence(play: Play) -> None:
    completions, expected = completions_of(play(Games(SameHistory))), completions_of(play(Games(Game)))
    assert [one.token_ids for one in completions] == [one.token_ids for one in expected]
    assert {one.num_sequences for one in completions} == {1}


def test_messages_of_the_reset_belong_to_the_prompt(engine: RecordingEngine, play: Play) -> None:
    (group,) = play(Games(Opening, {"turns": 1}), groups=1)
    batch = collate([group])
    assert len(batch) == REPEATS and batch.episode is None
    assert_every_sampled_token_is_trained_once(engine, batch)
    prompts = {one.sequence_starts[0].prompt for one in group.completions}
    assert len(prompts) == 1 and len(prompts.pop()) > len(group.prompt)


def test_rewards_of_turns_are_the_verdict(play: Play) -> None:
    for one in completions_of(play(Games(Game))):
        assert one.verdict is not None
        assert (one.verdict.score, one.verdict.components, one.verdict.outcome) == (0.75, {"steps": 3.0}, "scored")
        assert [turn.reward for turn in one.turns] == [0.25] * 3 and one.finish_reason == "stop"


def test_ten_tenths_are_a_whole_reward(play: Play) -> None:
    (group,) = play(Games(Game, {"turns": 10, "reward": 0.1}), replace(LIMITS, turns=10), 128, groups=1)
    assert [one.verdict.score for one in group.completions if one.verdict is not None] == [1.0] * REPEATS


def test_without_rewards_of_turns_the_task_scores(loop: EngineLoop, tokenizer: Any) -> None:
    rewards, games = RecordingRewards(), Games(Game, {"reward": None})
    sampling = Sampling(max_tokens=48)
    rollout = make_group_rollout(loop, rewards, REPEATS, sampling, tokenizer=tokenizer, environments=games)
    (group,) = loop.run_all([rollout.run_group(addition_examples(1)[0], 0)])
    assert [verdict.score for verdict in group.verdicts] == [1.0] * REPEATS
    for shown in rewards.scored_completions:
        assert [message["role"] for message in shown.turns] == ["assistant", "user"] * 2 + ["assistant"]
        assert shown.text == shown.turns[-1]["content"]


def test_a_failure_is_the_outcome_of_its_episode(play: Play) -> None:
    completions = completions_of(play(Games(Failing)))
    failed = [one for one in completions if one.error]
    assert failed and len(failed) < len(completions)
    for one in completions:
        assert one.verdict is not None
        expected = ("error", "error") if one.error else ("scored", "stop")
        assert (one.verdict.outcome, one.finish_reason) == expected
    assert {one.error for one in failed} == {"Failing.step: division by zero"}


def test_the_first_failure_is_logged_once(play: Play, log_capture: LogCapture) -> None:
    class ClosesLater(Failing):
        async def close(self) -> None:
            await asyncio.sleep(0.2)  # other episodes fail meanwhile
            await super().close()

    failed = [one for one in completions_of(play(Games(ClosesLater))) if one.error]
    assert len(failed) > 1 and log_capture.text.count("the first failure of an episode") == 1


def test_too_many_failures_end_the_run(play: Play) -> None:
    class AlwaysFailing(Failing):
        async def step(self, turn: dict[str, Any]) -> Any:
            self.shown_turns = [{"content": "0"}]
            return await super().step(turn)

    with pytest.raises(ConfigError, match="division by zero"):
        play(Games(AlwaysFailing), groups=30, max_error_rate=0.1)


def test_the_deadline_ends_only_its_episode(engine: RecordingEngine, play_on_virtual_clock: Play) -> None:
    limits = EpisodeLimits(64, 8, None, (), seconds=3.0, alive=512)
    games = Games(Hanging)
    for one in completions_of(play_on_virtual_clock(games, limits, groups=2)):
        assert one.verdict is not None
        assert (one.finish_reason, one.verdict.outcome, one.verdict.score) == ("deadline", "scored", 0.25)
    assert engine.in_flight == 0 and all(game.is_closed for game in games.made_games)


def test_a_deadline_before_any_reward_is_invalid(play_on_virtual_clock: Play) -> None:
    limits = EpisodeLimits(64, 8, None, (), seconds=3.0, alive=512)
    for one in completions_of(play_on_virtual_clock(Games(Hanging, {"reward": None}), limits, groups=1)):
        assert one.verdict is not None and (one.finish_reason, one.verdict.outcome) == ("deadline", "invalid")


def test_limits_of_turns_and_tokens(engine: RecordingEngine, play: Play) -> None:
    limits = EpisodeLimits(64, 2, 3, (), seconds=600.0, alive=3)
    for one in completions_of(play(Games(Game, {"turns": 100}), limits)):
        assert (one.finish_reason, len(one.turns)) == ("turns", 2)
        assert all(turn.end - turn.start <= 3 for turn in one.turns)
    unlimited = EpisodeLimits(64, 100, None, (), seconds=600.0, alive=512)
    for one in completions_of(play(Games(Game, {"turns": 100}), unlimited, max_tokens=20)):
        assert one.finish_reason == "length" and len(one.token_ids) <= 20 and one.sampled_mask[-1]


def test_cut_turns_are_shown_as_truncated(play: Play) -> None:
    games = Games(Game, {"turns": 2})
    limits = EpisodeLimits(64, 8, 1, (), seconds=600.0, alive=512)
    completions = completions_of(play(games, limits))
    cut = [turn.get("truncated", False) for game in games.made_games for turn in game.shown_turns]
    ends = [one.token_ids[turn.end - 1] == EOS for one in completions for turn in one.turns]
    assert sorted(cut) == sorted(not has_end for has_end in ends) and any(cut)


def test_tokens_do_not_depend_on_other_episodes(play: Play) -> None:
    together = play(Games(Window))
    for number, group in enumerate(together):
        limits = EpisodeLimits(64, 8, None, (), seconds=600.0, alive=1)
        alone = play(Games(Window), limits, groups=number + 1)[number]
        assert [one.token_ids for one in alone.completions] == [one.token_ids for one in group.completions]
