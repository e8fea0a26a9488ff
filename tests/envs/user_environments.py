"""Environments as users write them, for the tests of adapters and worker processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from envs.environments.interface import Example, Message, Observation, Step, tool

RETURN_VALUES: dict[str, Any] = {
    "none": None, "text": "more", "message": {"role": "user", "content": "more"},
    "messages": [{"role": "tool", "content": "4"}, {"role": "user", "content": "more"}],
    "rewarded": ("more", 0.5), "ended": (None, 1), "done": ("bye", True, True), "step": Step(reward=1.0),
    "assistant": {"role": "assistant", "content": "I know"}, "number": 5, "nan": ("more", float("nan")),
    "no content": {"role": "user"}, "unknown field": {"role": "user", "content": "a", "images": []},
    "info": ("a", 0.0, {}),
    "text reward": ("a", "1"), "four": ("a", 0.0, False, {}), "reserved": Step(components={"mean": 1.0}),
    "flood": "x" * 2_000_000, "surrogate": "\ud800",
}  # fmt: skip


class Unprintable(Exception):
    """Exception without a readable message."""

    def __str__(self) -> str:
        raise SystemExit


class Unreadable:
    """Number that ends the process that reads it."""

    def __float__(self) -> float:
        raise SystemExit


EXCEPTIONS: dict[str, type[BaseException]] = {
    each.__name__: each
    for each in (
        *(ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration, GeneratorExit, Unprintable),
    )
}


class Counter:
    """Sync environment that counts its turns, and records the threads of its calls."""

    threads: ClassVar[set[int]] = set()
    closed_instances: ClassVar[list["Counter"]] = []

    def __init__(self, limit: int = 2) -> None:
        self.limit = limit

    def reset(self, example: Example) -> str:
        self.turns = 0
        Counter.threads.add(threading.get_ident())
        return f"row {example.row}"

    def step(self, turn: Message) -> tuple[str | None, float]:
        turn["content"] = "changed by the environment"
        Counter.threads.add(threading.get_ident())
        self.turns += 1
        return (None if self.turns == self.limit else str(self.turns)), 0.5

    def close(self) -> None:
        Counter.closed_instances.append(self)


class AsyncCounter:
    """Async environment without `close`."""

    async def reset(self, example: Example) -> Observation:
        self.turns = 0
        schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        return Observation(({"role": "user", "content": "Begin."},), (schema,))

    async def step(self, turn: Message) -> str | None:
        await asyncio.sleep(0)
        self.turns += 1
        return str(self.turns) if self.turns < 3 else None


class Returns:
    """Environment that returns the value that the turn names."""

    def reset(self) -> None: ...

    def step(self, turn: Message) -> Any:
        return RETURN_VALUES[turn["content"]]


class Wiki:
    """Environment in TRL's form: tools with state, `reset` with columns, `reward`."""

    def reset(self, **row: Any) -> str:
        self.word, self.reward, self.order = row["answer"], 0.0, []
        return f"Find {row['kind']}."

    def look(self, page: str, depth: int = 1) -> dict[str, Any]:
        """Looks at a page.

        Args:
            page: its title
            depth: number of links to follow
        """
        self.order.append(page)
        if page == self.word:
            self.reward += 0.5
        return {"page": page, "number": len(self.order)}

    async def fail(self) -> None:
        """Fails."""
        raise ValueError("Game over.")

    def _helper(self) -> None: ...


class ScoredByMethod:
    """Environment in TRL's form with `get_reward`."""

    def reset(self, prompt: list[Message], answer: str) -> None:
        self.score: float | None = None

    def earn(self) -> None:
        """Earns a reward."""
        self.score = (self.score or 0.0) + 1.0

    def get_reward(self) -> float | None:
        return self.score


class Dealer:
    """Environment with `step` and one marked tool; its other methods are no tools."""

    def __init__(self, env: Any, card: str = "ace") -> None:
        self.card, self.num_calls, self.repeats = card, 0, env.repeats

    def reset(self, example: Example) -> None:
        self.num_calls = 0

    @tool
    def deal(self) -> str:
        """Deals a card."""
        self.num_calls += 1
        return self.card

    def describe(self) -> str:
        """Describes the game."""
        return "no tool"

    def step(self, turn: Message) -> tuple[None, float]:
        return None, float(self.num_calls)


