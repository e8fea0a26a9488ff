"""The check that a number is worked out as far as the gold: `2\\sqrt{2}` is, `\\sqrt{8}` is not.

Where the gold is a number that is no fraction (`2\\sqrt{2}`, `\\frac{\\pi}{4}`, `2^{100}-1`), a text may leave no
more to be done than the gold does. What is left to be done is counted in the text, before anything is evaluated: each
sum or difference, root, power and function, and each product of two plain numbers counts one. Fractions, radicals and
powers must be in lowest terms too, unless the gold's are not. No sympy here.
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
"""A radicand or the base of a power is searched for factors up to this one."""


@dataclass(frozen=True)
class Form:
    """What is left to be done in an expression, and its numeric factor.

    work: operations left. reduced: all its fractions, radicals and powers are in lowest terms.
    top, bottom: the whole numbers that it is multiplied with and divided by. root: what stands under its square roots.
    plain: it is a number and nothing else.
    """

    work: int = 0
    reduced: bool = True
    top: int = 1
    bottom: int = 1
    root: int = 1
    plain: bool = False


def worked_out(given: str, gold: str) -> bool:
    """Whether a text of the gold's value leaves no more to be done than the gold; both are canonical texts.

    A gold in a notation that is not known here asks for nothing.
    """
    wanted = read(gold)
    if wanted is None:
        return True
    form = read(given)
    return form is not None and form.work <= wanted.work and (form.reduced or not wanted.reduced)


def read(text: str) -> Form | None:
    """The form of a canonical formula; None where it cannot be read."""
    reader = _Reader(_TOKEN.findall(text))
    try:
        form = reader.sum()
    except (ValueError, RecursionError):
        return None
    return None if reader.token() else form


class _Reader:
    """Recursive descent over the tokens of one formula. All methods raise ValueError for what they do not know."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def token(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.token()
        self.position += 1
        return token

    def sum(self) -> Form:
        terms = [self.signed_term()]
        while self.token() in ("+", "-"):
            terms.append(self.signed_term())
        if len(terms) == 1:
            return terms[0]
        work = sum(term.work for term in terms) + len(terms) - 1
        common = math.gcd(*(term.top for term in terms))
        return Form(work, all(term.reduced for term in terms), top=common)

    def signed_term(self) -> Form:
        if self.token() in ("+", "-"):
            self.take()
        return self.term()

    def term(self) -> Form:
        above = [self.factor()]
        below: list[Form] = []
        while self.token() not in ("", "+", "-", ",", *_BRACKETS.values()):
            over = self.token() in _OVER
            if over or self.token() in _TIMES:
                self.take()
            (below if over else above).append(self.factor())
        return _quotient(_product(above), _product(below)) if below else _product(above)

    def factor(self) -> Form:
        base = self.argument()
        while self.token() in ("^", "!"):
            if self.take() == "!":
                base = Form(base.work + 1, base.reduced)
                continue
            exponent = self.argument()
            reduced = base.reduced and exponent.reduced
            if base.plain and exponent.plain and base.bottom == 1 and exponent.bottom == 1:
                reduced = reduced and exponent.top > 1 and not _is_power(base.top)
            base = Form(base.work + exponent.work + 1, reduced)
        return base

    def argument(self) -> Form:
        """What follows a `^`, `_`, `\\frac` or `\\sqrt`: a group, or one sign, digit or letter."""
        if self.token() == "-":
            self.take()
        return self.base()

    def base(self) -> Form:
        token = self.take()
        if token[:1].isdigit() or token[:1] == ".":
            return Form(top=int(token), plain=True) if token.isdigit() else Form(plain=True)
        if token in _BRACKETS:
            inner = self.sum()
            if self.take() != _BRACKETS[token]:
                raise ValueError("a bracket is not closed")
            return Form(inner.work + 1, inner.reduced) if token == "|" else inner
        if token == "\\frac":
            return _quotient(self.argument(), self.argument())
        if token in ("\\sqrt", "sqrt"):
            return self.root()
        if token == "\\binom":
            return Form(1 + self.argument().work + self.argument().work)
        if _FUNCTION.fullmatch(token):
            return self.function()
        if re.fullmatch(r"\\?[a-zA-Z]+", token) and token not in (*_TIMES, *_OVER):
            return Form()
        raise ValueError(token)

    def root(self) -> Form:
        degree = 2
        if self.token() == "[":
            degree = self.base().top
        under = self.argument()
        reduced = under.reduced and not (under.plain and _has_power(under.top, max(2, degree)))
        return Form(under.work + 1, reduced, root=under.top if degree == 2 else 1)

    def function(self) -> Form:
        extra = 0
        while self.token() in ("_", "^"):
            extra += self.take() == "^"
            self.argument()
        inner = self.factor()
        return Form(inner.work + 1 + extra, inner.reduced)


def _product(factors: list[Form]) -> Form:
    numbers = sum(factor.plain for factor in factors)
    return Form(
        sum(factor.work for factor in factors) + max(0, numbers - 1),
        all(factor.reduced for factor in factors),
        math.prod(factor.top for factor in factors),
        math.prod(factor.bottom for factor in factors),
        math.prod(factor.root for factor in factors),
        numbers == len(factors),
    )


def _quotient(above: Form, below: Form) -> Form:
    top, bottom = above.top * below.bottom, below.top * above.bottom
    reduced = above.reduced and below.reduced and math.gcd(top, bottom) == 1
    reduced = reduced and not (below.plain and bottom == 1) and math.gcd(top, below.root) == 1
    work, root, plain = above.work + below.work, above.root * below.root, above.plain and below.plain
    return Form(work, reduced, top, bottom, root, plain)


def _has_power(number: int, degree: int) -> bool:
    """Whether something can be taken out from under the root; of 0 and 1 the root itself."""
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
