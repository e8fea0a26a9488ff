"""Substitute for `pytest` in tests, and the collection of tests.

It has `raises`, `approx`, `fixture`, `mark.parametrize`, `param`, `fail` and `skip`; other marks do nothing.
Standard library only, because the module runs inside the sandbox.
"""

import contextlib
import inspect
import itertools
import re
import unittest
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

DEFAULT_RELATIVE, DEFAULT_ABSOLUTE = 1e-6, 1e-12
PARAMETERS, FIXTURE = "_pytest_parameters", "_pytest_fixture"
NUMBER_TYPES = (int, float, complex)


class SkipTest(Exception):
    """Request of a test to be skipped, which is no failure."""


class Raises:
    """Context of `raises`; `value` is the exception."""

    def __init__(self, expected: Any, match: str | None = None) -> None:
        self.expected, self.match = expected, match
        self.value: Any = None

    @property
    def type(self) -> Any:
        return type(self.value)

    def __enter__(self) -> "Raises":
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not issubclass(kind, self.expected):
            return False
        self.value = value
        if self.match is not None and not re.search(self.match, str(value)):
            raise AssertionError(f"{str(value)!r} does not match {self.match!r}")
        return True


def raises(expected: Any, *call: Any, match: str | None = None, **keywords: Any) -> Raises:
    """Returns a context that expects an exception, or calls a function in that context."""
    context = Raises(expected, match)
    if call:
        with context:
            call[0](*call[1:], **keywords)
    return context


class Approx:
    """Value that equals close numbers, and lists, tuples and dictionaries of close numbers."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected, self.relative, self.absolute = expected, rel, abs

    def __eq__(self, actual: Any) -> bool:
        return self._is_close(actual, self.expected)

    def _is_close(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and actual.keys() == expected.keys()
                and all(self._is_close(actual[key], expected[key]) for key in expected)
            )
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(actual) == len(expected)
                and all(itertools.starmap(self._is_close, zip(actual, expected, strict=True)))
            )
        if not isinstance(expected, NUMBER_TYPES) or isinstance(expected, bool) or not isinstance(actual, NUMBER_TYPES):
            return bool(actual == expected)
        if actual == expected:
            return True
        default = 0.0 if self.relative is None and self.absolute is not None else DEFAULT_RELATIVE
        relative = default if self.relative is None else self.relative
        absolute = DEFAULT_ABSOLUTE if self.absolute is None else self.absolute
        tolerance = max(relative * abs(expected), absolute)
        return tolerance != float("inf") and abs(actual - expected) <= tolerance

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"


class _Mark:
    def parametrize(self, names: Any, values: Any, **more: Any) -> Callable[[Any], Any]:
        """Adds cases to a test.

        names: `"a, b"` or a list of names. values: one value per case, or a tuple for several names.
        """
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(test: Any) -> Any:
            cases = []
            for value in values:
                case = value.values if isinstance(value, Param) else (value,) if len(keys) == 1 else value
                cases.append(dict(zip(keys, case, strict=True)))
            function_attributes(test).setdefault(PARAMETERS, []).append(cases)
            return test

        return decorate

    def __getattr__(self, name: str) -> Any:
        return _ignore_mark


class Param:
    """Case of `parametrize` with a name or marks of its own."""

    def __init__(self, *values: Any, **more: Any) -> None:
        self.values = values


def _ignore_mark(*arguments: Any, **keywords: Any) -> Any:
    """Applies a mark with or without arguments, which leaves the test unchanged."""
    return arguments[0] if len(arguments) == 1 and not keywords and callable(arguments[0]) else lambda test: test


def function_attributes(function: Any) -> dict[str, Any]:
    return function.__dict__  # type: ignore[no-any-return]


def fixture(function: Any = None, **more: Any) -> Any:
    """Marks a function as a fixture, whose result tests receive by its name."""
    if function is None:
        return lambda test_fixture: fixture(test_fixture, **more)
    function_attributes(function)[FIXTURE] = True
    return function


def fail(reason: str = "", **more: Any) -> None:
    raise AssertionError(reason)


def skip(reason: str = "", **more: Any) -> None:
    raise SkipTest(reason)


def build_module() -> ModuleType:
    """Builds the module that `import pytest` finds."""
    module = ModuleType("pytest")
    vars(module).update(
        raises=raises,
        approx=Approx,
        fixture=fixture,
        mark=_Mark(),
        param=Param,
        fail=fail,
        skip=skip,
        main=_ignore_mark,
    )
    return module


def collect_tests(names: Mapping[str, Any], new: Iterator[str] | list[str]) -> list[Callable[[], None]]:
    """Collects the tests among names as pytest does: functions, methods and `unittest` classes.

    new: the names that a test file has defined, in order.
    """
    fixtures = {
        name: value
        for name, value in names.items()
        if isinstance(value, FunctionType) and FIXTURE in function_attributes(value)
    }
    tests: list[Callable[[], None]] = []
    for name in new:
        value = names[name]
        if isinstance(value, FunctionType) and name.startswith("test"):
            tests.append(partial(_run_cases, value, value, fixtures))
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            tests.append(partial(_run_test_case, value))
        elif isinstance(value, type) and name.startswith("Test"):
            tests += [partial(_run_method, value, each, fixtures) for each in vars(value) if each.startswith("test")]
    return tests


def _run_cases(test: Any, function: Any, fixtures: Mapping[str, Any]) -> None:
    """Runs a test once for each case of its function."""
    for cases in itertools.product(*function_attributes(function).get(PARAMETERS, [])):
        arguments = {key: value for case in cases for key, value in case.items()}
        with contextlib.ExitStack() as ends, contextlib.suppress(SkipTest):
            test(**_resolve_arguments(test, arguments, fixtures, ends))


def _resolve_arguments(
    function: Any, arguments: dict[str, Any], fixtures: Mapping[str, Any], ends: Any
) -> dict[str, Any]:
    """Returns the arguments of a test or a fixture, from its case and its fixtures."""
    parameters = [
        name for name, value in inspect.signature(function).parameters.items() if value.default is value.empty
    ]
    for name in parameters:
        if name not in arguments:
            value = fixtures[name](**_resolve_arguments(fixtures[name], {}, fixtures, ends))
            arguments[name] = ends.enter_context(_run_yield_fixture(value)) if inspect.isgenerator(value) else value
    return {name: arguments[name] for name in inspect.signature(function).parameters if name in arguments}


@contextlib.contextmanager
def _run_yield_fixture(generator: Iterator[Any]) -> Iterator[Any]:
    """Runs a fixture up to its yield, and the rest when the context ends."""
    yield next(generator)
    next(generator, None)


def _run_test_case(case: Any) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    for _, trace in (*result.failures, *result.errors):
        raise AssertionError(trace.strip().splitlines()[-1])


def _run_method(owner: Any, name: str, fixtures: Mapping[str, Any]) -> None:
    instance = owner()
    setup = getattr(instance, "setup_method", None)
    if setup is not None:
        setup(*[None] * len(inspect.signature(setup).parameters))
    method = getattr(instance, name)
    _run_cases(method, method.__func__, fixtures)
