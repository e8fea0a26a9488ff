"""Process of the tests, which runs test code against a program in another process.

    tests ── "call f with these" ──▶ program     a socket; values cross as data (`envs.sandbox.assertions.value_codec`)
          ◀── "call your function" ─             if the tests passed a function, before the reply
          ◀── "f returned this" ────             the program never sends a verdict
      │
      └─▶ grader: a line for each test

The program cannot touch this process. The program's process (`envs.sandbox.assertions.program_process`) is
forked before the tests are read, so that its memory never holds them. If that process ends, with any exit code,
the remaining tests fail. When the program changes a list that it was called with, the list changes here too, as
in one process. Standard library only, because the module runs inside the sandbox.
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
from envs.sandbox.assertions.channel import Channel, PeerExited
from envs.sandbox.assertions.exceptions import build_exception, class_lineage, resolve_exception_class
from envs.sandbox.assertions.remote_proxy import RemoteIterator, RemoteProxy
from envs.sandbox.assertions.value_codec import ValueDecoder, encode_value


class TestRunner:
    """Runs tests in a namespace where names of the program are proxies.

    shared_classes: classes of the preamble, which the program's process also defines; only objects of these
    classes are rebuilt here from the attributes that the program sends. program_names: the program's names; an
    exception class has the lineage of its class. lent_functions: functions that the program may call.
    """

    __test__ = False

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.namespace: dict[str, Any] = {"__name__": "tests"}
        self.shared_classes: dict[str, type] = {}
        self.program_names: dict[str, Any] = {}
        self.exception_classes: dict[str, type] = {}
        self.lent_functions: list[Any] = []
        self.function_handles: dict[int, int] = {}
        self.iterators: dict[int, RemoteIterator] = {}

    def request(self, operation: str, target: Any, *arguments: Any, **keywords: Any) -> Any:
        """Sends a request to the program; returns the result.

        Meanwhile the program may call functions of the tests.

        Raises:
            UntransferableValue: a value cannot cross.
            PeerExited: the program's process has ended.
            Exception: the program's own exception.
        """
        text, originals = encode_value((target, list(arguments), keywords), self._handle_of)
        self.channel.send({"do": operation, "given": text})
        while "call" in (reply := self.channel.receive()):
            try:  # the program calls a function that the tests passed to it
                positional, by_name = self._decode(reply["given"])
                value = self.lent_functions[-1 - int(reply["call"])](*positional, **by_name)
                response: dict[str, Any] = {"value": encode_value(value, self._handle_of)[0]}
            except Exception as error:
                response = {"raised": class_lineage(type(error)), "message": str(error)[:1000]}
            self.channel.send(response)
        if "raised" in reply:
            original = RemoteProxy(self, int(reply["object"]))
            raise build_exception(reply["raised"], str(reply["message"]), self.exception_classes, original)
        results = self._decode(reply.get("value", ""), originals)
        if not isinstance(results, tuple) or len(results) != 3:
            raise PeerExited("no reply")
        return results[0]

    def _decode(self, text: str, originals: dict[int, Any] | None = None) -> Any:
        return ValueDecoder(text, self._resolve_handle, self.shared_classes.get, originals).value

    def _resolve_handle(self, number: int, kind: str) -> Any:
        return RemoteProxy(self, number) if number >= 0 else self.lent_functions[-1 - number]

    def _handle_of(self, value: Any) -> int | None:
        """Returns a value's handle, or None if the value has none.

        Handles of the program's objects are 0 and above, handles of the tests' functions are negative.
        """
        if type(value) is RemoteProxy:
            return value._handle
        if not callable(value):
            return None
        if id(value) not in self.function_handles:
            self.function_handles[id(value)] = -1 - len(self.lent_functions)
            self.lent_functions.append(value)  # keeps the function alive, so that no other gets its id
        return self.function_handles[id(value)]

    def prepare(self, preamble: str, setup: str, sources: Sequence[str], entry_point: str | None) -> None:
        """Defines the names that the tests use.

        Names of the preamble come first, then names of the program; `candidate` always is the program's.

        setup: code that may use the program, run before the tests.
        """
        exec(compile(preamble, "preamble.py", "exec"), self.namespace)
        self.shared_classes = {
            name: value
            for name, value in self.namespace.items()
            if isinstance(value, type) and value.__module__ == self.namespace["__name__"]
        }
        self.channel.send({"do": "names"})
        self.program_names = dict(self.channel.receive().get("names", {}))
        if entry_point is not None:
            self.namespace["candidate"] = self.namespace[entry_point] = self.request("lookup", entry_point)
        test_source = "\n".join((setup, *sources))
        # Modules of Python that the tests use, such as `math` in `math.isclose`, are imported here. A program that
        # the tests leave the import to must not replace `math` by an object of its own.
        attribute_owners = {node.value for node in ast.walk(ast.parse(test_source)) if isinstance(node, ast.Attribute)}
        modules = {node.id for node in attribute_owners if isinstance(node, ast.Name)} & sys.stdlib_module_names
        for name in self._find_used_names(test_source, entry_point):
            self.namespace[name] = importlib.import_module(name) if name in modules else self.lookup_name(name)
        sys.modules["solution"] = _solution_module(self)
        sys.modules["pytest"] = pytest_module.build_module()
        sys.modules["numpy"] = numpy_module.build_module()
        exec(compile(setup, "setup.py", "exec"), self.namespace)

    def _find_used_names(self, test_source: str, entry_point: str | None) -> set[str]:
        """Returns the program's names that the tests use.

        A name of Python's builtins counts only if the tests use no other name of the program. A problem may ask
        for a function `sum`, but a program must not replace the tests' `abs`.
        """
        test_names = {node.id for node in ast.walk(ast.parse(test_source)) if isinstance(node, ast.Name)}
        program_names = test_names.intersection(self.program_names).difference(self.namespace)
        plain = {name for name in program_names if not hasattr(builtins, name)}
        return plain if plain or entry_point is not None or "solution" in test_source else program_names

    def lookup_name(self, name: str) -> Any:
        """Returns the program's object of this name: a proxy, a value or an exception class."""
        bases = self.program_names.get(name)
        return resolve_exception_class(bases, self.exception_classes) if bases else self.request("lookup", name)

    def run_test(self, source: str) -> str:
        """Runs a test; returns an empty text if it passes, otherwise the reason."""
        before = set(self.namespace)
        try:
            exec(compile(source, "tests.py", "exec"), self.namespace)
            for test in pytest_module.collect_tests(
                self.namespace, [name for name in self.namespace if name not in before]
            ):
                test()
        except PeerExited:
            return "the program ended"
        except BaseException as error:
            return _describe_error(error)
        return ""


