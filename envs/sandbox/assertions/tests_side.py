"""Tests that are Python code, run beside the program that they test: in another process, which it cannot touch.

    tests ── "call f with these" ──▶ answer      a socket; values cross as data (`envs.sandbox.assertions.values`)
          ◀── "call your function" ─             where the tests have given it one, before it answers
          ◀── "it returned this" ───             no verdict ever comes from the answer
      │
      └─▶ grader: a line for each test

The answer's process (`envs.sandbox.assertions.answer_side`) is forked before the tests are read, so that they are
nowhere in its memory. If it ends, whatever its exit code, the tests that are left have failed. What is called here with
a list sees that list changed, as it would in one process. Standard library only: this runs inside the sandbox.
"""

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from envs.sandbox.assertions import numpy_module, pytest_module
from envs.sandbox.assertions.channel import AnswerEnded, Channel
from envs.sandbox.assertions.raised import exception, exception_class, lineage
from envs.sandbox.assertions.stand_in import StandIn, Taken
from envs.sandbox.assertions.values import Decoded, encoded


class Tests:
    """The side of the tests: names that the program defines are stand-ins that ask it.

    shared: classes of the preamble, of which the program has its own; an object of these, and of no other class, is
    made here of what the program says of it. offered: the program's names, each with its bases where it is an
    exception. lent: functions that it may call.
    """

    __test__ = False

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.names: dict[str, Any] = {"__name__": "tests"}
        self.shared: dict[str, type] = {}
        self.offered: dict[str, Any] = {}
        self.exceptions: dict[str, type] = {}
        self.lent: list[Any] = []
        self.lent_numbers: dict[int, int] = {}
        self.taken: dict[int, Taken] = {}

    def ask(self, what: str, target: Any, *arguments: Any, **named: Any) -> Any:
        """Raises what the program raised, Unknown where a value cannot cross, AnswerEnded."""
        text, mine = encoded((target, list(arguments), named), self._number)
        self.channel.send({"do": what, "given": text})
        while "call" in (reply := self.channel.receive()):
            try:  # calls a function that the tests gave the program
                given, by_name = self._decoded(reply["given"])
                value = self.lent[-1 - int(reply["call"])](*given, **by_name)
                answer: dict[str, Any] = {"value": encoded(value, self._number)[0]}
            except Exception as error:
                answer = {"raised": lineage(type(error)), "message": str(error)[:1000]}
            self.channel.send(answer)
        if "raised" in reply:
            original = StandIn(self, int(reply["object"]))
            raise exception(reply["raised"], str(reply["message"]), self.exceptions, original)
        came = self._decoded(reply.get("value", ""), mine)
        if not isinstance(came, tuple) or len(came) != 3:
            raise AnswerEnded("no reply")
        return came[0]

    def _decoded(self, text: str, mine: dict[int, Any] | None = None) -> Any:
        return Decoded(text, self._stood, self.shared.get, mine).value

    def _stood(self, number: int, kind: str) -> Any:
        return StandIn(self, number) if number >= 0 else self.lent[-1 - number]

    def _number(self, value: Any) -> int | None:
        """Of what the program holds 0 and above; of functions that it may call below 0."""
        if type(value) is StandIn:
            return value._number
        if not callable(value):
            return None
        if id(value) not in self.lent_numbers:
            self.lent_numbers[id(value)] = -1 - len(self.lent)
            self.lent.append(value)  # kept, so that no other gets its id
        return self.lent_numbers[id(value)]

    def prepare(self, preamble: str, setup: str, sources: Sequence[str], entry_point: str | None) -> None:
        """Defines what the tests use: what the preamble defines, else what the program does, `candidate` always so.

        setup: code that may use the program, run before the tests.
        """
        exec(compile(preamble, "preamble.py", "exec"), self.names)
        self.shared = {
            name: value
            for name, value in self.names.items()
            if isinstance(value, type) and value.__module__ == self.names["__name__"]
        }
        self.channel.send({"do": "names"})
        self.offered = dict(self.channel.receive().get("names", {}))
        if entry_point is not None:
            self.names["candidate"] = self.names[entry_point] = self.ask("lookup", entry_point)
        written = "\n".join((setup, *sources))
        # Modules of Python that the tests use, as `math` in `math.isclose`: where they leave the import to the program,
        # it must not put a `math` of its own in their place.
        used = {node.value for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Attribute)}
        modules = {node.id for node in used if isinstance(node, ast.Name)} & sys.stdlib_module_names
        for name in self._wanted(written, entry_point):
            self.names[name] = importlib.import_module(name) if name in modules else self.found(name)
        sys.modules["solution"] = _module(self)
        sys.modules["pytest"] = pytest_module.module()
        sys.modules["numpy"] = numpy_module.module()
        exec(compile(setup, "setup.py", "exec"), self.names)

    def _wanted(self, written: str, entry_point: str | None) -> set[str]:
        """Names of the program that stand in the tests. One of Python's own only if no other does: a program may be
        asked for its own `sum`, but must not put an `abs` in the place of the tests'."""
        used = {node.id for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Name)}
        found = used.intersection(self.offered).difference(self.names)
        plain = {name for name in found if not hasattr(builtins, name)}
        return plain if plain or entry_point is not None or "solution" in written else found

    def found(self, name: str) -> Any:
        """What the program calls so."""
        bases = self.offered.get(name)
        return exception_class(bases, self.exceptions) if bases else self.ask("lookup", name)

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
            return _said(error)
        return ""


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # the message is made of something of the program
        return type(error).__name__


def _module(tests: Tests) -> ModuleType:
    """What `from solution import f` finds."""
    module = ModuleType("solution")

    def found(name: str) -> Any:
        if name.startswith("__"):  # the import system looks for some
            raise AttributeError(name)
        return tests.found(name)

    vars(module)["__getattr__"] = found
    return module


def run_tests(tests: dict[str, Any], fd: int, verdicts: int) -> NoReturn:
    """Writes a line of JSON to `verdicts` for each test: empty text, or why it failed. Ends the process.

    tests: `preamble`, `setup` and `tests`, Python code; `entry_point`, the name of the function or null; `all`: whether
    to stop at the first that fails.
    """
    try:
        ours = Tests(Channel(fd))
        failure = ""
        try:
            ours.prepare(tests["preamble"], tests["setup"], tests["tests"], tests["entry_point"])
        except AnswerEnded:
            failure = "the program ended"
        except BaseException as error:
            failure = _said(error)
        for source in tests["tests"]:
            failed = failure or ours.passes(source)
            os.write(verdicts, json.dumps(failed).encode() + b"\n")
            if failed and tests["all"]:
                break
    finally:
        os._exit(0)
