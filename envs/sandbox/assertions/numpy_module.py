"""Substitute for `numpy` in tests, with the few functions that EvalPlus's tests use.

`import numpy` finds the substitute on every machine, also where numpy is installed. Standard library only,
because the module runs inside the sandbox.
"""

import math
from types import ModuleType
from typing import Any


class ndarray:
    """Array type without instances, because a program without numpy returns no array."""


class float32(float):
    """Number type without instances."""


def allclose(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether two numbers, or two lists of equal lengths, are close everywhere.

    Close means |actual - expected| <= atol + rtol |expected|. Unlike numpy's function, this one does not
    broadcast: an empty list is close only to an empty list.

    Raises:
        TypeError: a value is not a number.
    """
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(actual, (list, tuple))
            and len(actual) == len(expected)
            and all(allclose(*pair, rtol, atol) for pair in zip(actual, expected, strict=True))
        )
    if not all(isinstance(each, (int, float, complex)) for each in (actual, expected)):
        raise TypeError(f"allclose of {type(actual).__name__} and {type(expected).__name__}")
    if actual == expected:
        return True
    return bool(abs(actual - expected) <= atol + rtol * abs(expected) < math.inf)


def build_module() -> ModuleType:
    """Builds the module that `import numpy` finds."""
    module = ModuleType("numpy")
    vars(module).update(
        ndarray=ndarray,
        float32=float32,
        float64=float,
        allclose=allclose,
        isclose=allclose,
        inf=math.inf,
        nan=math.nan,
        pi=math.pi,
    )
    return module
