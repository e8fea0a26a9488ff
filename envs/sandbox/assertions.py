"""Tests that are Python code, run beside the program that they test: in another process, which it cannot touch.

    tests ── "call f with these" ──▶ answer      a socket; values cross as data (`envs.sandbox.values`)
          ◀── "it returned this" ───             no verdict ever comes from the answer
      │
      └─▶ grader: a line for each test

The answer's process is forked before the tests are read, so that they are nowhere in its memory. If it ends, whatever
its exit code, the tests that are left have failed. What is called here with a list sees that list changed, as it would
in one process. Standard library only: this runs inside the sandbox.
"""

import ast
import builtins
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

from envs.sandbox import pytest_module
from envs.sandbox.values import MUTABLE, Decoded, encoded

FRAME = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class AnswerEnded(BaseException):
    """The answer's process is gone. No test can catch it by `except Exception`."""


class Channel:
    """Frames over a socket. Raises AnswerEnded when the other end is closed or sends what is no frame."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        view = memoryview(FRAME.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            raise AnswerEnded from error

    def receive(self) -> dict[str, Any]:
        (size,) = FRAME.unpack(self._read(FRAME.size))
        if size > MAX_FRAME_BYTES:
            raise AnswerEnded("a frame that is too long")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise AnswerEnded("no frame") from error
        if not isinstance(message, dict):
            raise AnswerEnded("no frame")
        return message

    def _read(self, size: int) -> bytes:
        pieces, left = [], size
        while left:
            try:
                piece = os.read(self.fd, min(left, 1 << 20))
            except OSError as error:
                raise AnswerEnded from error
            if not piece:
                raise AnswerEnded
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


class Answer:
    """The side of the tested program: it does what the tests ask for until they are done."""

    def __init__(self, channel: Channel, names: dict[str, Any]) -> None:
        self.channel, self.names = channel, names
        self.held: list[Any] = []

    def serve(self) -> None:
        while True:
            try:
                asked = self.channel.receive()
            except AnswerEnded:
                return
            self.channel.send(self._reply(asked))

    def _reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            if asked["do"] == "names":
                return {"names": [name for name in self.names if isinstance(name, str)]}
            given = Decoded(asked["given"], lambda number, kind: self.held[number], self._class)
            known = {
                id(made): number for number, made in given.made.items() if given.nodes[number][0] in MUTABLE
            }
            target, arguments, named = given.value
            value = OPERATIONS[asked["do"]](self, target, arguments, named)
            # the arguments go back too: they may have changed
            return {"value": encoded((value, arguments, named), self._standing, known)[0]}
        except Exception as error:
            return {"raised": type(error).__name__, "message": str(error)[:1000]}

    def _class(self, name: str) -> type | None:
        found = self.names.get(name)
        return found if isinstance(found, type) else None

    def _standing(self, value: Any) -> int:
        self.held.append(value)
        return len(self.held) - 1


OPERATIONS: dict[str, Callable[[Answer, Any, Any, Any], Any]] = {
    "lookup": lambda answer, target, arguments, named: eval(target, answer.names),
    "call": lambda answer, target, arguments, named: target(*arguments, **named),
    "get": lambda answer, target, arguments, named: getattr(target, arguments[0]),
    "iterate": lambda answer, target, arguments, named: list(target),
    "item": lambda answer, target, arguments, named: target[arguments[0]],
    "length": lambda answer, target, arguments, named: len(target),
}


class FromAnswer(Exception):
    """An exception of the program that is none of Python's own."""