class Ledgers(Dealer):
    """Environment whose tool returns a value that JSON cannot hold."""

    @tool
    def read(self) -> dict[tuple[int, int], int]:
        """Reads the ledger."""
        return {(1, 2): 3}


class Naughty:
    """Environment that does what the turn says."""

    def reset(self, example: Example) -> None:
        if example.answer == "fail in reset":
            raise KeyError("no such level")

    def step(self, turn: Message) -> str | None:
        command, _, argument = turn["content"].partition(" ")
        if command == "raise":
            raise EXCEPTIONS[argument]("as the turn says")
        if command == "hang":
            time.sleep(600)
        if command == "pid":
            return str(os.getpid())
        if command == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if command == "kill_fork_server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        if command == "fork":
            child = os.fork()
            return None if child == 0 else str(child)
        if command == "child":
            sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
            return str(subprocess.Popen(sleep, start_new_session=True).pid)
        if command == "number":
            return "a", Unreadable()  # type: ignore[return-value]
        if command == "key":
            return {"role": "tool", "content": "a", "tool_call_id": {1, 2}}  # type: ignore[return-value]
        if command == "print":
            os.write(1, b"flood " * 20_000)
        if command == "grow":
            return "x" * (1 << 40)
        return turn["content"]


async def _block_from(path: Path) -> None:
    """Blocks the event loop as soon as the file exists."""
    while not path.exists():
        await asyncio.sleep(0.01)
    time.sleep(600)


class AsyncNaughty(Naughty):
    """Async environment that does what the turn says."""

    async def reset(self, example: Example) -> None: ...  # type: ignore[override]

    async def step(self, turn: Message) -> str | None:  # type: ignore[override]
        if turn["content"] == "hang":
            await asyncio.sleep(600)
        if turn["content"] == "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        command, _, argument = turn["content"].partition(" ")
        if command == "leave_blocking_task":
            self.left_task = asyncio.create_task(_block_from(Path(argument)))
        if turn["content"] == "refuse":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
            await asyncio.sleep(600)
        return super().step(turn)


class FailsInClose(Counter):
    """Environment whose `close` fails."""

    def close(self) -> None:
        raise OSError("cannot be closed")


class Prompts(Counter):
    """Environment with prompts of its own."""

    def examples(self, split: str) -> list[Any]:
        conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Four?"}]
        return [{"prompt": f"{split} {self.limit}", "answer": 3, "level": 1}, {"prompt": conversation, "answer": [4]}]


class Secrets(Counter):
    """Environment whose problems differ in the answer only."""

    def examples(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": "Guess.", "answer": answer} for answer in (3, 4, 5, 3)]


class BadPrompts(Counter):
    """Environment whose rows are chosen by its option."""

    def examples(self, split: str) -> Any:
        rows: list[Any] = [[{"question": "?"}], 1 / 0 if self.limit == 1 else None, [{"prompt": ""}]]
        return rows[self.limit]


class NoStep:
    """Class with neither `step` nor tools."""

    def reset(self, example: Example) -> None: ...


class NoReset:
    """Class without `reset`."""

    def step(self, turn: Message) -> None: ...


class WrongStep:
    """Class whose `step` has too many parameters."""

    def reset(self, example: Example) -> None: ...

    def step(self, turn: Message, example: Example) -> None: ...


class NoDocstring:
    """Class with a tool that has no docstring."""

    def reset(self) -> None: ...

    def look(self, page: str) -> None: ...


class NoAnnotation:
    """Class with a tool whose parameter has no type."""

    def reset(self) -> None: ...

    def look(self, page) -> None:  # type: ignore[no-untyped-def]
        """Looks."""


def countdown(turns: list[Message], example: Example) -> str | None:
    """Replies until the example's number of turns."""
    return None if len(turns) == example.answer else f"{len(turns)} of {example.answer}: {turns[-1]['content']}"


async def async_countdown(turns: list[Message], example: Example, unit: str = "turns") -> tuple[str, float]:
    """Replies with an option."""
    return f"{len(turns)} {unit}", 0.25


def no_parameters() -> None:
    """Function of a wrong form."""


not_callable = 5
