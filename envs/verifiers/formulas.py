"""Compares two formulas by their values at fixed points.

math-verify's LaTeX grammar reads the formulas; sympy evaluates them. Formulas that agree at several points
without structure count as identical (Schwartz-Zippel for polynomials). Symbolic simplification is not used,
since its time has no bound. Callers check `formula_size.is_bounded` first.
"""

from functools import lru_cache
from typing import Any

DIGITS = 120
r"""Decimal digits of the evaluation; they distinguish 2^{100}\sqrt{2} from the same number plus 1."""
TOLERANCE = 1e-60
"""Maximum relative difference of equal values; exact rationals are compared exactly."""
_POINTS = (*("1.7320508", "0.5772157", "2.2360679", "1.2020569"), *("3.3598857", "0.9159656", "4.6692016", "1.3063778"))
"""Values of the variables."""


def equal_in_value(left: str, right: str) -> bool:
    """Whether two canonical formulas have the same variables and the same values."""
    first, second = parse_formula(left), parse_formula(right)
    if first is None or second is None or variable_names(first) != variable_names(second):
        return False
    pairs = [(value_at(first, shift), value_at(second, shift)) for shift in range(4 if variable_names(first) else 1)]
    if not all(_is_close(a, b) for a, b in pairs[:3]):
        return False
    # Branches of roots and logarithms differ outside the real numbers, so only real values are compared.
    return all(a is None or b is None or not (a.is_real and b.is_real) or _is_close(a, b) for a, b in pairs[3:])


def constant_ratio(left: str, right: str) -> Any | None:
    """Returns the constant ratio of two formulas, or None if the ratio varies.

    The ratio is exact if it is rational. Two equations `= 0` are the same if their ratio is constant.
    """
    first, second = parse_formula(left), parse_formula(right)
    if first is None or second is None or not variable_names(first) or variable_names(first) != variable_names(second):
        return None
    values: list[tuple[Any, Any]] = [(value_at(first, shift), value_at(second, shift)) for shift in range(3)]
    if any(not a or not b for a, b in values):
        return None
    constant = values[0][0] / values[0][1]
    if not all(_is_close(a, constant * b) for a, b in values):
        return None
    nearest = round(constant) if constant.is_real else constant
    return nearest if _is_close(constant, nearest) else constant


@lru_cache(maxsize=4096)
def parse_formula(text: str) -> Any | None:
    """Parses a formula to a sympy expression.

    The result is None if the grammar cannot read the formula, or if the formula is not a single value.
    """
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = ConversionConfig(lowercase_symbols=False)
    try:
        expression = latex2sympy(text, is_real=False, normalization_config=None, conversion_config=config)
    except Exception:  # the parser raises the bare class for invalid LaTeX
        return None
    if not isinstance(expression, sympy.Expr):
        return None
    decimals = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    return expression.xreplace(decimals)


def variable_names(expression: Any) -> list[str]:
    """Returns the sorted names of the variables; i is the imaginary unit."""
    return sorted(symbol.name for symbol in expression.free_symbols if symbol.name != "i")


def value_at(expression: Any, shift: int) -> Any | None:
    """Returns the value of an expression at shifted points, or None without a value.

    The variable k has the point k + shift; the points are negative for shift 3.
    """
    import sympy

    sorted_names = variable_names(expression)
    sign = -1 if shift == 3 else 1
    values = {
        symbol: sympy.I
        if symbol.name == "i"
        else sign * sympy.Float(_POINTS[(sorted_names.index(symbol.name) + shift) % len(_POINTS)], DIGITS)
        for symbol in expression.free_symbols
    }
    try:
        value = expression.subs(values).doit()
        value = value if value.is_Rational else value.evalf(DIGITS)
    except (ArithmeticError, ValueError, TypeError, NotImplementedError, RecursionError, AttributeError):
        return None
    return value if value.is_number and value.is_finite else None


def _is_close(a: Any | None, b: Any | None) -> bool:
    """Whether two values are equal within the tolerance; a missing value equals nothing."""
    if a is None or b is None:
        return False
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    return bool(abs(a - b) <= TOLERANCE * max(1, abs(a), abs(b)))
