"""Builds rollout components and collects groups, with fakes for tokenizer, rewards and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from envs.chat import ChatEncoder
from envs.chat_responses import ResponseParser
from envs.group import Group, Sampling
from envs.prompts import PromptQueue, PromptSource
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.task import Example
from tests.tiny_models import LetterTokenizer
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.rollout.conversation import ConversationParts, TurnLimits
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import SteppedEngine
from torchgrpo.rollout.environment_driver import EnvironmentDriver
from torchgrpo.rollout.episode_player import EpisodePlayer
from torchgrpo.rollout.group_env import EnginePolicy, GroupEnv, OnProgress, collect_rollout
from torchgrpo.rollout.group_rollout import GroupRollout, KeepGroup


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of turns, seconds of an episode, and number of episodes at a time."""

    prompt_tokens: int
    turns: int
    turn_tokens: int | None
    turn_ends: tuple[str, ...]
    seconds: float
    alive: int


EPISODE_LIMITS = EpisodeLimits(prompt_tokens=64, turns=8, turn_tokens=None, turn_ends=(), seconds=600.0, alive=512)


def next_examples(source: PromptSource, count: int) -> list[Example]:
    """Returns the next examples of a source."""
    return [source.next_example() for _ in range(count)]


def make_player(
    sampler: Any,
    encoder: ChatEncoder,
    environments: Any,
    limits: EpisodeLimits,
    counts: OutcomeCounts,
    append_history: bool = False,
) -> EpisodePlayer:
    """Makes a player of episodes in environments."""
    turn_limits = TurnLimits(limits.prompt_tokens, limits.turns, limits.turn_tokens, limits.turn_ends)
    parts = ConversationParts(sampler, encoder, ResponseParser(encoder.tokenizer), turn_limits, append_history)
    return EpisodePlayer(parts, EnvironmentDriver(sampler, environments), limits.seconds, limits.alive, counts)


class ListPromptSource:
    """Prompt source that iterates over a list once and records observations."""

    left_out = 0

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = list(examples)
        self.observations: list[tuple[Example, float]] = []
        self._next_index = 0

    def next_example(self) -> Example:
        self._next_index += 1
        return self.examples[self._next_index - 1]

    def observe(self, example: Example, success: float) -> None:
        self.observations.append((example, success))


def make_group_rollout(
    loop: EngineLoop,
    grader: Any,
    repeats: int,
    sampling: Sampling,
    candidates: int | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    environments: Any = None,
    limits: EpisodeLimits = EPISODE_LIMITS,
    max_error_rate: float = 1.0,
    append_history: bool = False,
) -> GroupRollout:
    """Makes a group rollout; with `environments`, which have `make` and `close`, the completions are episodes."""
    encoder = ChatEncoder(tokenizer or LetterTokenizer())  # type: ignore[arg-type]
    player = None
    if environments is not None:
        player = make_player(loop, encoder, environments, limits, OutcomeCounts(max_error_rate), append_history)
    score_completions = loop.make_scorer(grader)
    return GroupRollout(loop, encoder, score_completions, player, sampling, candidates or repeats, repeats, seed)


@dataclass(eq=False)
class GroupCollector:
    """Collects groups as grpo.py does, any number per call."""

    loop: EngineLoop
    group_rollout: GroupRollout
    prompts: PromptQueue
    keep_group: KeepGroup
    attempts: int
    on_progress: OnProgress = lambda stage, done, total: None

    def collect(self, num_groups: int) -> list[Group]:
        env = GroupEnv(self.loop, self.group_rollout, self.prompts, num_groups, self.keep_group, self.attempts)
        rollout = collect_rollout(env, EnginePolicy(env, self.on_progress))
        assert_same(rollout.batch, collate(rollout.groups))
        return rollout.groups


def assert_same(batch: Batch, expected: Batch) -> None:
    """Asserts that two batches are equal bit for bit in every field."""
    ours, theirs = batch.to_tensordict(), expected.to_tensordict()
    keys = set(theirs.keys(True, True))
    assert set(ours.keys(True, True)) == keys
    for key in keys:
        assert ours[key].dtype == theirs[key].dtype, key
        assert torch.equal(ours[key], theirs[key]), key


def make_group_collector(
    engine: SteppedEngine,
    grader: Any,
    examples: Sequence[Example],
    repeats: int,
    sampling: Sampling,
    *,
    keep_group: KeepGroup = lambda group: True,
    attempts: int = 10,
    **options: Any,
) -> GroupCollector:
    """Makes a collector whose group i is made of the i-th example."""
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    prompts = PromptQueue(ListPromptSource(examples))  # type: ignore[arg-type]
    group_rollout = make_group_rollout(loop, grader, repeats, sampling, **options)
    return GroupCollector(loop, group_rollout, prompts, keep_group, attempts)
