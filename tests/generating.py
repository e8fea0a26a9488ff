"""Groups as runs make them, with an engine and stand-ins for tokenizer, graders and prompts."""

from collections.abc import Callable, Sequence
from typing import Any

from envs.chat import Encoder
from envs.group import Group, Sampling
from envs.prompts import PromptQueue, PromptSource
from envs.task import Example
from envs.turns import Conversation
from tests.tiny import LetterTokenizer
from torchgrpo.rollout.collect import Collector
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.sampler import SteppedEngine
from torchgrpo.rollout.generate import Generation


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


def collector(
    engine: SteppedEngine,
    grader: Any,
    examples: Sequence[Example],
    repeats: int,
    sampling: Sampling,
    *,
    wants: Callable[[Group], bool] = lambda group: True,
    attempts: int = 10,
    **more: Any,
) -> Collector:
    """Group i is made of the i-th example."""
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    prompts = PromptQueue(Listed(examples))  # type: ignore[arg-type]
    made = generation(loop, grader, repeats, sampling, **more)
    return Collector(loop, made, prompts, wants, attempts)