class Tests:
    """The side of the tests: names that the program defines are stand-ins that ask it."""

    __test__ = False

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.names: dict[str, Any] = {"__name__": "tests"}

    def ask(self, what: str, target: Any, *arguments: Any, **named: Any) -> Any:
        """Raises what the program raised, Unknown where a value cannot cross, AnswerEnded."""
        text, mine = encoded((target, list(arguments), named), _number)
        self.channel.send({"do": what, "given": text})
        reply = self.channel.receive()
        if "raised" in reply:
            raise _exception(str(reply["raised"]), str(reply.get("message", "")))
        came = Decoded(reply.get("value", ""), lambda number, kind: StandIn(self, number), self._class, mine)
        if not isinstance(came.value, tuple) or len(came.value) != 3:
            raise AnswerEnded("no reply")
        return came.value[0]

    def _class(self, name: str) -> type | None:
        found = self.names.get(name)
        return found if isinstance(found, type) else None

    def prepare(self, preamble: str, sources: Sequence[str], entry_point: str | None) -> None:
        """Defines what the tests use: what the preamble defines, else what the program does, `candidate` always so."""
        exec(compile(preamble, "preamble.py", "exec"), self.names)
        self.channel.send({"do": "names"})
        offered = self.channel.receive().get("names", [])
        wanted = {name for source in sources for name in _names(source)}
        for name in wanted.intersection(name for name in offered if isinstance(name, str)):
            if not (name in self.names or hasattr(builtins, name)):
                self.names[name] = self.ask("lookup", name)
        if entry_point is not None:
            self.names["candidate"] = self.names[entry_point] = self.ask("lookup", entry_point)
        sys.modules["solution"] = _module(self)
        sys.modules["pytest"] = pytest_module.module()

    def passes(self, source: str) -> str:
        """Empty where a test passes, else why not."""
        before = set(self.names)
        try:
            exec(compile(source, "tests.py", "exec"), self.names)
            for test in pytest_module.found_tests(
                self.names, [name for name in self.names if name not in before]
            ):
                test()
        except AnswerEnded:
            return "the program ended"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:500]
        return ""


class StandIn:
    """A function, or an object that cannot cross, of the program. It equals only itself, whatever the program says."""

    __slots__ = ("_number", "_tests")

    def __init__(self, tests: Tests, number: int) -> None:
        self._tests, self._number = tests, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._tests.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._tests.ask("get", self, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tests.ask("iterate", self))

    def __getitem__(self, key: Any) -> Any:
        return self._tests.ask("item", self, key)

    def __len__(self) -> int:
        return int(self._tests.ask("length", self))

    def __bool__(self) -> bool:
        return True


def _number(value: Any) -> int | None:
    return value._number if type(value) is StandIn else None


def _exception(name: str, message: str) -> Exception:
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(message)
        except TypeError:  # UnicodeDecodeError and the like take more than a message
            pass
    return FromAnswer(f"{name}: {message}")


def _names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def _module(tests: Tests) -> ModuleType:
    """What `from solution import f` finds."""
    module = ModuleType("solution")

    def found(name: str) -> Any:
        if name.startswith("__"):  # the import system looks for some
            raise AttributeError(name)
        return tests.ask("lookup", name)

    vars(module)["__getattr__"] = found
    return module


def run_answer(preamble: bytes, source: bytes, fd: int) -> NoReturn:
    """The program, after a preamble, as the module `solution`, which then does what tests ask. Ends the process."""
    try:
        module = ModuleType("solution")
        sys.modules["solution"] = module
        exec(compile(preamble, "preamble.py", "exec"), vars(module))
        exec(compile(source, "solution.py", "exec"), vars(module))
        Answer(Channel(fd), vars(module)).serve()
    finally:
        os._exit(0)


def run_tests(tests: dict[str, Any], fd: int, verdicts: int) -> NoReturn:
    """Writes a line of JSON to `verdicts` for each test: empty text, or why it failed. Ends the process.

    tests: `preamble` and `tests`, Python code; `entry_point`, the name of the function or null; `all`: whether to stop
    at the first that fails.
    """
    try:
        ours = Tests(Channel(fd))
        failure = ""
        try:
            ours.prepare(tests["preamble"], tests["tests"], tests["entry_point"])
        except AnswerEnded:
            failure = "the program ended"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:500]
        for source in tests["tests"]:
            failed = failure or ours.passes(source)
            os.write(verdicts, json.dumps(failed).encode() + b"\n")
            if failed and tests["all"]:
                break
    finally:
        os._exit(0)
