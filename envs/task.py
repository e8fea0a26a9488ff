"""What a task is: rows turned into prompts, and completions turned into rewards. No torch here.

A task is one file in `envs/tasks`: a class with `examples(split)` and `reward(completion, example)`, named by
the `register` decorator. Importing `envs.tasks` registers all of them. `envs.rewards` puts rewards that a user
names and the weights of parts on top.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from config.env import EnvConfig

Outcome = Literal["scored", "invalid", "error"]
Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """One prompt.

    messages: chat messages, the system prompt included.
    answer: whatever the task's reward needs to judge (a number, a list of tests, ...).
    row: the example's index in its source, for reports and the ledger.
    source: in a mixture, the name of the member that the example comes from.
    """

    messages: tuple[Message, ...]
    answer: Any
    row: int
    source: str = ""


@dataclass(frozen=True)
class Completion:
    """What a reward sees of a sampled answer: its text, how many tokens it has, and whether it was cut off.

    control_tokens: the model wrote control tokens where none belong, which the text does not show. No reward sees
    such an answer: it is `invalid`.
    """

    text: str
    num_tokens: int = 0
    truncated: bool = False
    control_tokens: bool = False


@dataclass(frozen=True)
class Reward:
    """A verdict. `parts` are unweighted named components (accuracy, format, ...) that are logged beside it."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = "scored"


class Task(ABC):
    """Prompts and their judge. Subclasses are pure: no state changes after construction."""

    name: str = ""
    system_prompt: str | None = None
    in_process: bool = False
    """True only where judging cannot hang, crash or take long: then no worker process is used."""
    min_score: float = 0.0
    """Score of a completion that the reward could not get through (it hung, crashed, took all memory)."""
    duplicates: str | None = None
    """Replaces `env.duplicates` where a task must not keep them."""
    weights: Mapping[str, float] = MappingProxyType({"accuracy": 1.0})
    """The parts of the reward and what each contributes to the score."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.members: dict[str, Task] = {}

    @abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """All prompts of a split, in a fixed order."""

    @abstractmethod
    def reward(self, completion: Completion, example: Example) -> Reward:
        """Judge one completion; pure and deterministic. Raises only on errors of data or code."""

    def warm_up(self) -> None:  # noqa: B027
        """Called once before judging begins: import here what is slow to import."""

    def messages(self, user: str) -> tuple[Message, ...]:
        """The chat for one user message: `env.system_prompt`, else that of `env.reward`, else the task's own."""
        from envs.rewards import find_reward

        named = find_reward(self.env.reward)
        system = self.system_prompt
        if self.env.system_prompt is not None:
            system = self.env.system_prompt
        elif named is not None and named.system_prompt is not None:
            system = named.system_prompt
        head = ({"role": "system", "content": system},) if system else ()
        return (*head, {"role": "user", "content": user})


_REGISTRY: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[type[Task]], type[Task]]:
    """Class decorator: makes the task available as `env.dataset=name`."""

    def decorate(cls: type[Task]) -> type[Task]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def known_tasks() -> list[str]:
    import envs.tasks  # noqa: F401  (importing registers them)

    return sorted(_REGISTRY)


def make_task(env: EnvConfig) -> Task:
    """Raises ConfigError for an unknown name, listing the known ones."""
    from config.errors import ConfigError

    known = known_tasks()
    if env.dataset not in _REGISTRY:
        raise ConfigError(f"env.dataset={env.dataset!r} is not a known task; known: {', '.join(known)}")
    return _REGISTRY[env.dataset](env)
