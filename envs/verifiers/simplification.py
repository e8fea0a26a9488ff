r"""Checks that a number is simplified as far as the reference answer.

`2\sqrt{2}` is simplified, `\sqrt{8}` is not. docs/rewards.md calls a simplified number "worked out". If the
reference answer is a number but not a fraction (`2\sqrt{2}`, `\frac{\pi}{4}`, `2^{100}-1`), a text may leave no
more operations to do than the reference answer. The operations are counted in the text, before anything is
evaluated: each sum or difference, root, power and function, and each product of two plain numbers counts one.
Fractions, radicals and powers must be in lowest terms too, unless the reference answer's are not. The module
does not use sympy.
"""

import math
import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|[a-zA-Z]{3,}|[a-zA-Z]|\S")
_TIMES = ("*", "\\cdot", "\\times")
_OVER = ("/", "\\div")
_FUNCTION = re.compile(r"\\?(?:(?:arc)?(?:sin|cos|tan)h?|sec|csc|cot|log|ln|lg|exp)")
_BRACKETS = {"(": ")", "{": "}", "[": "]", "|": "|"}
_LARGEST_FACTOR = 1000
"""Largest factor that is tried on a radicand or the base of a power."""


@dataclass(frozen=True)
class ExpressionForm:
    """Operations that an expression leaves to do, and its numeric factor.

    operations: number of operations left.
    is_reduced: whether all fractions, radicals and powers are in lowest terms.
    numerator, denominator: whole numbers by which the expression is multiplied and divided.
    radicand: product of the numbers under its square roots.
    is_number: whether the expression is a number and nothing else.
    """

    operations: int = 0
    is_reduced: bool = True
    numerator: int = 1
    denominator: int = 1
    radicand: int = 1
    is_number: bool = False


def is_simplified(final_answer: str, reference: str) -> bool:
    """Whether a text leaves no more operations to do than the reference answer.

    Both texts are canonical and have the same value. A reference answer in an unknown notation requires nothing.
    """
    reference_form = read_form(reference)
    if reference_form is None:
        return True
    form = read_form(final_answer)
    return (
        form is not None
        and form.operations <= reference_form.operations
        and (form.is_reduced or not reference_form.is_reduced)
    )


def read_form(text: str) -> ExpressionForm | None:
    """Returns the form of a canonical formula; None if the formula cannot be read."""
    reader = _FormReader(_TOKEN.findall(text))
    try:
        form = reader.read_sum()
    except (ValueError, RecursionError):
        return None
    return None if reader.peek_token() else form


