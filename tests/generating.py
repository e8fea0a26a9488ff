"""Groups as runs make them, with an engine and stand-ins for tokenizer, graders and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from envs.chat import Encoder
from envs.group import Group, Sampling
from envs.prompts import PromptQueue, PromptSource
from envs.task import Example
from envs.turns import Conversation
from tests.tiny import LetterTokenizer
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import SteppedEngine
from torchgrpo.rollout.env import EnginePolicy, GroupEnv, OnProgress, collect
from torchgrpo.rollout.generate import Generation, KeepGroup


def draw_from(source: PromptSource, count: int) -> list[Example]:
    """The next examples of a source."""
    return [source.draw() for _ in range(count)]


class Listed:
    """A prompt source that goes through a list once, and notes what it is told."""

    left_out = 0

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = list(examples)
        self.observed: list[tuple[Example, float]] = []
        self._next = 0

    def draw(self) -> Example:
        self._next += 1
        return self.examples[self._next - 1]

    def observe(self, example: Example, success: float) -> None:
        self.observed.append((example, success))


def generation(
    loop: EngineLoop,
    grader: Any,
    repeats: int,
    sampling: Sampling,
    candidates: int | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    conversation: Conversation | None = None,
) -> Generation:
    encoder = Encoder(tokenizer or LetterTokenizer())  # type: ignore[arg-type]
    judge = loop.judge(grader)
    return Generation(loop, encoder, judge, conversation, sampling, candidates or repeats, repeats, seed)


@dataclass(eq=False)
class Collecting:
    """Collects groups as grpo.py does, any number at a time."""

    loop: EngineLoop
    generation: Generation
    prompts: PromptQueue
    keep_group: KeepGroup
    attempts: int
    on_progress: OnProgress = lambda stage, done, total: None

    def collect(self, num_groups: int) -> list[Group]:
        env = GroupEnv(self.loop, self.generation, self.prompts, num_groups, self.keep_group, self.attempts)
        rollout = collect(env, EnginePolicy(env, self.on_progress))
        assert_same(rollout.batch, collate(rollout.groups))
        return rollout.groups


def assert_same(batch: Batch, expected: Batch) -> None:
    """Every bit of every field."""
    ours, theirs = batch.to_tensordict(), expected.to_tensordict()
    keys = set(theirs.keys(True, True))
    assert set(ours.keys(True, True)) == keys
    for key in keys:
        assert ours[key].dtype == theirs[key].dtype, key
        assert torch.equal(ours[key], theirs[key]), key


def collector(
    engine: SteppedEngine,
    grader: Any,
    examples: Sequence[Example],
    repeats: int,
    sampling: Sampling,
    *,
    keep_group: KeepGroup = lambda group: True,
    attempts: int = 10,
    **more: Any,
) -> Collecting:
    """Group i is made of the i-th example."""
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    prompts = PromptQueue(Listed(examples))  # type: ignore[arg-type]
    made = generation(loop, grader, repeats, sampling, **more)
    return Collecting(loop, made, prompts, keep_group, attempts)
