"""Interface of environments: the protocol, its records, and the error of an episode.

    reset(example) ─▶ Observation ─▶ turn of the model ─▶ step(turn) ─▶ Step ─▶ turn ─▶ step(turn) ─▶ ... ─▶ close()

An environment belongs to one episode. `envs.environments.make` makes environments of `env.environment`, and adapts
shorter forms to this protocol (docs/environments.md). This module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from envs.example import Example, Message

__all__ = ["Environment", "EpisodeError", "Example", "Message", "Observation", "Step", "tool"]

Function = TypeVar("Function", bound=Callable[..., Any])
TOOL_METHODS: WeakSet[Callable[..., Any]] = WeakSet()
"""Methods that `tool` marks."""


class EpisodeError(Exception):
    """Fault of an environment, which ends its episode with an error, but not the run.

    The message names the class and method, or the function, and the exception or value.
    """


@dataclass(frozen=True)
class Observation:
    """Result of a reset.

    messages: appended to the example's messages; empty for none. tools: schemas, each
    `{"type": "function", "function": {...}}`, for the chat template.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Step:
    """Reply to a turn of the model.

    Args:
        messages: messages to the model, of the roles user, tool and system; without messages the episode ends.
        reward: reward of this turn; None if the environment gives none.
        components: named parts of the reward, which are summed over the turns.
        done: ends the episode; the messages are not sent.
        history: messages that replace all messages before this reply, to rewrite the context between turns.
        tool_outcomes: outcome of each tool call of the turn, for metrics; `ToolEnvironment` sets them.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    history: tuple[Message, ...] | None = None
    tool_outcomes: tuple[str, ...] = ()

    @property
    def ends_episode(self) -> bool:
        """Whether no turn of the model follows."""
        return self.done or not self.messages


class Environment(Protocol):
    """Environment of one episode, with state.

    Raises:
        EpisodeError: from `reset` and `step`, for any fault of the environment.
    """

    async def reset(self, example: Example) -> Observation:
        """Begins the episode of an example."""

    async def step(self, turn: Message) -> Step:
        """Replies to a turn.

        turn: the model's message with `content`, and where present `reasoning_content`, `tool_calls` (arguments as
        dictionaries) and `malformed` (a text for each call that could not be parsed).
        """

    async def close(self) -> None:
        """Ends the episode; called once, also after an error, and raises nothing."""


def tool(method: Function) -> Function:
    """Decorator of methods that the model may call as tools.

    The tool's schema comes from the type hints and the docstring with a part `Args:`.
    """
    TOOL_METHODS.add(method)
    return method
