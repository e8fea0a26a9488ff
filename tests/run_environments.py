"""Environments of whole runs in tests, given as `env.environment=tests.run_environments:NAME`."""

import asyncio
from contextvars import ContextVar
from pathlib import Path

from envs.environments.interface import Example, Message, Observation, Step


class WaitingSums:
    """Rewards every right answer to a sum, and waits a few milliseconds before each reply.

    Args:
        turns: number of turns.
        wait_ms: wait in the reset and before each reply.
        log_file: gets a line for the begin and for the end of each episode.
        window: whether the model reads the question and the last reply only, which begins a sequence at each turn.
    """

    def __init__(self, turns: int = 3, wait_ms: float = 2.0, log_file: str = "", window: bool = False) -> None:
        self.turns, self.wait_s, self.log_file, self.window = turns, wait_ms / 1000, log_file, window

    async def reset(self, example: Example) -> Observation:
        self.answer, self.question = example.answer, example.messages
        self._log("begin")
        await asyncio.sleep(self.wait_s)
        return Observation()

    async def step(self, turn: Message) -> Step:
        await asyncio.sleep(self.wait_s)
        self.turns -= 1
        right = float(turn["content"].strip() == self.answer)
        if not self.turns:
            return Step(reward=right, components={"accuracy": right})
        return Step(({"role": "user", "content": "+?"},), right, history=self.question if self.window else None)

    async def close(self) -> None:
        self._log("end")

    def _log(self, event: str) -> None:
        if self.log_file:
            with Path(self.log_file).open("a") as file:
                file.write(f"{event}\n")


HANGS = ContextVar("HANGS", default=False)
"""Whether the environments of the current task hang."""


class HangingForSome(WaitingSums):
    """Never returns from `reset` where `HANGS` is set."""

    async def reset(self, example: Example) -> Observation:
        if HANGS.get():
            await asyncio.get_running_loop().create_future()
        return await super().reset(example)