def _describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # the program's objects may fail in the message
        return type(error).__name__


def _solution_module(tests: TestRunner) -> ModuleType:
    """Builds the module `solution`, whose attributes are the program's names."""
    module = ModuleType("solution")

    def lookup_name(name: str) -> Any:
        if name.startswith("__"):  # the import system reads some of these names
            raise AttributeError(name)
        return tests.lookup_name(name)

    vars(module)["__getattr__"] = lookup_name
    return module


def run_tests(tests: dict[str, Any], fd: int, verdicts: int) -> NoReturn:
    """Runs tests, writes a line of JSON for each, and ends the process.

    A line holds an empty text if the test passed, otherwise the reason.

    tests: `preamble`, `setup` and `tests`, Python code; `entry_point`, the name of the function or null; `all`:
    whether to stop at the first failure. fd: channel to the program's process. verdicts: descriptor for the
    lines.
    """
    try:
        runner = TestRunner(Channel(fd))
        failure = ""
        try:
            runner.prepare(tests["preamble"], tests["setup"], tests["tests"], tests["entry_point"])
        except PeerExited:
            failure = "the program ended"
        except BaseException as error:
            failure = _describe_error(error)
        for source in tests["tests"]:
            reason = failure or runner.run_test(source)
            os.write(verdicts, json.dumps(reason).encode() + b"\n")
            if reason and tests["all"]:
                break
    finally:
        os._exit(0)
