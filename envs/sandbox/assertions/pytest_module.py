"""What `import pytest` finds in tests: the part of pytest's interface that they use, and how tests are found.

`raises`, `approx`, `fixture`, `mark.parametrize`, `param`, `fail` and `skip`; other marks do nothing. Standard library
only: this runs inside the sandbox.
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

RELATIVE, ABSOLUTE = 1e-6, 1e-12
PARAMETERS, FIXTURE = "_pytest_parameters", "_pytest_fixture"
SCALARS = (int, float, complex)


class Skipped(Exception):
    """A test that says it should not run; it has not failed."""


class Raises:
    """The context of `raises`; `value` is the exception."""

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


def raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Raises:
    """A context, or with a function and its arguments its call."""
    context = Raises(expected, match)
    if call:
        with context:
            call[0](*call[1:], **named)
    return context


class Approx:
    """Equals numbers near to its own, and lists, tuples and dictionaries of them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected, self.relative, self.absolute = expected, rel, abs

    def __eq__(self, actual: Any) -> bool:
        return self._near(actual, self.expected)

    def _near(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and actual.keys() == expected.keys()
                and all(self._near(actual[key], expected[key]) for key in expected)
            )
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(actual) == len(expected)
                and all(itertools.starmap(self._near, zip(actual, expected, strict=True)))
            )
        if not isinstance(expected, SCALARS) or isinstance(expected, bool) or not isinstance(actual, SCALARS):
            return bool(actual == expected)
        if actual == expected:
            return True
        default = 0.0 if self.relative is None and self.absolute is not None else RELATIVE
        relative = default if self.relative is None else self.relative
        absolute = ABSOLUTE if self.absolute is None else self.absolute
        tolerance = max(relative * abs(expected), absolute)
        return tolerance != float("inf") and abs(actual - expected) <= tolerance

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"


class _Mark:
    def parametrize(self, names: Any, values: Any, **more: Any) -> Callable[[Any], Any]:
        """names: `"a, b"` or a list of names; values: one for each case, with several names a tuple each."""
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(test: Any) -> Any:
            cases = []
            for value in values:
                case = value.values if isinstance(value, Param) else (value,) if len(keys) == 1 else value
                cases.append(dict(zip(keys, case, strict=True)))
            vars_of(test).setdefault(PARAMETERS, []).append(cases)
            return test

        return decorate

    def __getattr__(self, name: str) -> Any:
        return _does_nothing


class Param:
    """A case of `parametrize` with a name or marks of its own."""

    def __init__(self, *values: Any, **more: Any) -> None:
        self.values = values


def _does_nothing(*given: Any, **named: Any) -> Any:
    """A mark with or without arguments."""
    return given[0] if len(given) == 1 and not named and callable(given[0]) else lambda test: test


def vars_of(function: Any) -> dict[str, Any]:
    return function.__dict__  # type: ignore[no-any-return]


def fixture(function: Any = None, **more: Any) -> Any:
    """Marks a function whose result tests ask for by its name."""
    if function is None:
        return lambda decorated: fixture(decorated, **more)
    vars_of(function)[FIXTURE] = True
    return function


def fail(reason: str = "", **more: Any) -> None:
    raise AssertionError(reason)


def skip(reason: str = "", **more: Any) -> None:
    raise Skipped(reason)


def module() -> ModuleType:
    """The module that `import pytest` finds."""
    made = ModuleType("pytest")
    vars(made).update(
        raises=raises,
        approx=Approx,
        fixture=fixture,
        mark=_Mark(),
        param=Param,
        fail=fail,
        skip=skip,
        main=_does_nothing,
    )
    return made


def found_tests(names: Mapping[str, Any], new: Iterator[str] | list[str]) -> list[Callable[[], None]]:
    """What pytest would run of the names that a test file has defined: functions, methods and `unittest` classes."""
    fixtures = {
        name: value
        for name, value in names.items()
        if isinstance(value, FunctionType) and FIXTURE in vars_of(value)
    }
    found: list[Callable[[], None]] = []
    for name in new:
        value = names[name]
        if isinstance(value, FunctionType) and name.startswith("test"):
            found.append(partial(_run, value, value, fixtures))
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            found.append(partial(_run_case, value))
        elif isinstance(value, type) and name.startswith("Test"):
            found += [
                partial(_run_method, value, each, fixtures) for each in vars(value) if each.startswith("test")
            ]
    return found


def _run(test: Any, function: Any, fixtures: Mapping[str, Any]) -> None:
    """Once for each of its function's cases."""
    for cases in itertools.product(*vars_of(function).get(PARAMETERS, [])):
        given = {key: value for case in cases for key, value in case.items()}
        with contextlib.ExitStack() as ends, contextlib.suppress(Skipped):
            test(**_filled(test, given, fixtures, ends))


def _filled(function: Any, given: dict[str, Any], fixtures: Mapping[str, Any], ends: Any) -> dict[str, Any]:
    """The arguments of a test or a fixture: its case's, and what its fixtures return."""
    wanted = [
        name for name, value in inspect.signature(function).parameters.items() if value.default is value.empty
    ]
    for name in wanted:
        if name not in given:
            made = fixtures[name](**_filled(fixtures[name], {}, fixtures, ends))
            given[name] = ends.enter_context(_once(made)) if inspect.isgenerator(made) else made
    return {name: given[name] for name in inspect.signature(function).parameters if name in given}


@contextlib.contextmanager
def _once(generator: Iterator[Any]) -> Iterator[Any]:
    """A fixture that yields: what stands behind its yield runs when the test has ended."""
    yield next(generator)
    next(generator, None)


def _run_case(case: Any) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    for _, why in (*result.failures, *result.errors):
        raise AssertionError(why.strip().splitlines()[-1])


def _run_method(owner: Any, name: str, fixtures: Mapping[str, Any]) -> None:
    held = owner()
    before = getattr(held, "setup_method", None)
    if before is not None:
        before(*[None] * len(inspect.signature(before).parameters))
    bound = getattr(held, name)
    _run(bound, bound.__func__, fixtures)
