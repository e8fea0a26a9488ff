"""Native tools that tests name by import path."""

import asyncio
import datetime
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Literal

from config.schema.env import EnvConfig

release = threading.Event()
"""Ends the calls of `hang`."""
slow_coroutine_runs = asyncio.Event()


def capital(country: str, form: Literal["short", "long"] = "short") -> str:
    """Looks up the capital of a country.

    Args:
        country: its English name
        form: the form of the answer

    Raises:
        KeyError: the country is unknown.
    """
    city = {"France": "Paris", "Peru": "Lima"}[country]
    return city if form == "short" else f"{city} is the capital of {country}."


async def double(number: int, note: str | None = None) -> dict[str, Any]:
    """Doubles a number."""
    await asyncio.sleep(0)
    return {"number": 2 * number, "note": note}


def values(kind: str) -> Any:
    """Returns a value of a kind."""
    kinds: dict[str, Callable[[], Any]] = {
        "none": lambda: None, "number": lambda: 3.5, "half a character": lambda: "a\ud800b",
        "list": lambda: ["é", None], "long": lambda: "a" * 100_000 + "z", "date": lambda: [datetime.date(2000, 1, 2)],
    }  # fmt: skip
    return kinds[kind]()


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def failures(kind: str) -> str:
    """Raises an exception of a kind."""
    if kind == "exit":
        raise SystemExit(3)
    if kind == "unreadable":
        raise UnreadableError
    if kind == "circle":
        circle: list[Any] = []
        circle.append(circle)
        return circle  # type: ignore[return-value]
    raise OSError("no \ud800 such index")


async def async_failures(kind: str) -> str:
    """Raises an exception of a kind."""
    await asyncio.sleep(0)
    if kind == "exit":
        raise SystemExit(3)
    raise asyncio.CancelledError if kind == "cancelled" else OSError("no such index")


def hang() -> str:
    """Waits for a signal."""
    release.wait(600)
    return "released"


async def async_hang() -> str:
    """Refuses to be cancelled."""
    while not release.is_set():
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            release.wait(0.01)
    return "released"


async def slow_coroutine() -> str:
    """Waits until it is cancelled."""
    slow_coroutine_runs.set()
    await asyncio.Event().wait()
    return "never"


async def blocking(seconds: float) -> str:
    """Holds the event loop."""
    time.sleep(seconds)
    return "done"


def trace_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@trace_calls
async def traced_echo(word: str) -> str:
    """Returns a word, awaited in a thread."""
    await asyncio.sleep(0)
    return word


class Notebook:
    """Notes of one episode."""

    closed_notes: list[list[str]] = []  # noqa: RUF012

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.database = sqlite3.connect(":memory:")  # works only in the thread that makes it
        self.database.execute("create table notes (text)")

    def add_note(self, text: str) -> int:
        """Adds a note.

        Args:
            text: one line
        """
        self.database.execute("insert into notes values (?)", (text,))
        return self.count()

    def read_notes(self) -> list[str]:
        """Returns all notes."""
        return [text for (text,) in self.database.execute("select text from notes order by rowid")]

    async def process_id(self) -> int:
        """Returns the process."""
        return os.getpid()

    @staticmethod
    def shout(text: str) -> str:
        """Returns capitals."""
        return text.upper()

    def count(self) -> int:
        return int(self.database.execute("select count(*) from notes").fetchone()[0])

    def _private(self, text: str) -> str:
        """Is no tool."""
        return text

    def reset(self, **kwargs: Any) -> None:
        """Begins an episode."""

    def get_reward(self) -> float:
        """Returns the reward."""
        return 1.0

    def close(self) -> None:
        """Closes the database."""
        self.closed_notes.append(self.read_notes())
        self.database.close()


class BiggerNotebook(Notebook):
    """Notebook with one more tool."""

    def first_note(self) -> str:
        """Returns the first note."""
        return self.read_notes()[0]


class Recorder:
    recorded_texts: ClassVar[list[str]] = []

    def wait_for_release(self) -> str:
        """Waits for a signal."""
        release.wait(600)
        return "released"

    def record(self, text: str) -> str:
        """Records a text."""
        self.recorded_texts.append(text)
        return text


class Echo:
    """You have an echo.

    The model does not see this paragraph.
    """

    def run(self, request: str) -> str:
        return request

    def close(self) -> None: ...


class FailingAtClose:
    def look(self) -> str:
        """Looks."""
        return "seen"

    async def close(self) -> None:
        raise OSError("cannot close")


class Unmakable:
    def __init__(self) -> None:
        raise OSError("no such index")

    def look(self) -> str:
        """Looks."""
        return "seen"


class TwoArguments:
    def __init__(self, env: EnvConfig, size: int) -> None: ...

    def look(self) -> str:
        """Looks."""
        return "seen"


class WithoutDocstrings:
    def look(self, place: str) -> str:
        return place


class WrongMethod:
    def look(self, place) -> str:  # type: ignore[no-untyped-def]
        """Looks."""
        return str(place)


def without_docstring(word: str) -> str:
    return word


def only_arguments(word: str) -> str:
    return word


only_arguments.__doc__ = "\n    Args:\n        word: any word\n    "


def without_annotation(word) -> str:  # type: ignore[no-untyped-def]
    """Returns a word."""
    return str(word)


def any_arguments(**words: str) -> str:
    """Returns words."""
    return str(words)


def wrong_type(day: datetime.date) -> str:
    """Returns a day."""
    return str(day)


def wrong_type_inside(days: list[datetime.date]) -> str:
    """Returns days."""
    return str(days)


def unknown_type(day: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Returns a day."""
    return str(day)


def bad_choices(word: str) -> str:
    """Returns a word.

    Args:
        word: one of these (choices: [a)
    """
    return word


not_a_tool = 3
