"""What `import numpy` finds in tests, on a machine that has it as well: the little that EvalPlus's tests use of it.

Standard library only: this runs inside the sandbox.
"""

import math
from types import ModuleType
from typing import Any


class ndarray:
    """No value is one here: a program without numpy returns none."""


class float32(float):
    """No value is one here."""


def allclose(actual: Any, desired: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether two numbers, or lists of the same lengths, are |actual - desired| <= atol + rtol |desired| everywhere.

    Unlike numpy's it spreads nothing: an empty list is near to no other.

    Raises:
        TypeError: something is no number.
    """
    if isinstance(desired, (list, tuple)):
        return (
            isinstance(actual, (list, tuple))
            and len(actual) == len(desired)
            and all(allclose(*pair, rtol, atol) for pair in zip(actual, desired, strict=True))
        )
    if not all(isinstance(each, (int, float, complex)) for each in (actual, desired)):
        raise TypeError(f"allclose of {type(actual).__name__} and {type(desired).__name__}")
    if actual == desired:
        return True
    return bool(abs(actual - desired) <= atol + rtol * abs(desired) < math.inf)


def module() -> ModuleType:
    """The module that `import numpy` finds."""
    made = ModuleType("numpy")
    vars(made).update(
        ndarray=ndarray,
        float32=float32,
        float64=float,
        allclose=allclose,
        isclose=allclose,
        inf=math.inf,
        nan=math.nan,
        pi=math.pi,
    )
    return made