class _FormReader:
    """Recursive-descent reader of the tokens of one formula.

    Every method raises ValueError for an unknown token.
    """

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek_token(self) -> str:
        """Returns the current token; empty at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def next_token(self) -> str:
        """Returns the current token and advances the position."""
        token = self.peek_token()
        self.position += 1
        return token

    def read_sum(self) -> ExpressionForm:
        terms = [self.read_signed_term()]
        while self.peek_token() in ("+", "-"):
            terms.append(self.read_signed_term())
        if len(terms) == 1:
            return terms[0]
        operations = sum(term.operations for term in terms) + len(terms) - 1
        common = math.gcd(*(term.numerator for term in terms))
        return ExpressionForm(operations, all(term.is_reduced for term in terms), numerator=common)

    def read_signed_term(self) -> ExpressionForm:
        if self.peek_token() in ("+", "-"):
            self.next_token()
        return self.read_term()

    def read_term(self) -> ExpressionForm:
        above = [self.read_factor()]
        below: list[ExpressionForm] = []
        while self.peek_token() not in ("", "+", "-", ",", *_BRACKETS.values()):
            over = self.peek_token() in _OVER
            if over or self.peek_token() in _TIMES:
                self.next_token()
            (below if over else above).append(self.read_factor())
        return _quotient(_product(above), _product(below)) if below else _product(above)

    def read_factor(self) -> ExpressionForm:
        base = self.read_argument()
        while self.peek_token() in ("^", "!"):
            if self.next_token() == "!":
                base = ExpressionForm(base.operations + 1, base.is_reduced)
                continue
            exponent = self.read_argument()
            is_reduced = base.is_reduced and exponent.is_reduced
            if base.is_number and exponent.is_number and base.denominator == 1 and exponent.denominator == 1:
                is_reduced = is_reduced and exponent.numerator > 1 and not _is_power(base.numerator)
            base = ExpressionForm(base.operations + exponent.operations + 1, is_reduced)
        return base

    def read_argument(self) -> ExpressionForm:
        r"""Reads the argument of a `^`, `_`, `\frac` or `\sqrt`.

        The argument is a group, or one sign, digit or letter.
        """
        if self.peek_token() == "-":
            self.next_token()
        return self.read_base()

    def read_base(self) -> ExpressionForm:
        token = self.next_token()
        if token[:1].isdigit() or token[:1] == ".":
            return (
                ExpressionForm(numerator=int(token), is_number=True)
                if token.isdigit()
                else ExpressionForm(is_number=True)
            )
        if token in _BRACKETS:
            inner = self.read_sum()
            if self.next_token() != _BRACKETS[token]:
                raise ValueError("a bracket is not closed")
            return ExpressionForm(inner.operations + 1, inner.is_reduced) if token == "|" else inner
        if token == "\\frac":
            return _quotient(self.read_argument(), self.read_argument())
        if token in ("\\sqrt", "sqrt"):
            return self.read_root()
        if token == "\\binom":
            return ExpressionForm(1 + self.read_argument().operations + self.read_argument().operations)
        if _FUNCTION.fullmatch(token):
            return self.read_function()
        if re.fullmatch(r"\\?[a-zA-Z]+", token) and token not in (*_TIMES, *_OVER):
            return ExpressionForm()
        raise ValueError(token)

    def read_root(self) -> ExpressionForm:
        degree = 2
        if self.peek_token() == "[":
            degree = self.read_base().numerator
        under = self.read_argument()
        is_reduced = under.is_reduced and not (under.is_number and _has_power(under.numerator, max(2, degree)))
        return ExpressionForm(under.operations + 1, is_reduced, radicand=under.numerator if degree == 2 else 1)

    def read_function(self) -> ExpressionForm:
        extra = 0
        while self.peek_token() in ("_", "^"):
            extra += self.next_token() == "^"
            self.read_argument()
        inner = self.read_factor()
        return ExpressionForm(inner.operations + 1 + extra, inner.is_reduced)


def _product(factors: list[ExpressionForm]) -> ExpressionForm:
    """Returns the form of a product."""
    numbers = sum(factor.is_number for factor in factors)
    return ExpressionForm(
        sum(factor.operations for factor in factors) + max(0, numbers - 1),
        all(factor.is_reduced for factor in factors),
        math.prod(factor.numerator for factor in factors),
        math.prod(factor.denominator for factor in factors),
        math.prod(factor.radicand for factor in factors),
        numbers == len(factors),
    )


def _quotient(above: ExpressionForm, below: ExpressionForm) -> ExpressionForm:
    """Returns the form of a quotient."""
    numerator, denominator = above.numerator * below.denominator, below.numerator * above.denominator
    is_reduced = above.is_reduced and below.is_reduced and math.gcd(numerator, denominator) == 1
    is_reduced = is_reduced and not (below.is_number and denominator == 1) and math.gcd(numerator, below.radicand) == 1
    operations, radicand, is_number = (
        above.operations + below.operations,
        above.radicand * below.radicand,
        above.is_number and below.is_number,
    )
    return ExpressionForm(operations, is_reduced, numerator, denominator, radicand, is_number)


def _has_power(number: int, degree: int) -> bool:
    """Whether a factor can be taken out of the root of a number.

    The root of 0 and 1 itself can be taken.
    """
    if number < 2:
        return True
    powers = (factor**degree for factor in range(2, _LARGEST_FACTOR))
    return any(number % power == 0 for power in powers if power <= number)


def _is_power(number: int) -> bool:
    """Whether a whole number is a power of a smaller one; 0 and 1 are."""
    if number < 2:
        return True
    return any(
        factor**degree == number
        for factor in range(2, _LARGEST_FACTOR)
        if factor * factor <= number
        for degree in range(2, number.bit_length() + 1)
        if factor**degree <= number
    )
