"""Comparison of two formulas in value. math-verify's LaTeX grammar reads them; sympy evaluates them at fixed points.

Formulas that agree at several points without structure are taken for identical (Schwartz-Zippel for polynomials);
this replaces symbolic simplification, whose time has no bound. Callers check `bounds.is_bounded` first.
"""

from functools import lru_cache
from typing import Any

DIGITS = 120
"""Decimal digits of the evaluation: enough to tell 2^{100}\\sqrt{2} from the same plus 1."""
TOLERANCE = 1e-60
"""Relative difference of two values that are taken for equal; exact rationals are compared exactly."""
_POINTS = (
    *("1.7320508", "0.5772157", "2.2360679", "1.2020569"),
    *("3.3598857", "0.9159656", "4.6692016", "1.3063778"),
)


def equal_in_value(left: str, right: str) -> bool:
    """Whether two canonical formulas have the same variables and the same value wherever both are looked at."""
    first, second = parse(left), parse(right)
    if first is None or second is None or names(first) != names(second):
        return False
    pairs = [(value_at(first, shift), value_at(second, shift)) for shift in range(4 if names(first) else 1)]
    if not all(_close(a, b) for a, b in pairs[:3]):
        return False
    # Where either leaves the real numbers, branches of roots and logarithms differ.
    return all(a is None or b is None or not (a.is_real and b.is_real) or _close(a, b) for a, b in pairs[3:])


def ratio(left: str, right: str) -> Any | None:
    """The constant that one formula is of the other, exact where it is rational; None where there is none.

    Two equations `= 0` are the same where there is one.
    """
    first, second = parse(left), parse(right)
    if first is None or second is None or not names(first) or names(first) != names(second):
        return None
    values: list[tuple[Any, Any]] = [(value_at(first, shift), value_at(second, shift)) for shift in range(3)]
    if any(not a or not b for a, b in values):
        return None
    constant = values[0][0] / values[0][1]
    if not all(_close(a, constant * b) for a, b in values):
        return None
    nearest = round(constant) if constant.is_real else constant
    return nearest if _close(constant, nearest) else constant


@lru_cache(maxsize=4096)
def parse(text: str) -> Any | None:
    """The sympy expression of a formula; None where the grammar does not know it or it is no single value."""
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = ConversionConfig(lowercase_symbols=False)
    try:
        expression = latex2sympy(text, is_real=False, normalization_config=None, conversion_config=config)
    except Exception:  # the parser reports bad LaTeX, which the model wrote, by the bare class
        return None
    if not isinstance(expression, sympy.Expr):
        return None
    decimals = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    return expression.xreplace(decimals)


def names(expression: Any) -> list[str]:
    """Names of the variables, sorted; i is the imaginary unit and no variable."""
    return sorted(symbol.name for symbol in expression.free_symbols if symbol.name != "i")


def value_at(expression: Any, shift: int) -> Any | None:
    """The value where the k-th variable is the (k + shift)-th point (negated for shift 3); None if it has none."""
    import sympy

    known = names(expression)
    sign = -1 if shift == 3 else 1
    values = {
        symbol: sympy.I
        if symbol.name == "i"
        else sign * sympy.Float(_POINTS[(known.index(symbol.name) + shift) % len(_POINTS)], DIGITS)
        for symbol in expression.free_symbols
    }
    try:
        value = expression.subs(values).doit()
        value = value if value.is_Rational else value.evalf(DIGITS)
    except (ArithmeticError, ValueError, TypeError, NotImplementedError, RecursionError, AttributeError):
        return None
    return value if value.is_number and value.is_finite else None


def _close(a: Any | None, b: Any | None) -> bool:
    """Equal to a relative tolerance; a value that does not exist equals nothing."""
    if a is None or b is None:
        return False
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    return bool(abs(a - b) <= TOLERANCE * max(1, abs(a), abs(b)))
