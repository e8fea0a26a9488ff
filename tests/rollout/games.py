"""Environments that reply, rewrite history, fail or hang, for tests of episodes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envs.environments.interface import Environment, EpisodeError, Observation, Step
from envs.example import Example, Message


class Game:
    """Replies `reply` to every turn, and gives a reward for each."""

    def __init__(self, reply: str = "+?", turns: int = 3, reward: float | None = 0.25) -> None:
        self.reply, self.turns, self.reward = reply, turns, reward
        self.shown_turns: list[Message] = []
        self.is_closed = False

    async def reset(self, example: Example) -> Observation:
        return Observation()

    async def step(self, turn: Message) -> Step:
        self.shown_turns.append(turn)
        if len(self.shown_turns) == self.turns:
            return Step(reward=self.reward, components={"steps": 1.0})
        return Step(({"role": "user", "content": self.reply},), self.reward, {"steps": 1.0})

    async def close(self) -> None:
        self.is_closed = True


class Opening(Game):
    """Appends a message to the prompt."""

    async def reset(self, example: Example) -> Observation:
        return Observation(({"role": "user", "content": "7+"},))


class Window(Game):
    """Shows the model its question and the last reply only."""

    async def reset(self, example: Example) -> Observation:
        self.question = example.messages
        return Observation()

    async def step(self, turn: Message) -> Step:
        step = await super().step(turn)
        return Step(step.messages, step.reward, step.components, history=self.question) if step.messages else step


class SameHistory(Game):
    """Returns the whole chat as the history of each reply."""

    async def reset(self, example: Example) -> Observation:
        self.messages = list(example.messages)
        return Observation()

    async def step(self, turn: Message) -> Step:
        step = await super().step(turn)
        history = [*self.messages, turn]
        self.messages = [*history, *step.messages]
        return Step(step.messages, step.reward, step.components, history=history) if step.messages else step


class Failing(Game):
    """Fails in its second step if the first turn begins with an even digit."""

    async def step(self, turn: Message) -> Step:
        step = await super().step(turn)
        if len(self.shown_turns) == 2 and self.shown_turns[0]["content"][:1] in "02468":
            raise EpisodeError("Failing.step: division by zero")
        return step


class Hanging(Game):
    """Never returns from its second step."""

    async def step(self, turn: Message) -> Step:
        step = await super().step(turn)
        if len(self.shown_turns) == 2:
            await asyncio.get_running_loop().create_future()
        return step


@dataclass
class Games:
    """Factory of one kind of game, which keeps all that it made."""

    make_game: Callable[..., Game]
    options: dict[str, Any] = field(default_factory=dict)
    made_games: list[Game] = field(default_factory=list)

    async def make(self) -> Environment:
        self.made_games.append(self.make_game(**self.options))
        return self.made_games[-1]

    async def close(self) -> None:
        assert all(game.is_closed for game in self.made_games)
