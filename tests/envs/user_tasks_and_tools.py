"""User tasks and tools that tests name by import path."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from config.schema.env import EnvConfig
from envs.data import load_rows
from envs.task import Completion, Example, Reward, Task


class Reverse(Task):
    system_prompt = "Spell it backwards."

    def examples(self, split: str) -> Sequence[Example]:
        words = ["on", "it", "as"] if split == "train" else ["up"]
        return [Example(self.messages(word), word[::-1], row) for row, word in enumerate(words)]

    def reward(self, completion: Completion, example: Example) -> Reward:
        return Reward(float(completion.text == example.answer))


class PrefilledTask(Reverse):
    def examples(self, split: str) -> Sequence[Example]:
        first, *others = super().examples(split)
        return [replace(first, prefill="own"), *others]


class Words(Reverse):
    def examples(self, split: str) -> Sequence[Example]:
        rows = load_rows(self.env, None, None, split)
        return [
            Example(self.messages(row.text("word")), row["word"][::-1], row.index, row_data=row.values) for row in rows
        ]


class Unmakable(Reverse):
    def __init__(self, env: EnvConfig) -> None:
        raise KeyError("size")


class Failing(Reverse):
    def examples(self, split: str) -> Sequence[Example]:
        raise FileNotFoundError("words.txt")


class InvalidExamples(Reverse):
    """Task with the invalid examples that `env.options.examples` names."""

    def examples(self, split: str) -> Any:
        chat = self.messages("a")
        kinds: dict[str, Any] = {
            "generator": (Example(chat, "a", 0) for _ in range(1)), "texts": ["a"],
            "no messages": [Example((), "a", 0)], "no content": [Example(({"role": "user"},), "a", 0)],
            "half a character": [Example(self.messages("\ud800"), "a", 0)],
            "a text for a row": [Example(chat, "a", "0")],
            "one row twice": [Example(chat, "a", 0), Example(chat, "b", 0)],
        }  # fmt: skip
        return kinds[self.env.options["examples"]]


class Abstract(Task):
    def examples(self, split: str) -> Sequence[Example]:
        return []


def search(query: str) -> str:
    actions: dict[str, Any] = {
        "break": lambda: 1 / 0, "exit": lambda: exit(3), "hang": lambda: time.sleep(600),
        "nothing": lambda: None, "number": lambda: 3, "half": lambda: "a\ud800b", "long": lambda: "a" * 9000,
    }  # fmt: skip
    return actions.get(query, lambda: f"{query} is a word")()


search.__doc__ = """You can look words up
    in a dictionary.

    The model does not see this paragraph.
    """


async def later(query: str) -> str:
    """You can wait."""
    await asyncio.sleep(0.001)
    return query.upper()


class Counter:
    """You have a counter."""

    closed_counts: list[int] = []  # noqa: RUF012

    def __init__(self, env: EnvConfig) -> None:
        self.count = len(env.tools)

    def run(self, request: str) -> str:
        self.count += int(request)
        return str(self.count)

    def close(self) -> None:
        self.closed_counts.append(self.count)


def undocumented_tool(query: str) -> str:
    return query


def numbers_tool(query: int) -> str:
    """You have numbers."""
    return str(query)


class WithoutClose:
    """You have no end."""

    def __init__(self, env: EnvConfig) -> None: ...

    def run(self, request: str) -> str:
        return request


class UnmakableTool(Counter):
    """You have nothing."""

    def __init__(self, env: EnvConfig) -> None:
        raise OSError("no such index")


class OtherTools:
    @staticmethod
    def search(query: str) -> str:
        """You can look elsewhere."""
        return query


calculator = search
not_a_tool = 3
