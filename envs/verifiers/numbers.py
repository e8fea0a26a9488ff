"""Plain numbers in completions: where the final one stands, and when two are the same. No sympy here.

A number is exact: decimals, fractions, mixed numbers and scientific notation become a `Fraction`, so 1,000 is 1000.0
and 3/6 is 0.5, while 9999 is not 10,000 and 0.333 is not 1/3. It is worked out where nothing is left to calculate: a
fraction then is in lowest terms and no whole number. What has to be calculated first, such as 8+3, is no number.
"""

import math
import re
from fractions import Fraction

from envs.verifiers.extract import after_thinking, chain_end

MAX_CHARACTERS = 400
"""A longer text is no number: reading it would cost more than it is worth."""
MAX_WITH_UNIT = 80
"""A longer text is no number with a unit."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_GROUPED = re.compile(
    r"(?<![\d.,])\d{1,3}(\\[,! ]|\{,\}|[\xa0\u2007\u2009\u202f])\d{3}(?:\1\d{3})*(?!\d)", re.ASCII
)
"""Thousands behind marks of LaTeX, or behind narrow or no-break spaces."""
_DECIMAL = re.compile(rf"([-+]?)({_DIGITS}?)(?:\.(\d*))?", re.ASCII)
_RATIO = re.compile(rf"([-+]?{_DIGITS}(?:\.\d+)?)\s*/\s*({_DIGITS}(?:\.\d+)?)", re.ASCII)
_FRAC = re.compile(
    r"([-+]?)\s*\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))", re.ASCII
)
_MIXED = re.compile(
    r"([-+]?)(\d+)(?:\s+(\d+)\s*/\s*(\d+)|\s*\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})", re.ASCII
)
_SCIENTIFIC = re.compile(
    r"([-+]?[1-9](?:\.\d+)?)\s*(?:\\times|\\cdot|[x×*·])\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))",
    re.ASCII,
)
_REPEATING = re.compile(
    r"([-+]?)(\d*)\.(\d*)(?:\\overline\s*\{(\d+)\}|\\overline\s*(\d)|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?)",
    re.ASCII,
)
_UNIT = re.compile(
    r"(?P<number>.*?[\d.])\s*(?P<unit>[A-Za-z][A-Za-z ./]*?(?:\s*\^?[23])?)\.?", re.ASCII | re.DOTALL
)
_SHORT_UNITS = "m g s h l v w cm mm km kg mg ft in yd mi lb oz hr ml sq pm am"
_NOT_UNITS = (
    "or and to not than if at about between vs either neither mod cup dozen hundred thousand million "
    "billion trillion tens dozens hundreds thousands millions billions trillions half halves third "
    "thirds quarter quarters pi sqrt root choose power squared cubed plus minus times factorial more "
    "less over divided by of zero negative fifths sixths sevenths eighths ninths tenth tenths "
    "hundredth hundredths thousandth thousandths millionth millionths"
)
_QUOTES = " \t\r\n\xa0\u2009\u202f*`'\"“”"

_OPERATOR = r"(?:[-+*/:^×·÷]|\\times|\\cdot|\\div|(?<=[\d)}\s])x(?=[\d({\s])|\}\s*\{)"
_PLAIN = rf"{_DIGITS}(?:\.\d+)?|\.\d+"
"""Between two numbers, in words of LaTeX too; a fraction's line is one."""
_CALCULATION = re.compile(
    rf"(?<![\w.\\])(?:\\?sqrt\s*[({{]\s*)?-?(?:{_PLAIN})(?:[)}}]*\s*{_OPERATOR}+\s*[({{]*-?(?:{_PLAIN}))*",
    re.ASCII,
)
_TO_BE_GONE_ON = re.compile(r"[)}\s]*(?:[+/^×·÷]|\\times|\\cdot|\\div)")

_MARKED = re.compile(r"####([^\n]{0,200})")
_TAGGED = re.compile(r"<answer>([^<]{1,200})</answer>")


def final_number(text: str) -> str | None:
    """The number after the last `####`, or inside the last `<answer>`, behind the thoughts; None without one.

    The marked text must be one number: a currency sign, a percent sign, a unit in words and Markdown around it are
    left away, but "7 or 8", "3:30" and "12 apples and 3 pears" name no number, and 22/2 is still to be worked out.
    Of "8 + 3 = 11" the end counts.
    """
    spoken = after_thinking(text)
    found = [] if spoken is None else _MARKED.findall(spoken) or _TAGGED.findall(spoken)
    if not found:
        return None
    number = plain(chain_end(_without_grouping(found[-1])))
    return number if is_worked_out(number) else None


def last_number(text: str) -> str | None:
    """The last number behind the thoughts, with or without words around it; None where it is not worked out.

    What is still to be calculated names no number: of "8+3" the last is not 3. Of "8 + 3 = 11." the end counts.
    """
    spoken = after_thinking(text)
    if spoken is None:
        return None
    spoken = _without_grouping(spoken.replace("−", "-"))
    *_, last = [None, *_CALCULATION.finditer(spoken)]
    if last is None or _TO_BE_GONE_ON.match(spoken, last.end()):
        return None
    return last[0] if is_worked_out(last[0]) else None


def _without_grouping(text: str) -> str:
    """`1\\,234` and `1{,}234` as 1234; a comma alone and a plain space stay."""
    return _GROUPED.sub(lambda found: found[0].replace(found[1], ""), text)


def plain(text: str) -> str:
    """A number's text without Markdown, quotes, currency, percent sign, unit in words or full stop."""
    text = text.strip(_QUOTES).replace("−", "-").replace("\\$", "").replace("$", "").strip(_QUOTES)
    text = text.rstrip(".").replace("\\%", "").rstrip("%").strip(_QUOTES)
    with_unit = _UNIT.fullmatch(text) if len(text) <= MAX_WITH_UNIT else None
    if with_unit and is_unit(with_unit["unit"]):
        return with_unit["number"].strip()
    return text


def is_unit(text: str) -> bool:
    """Whether words behind a number are a unit (`cm^2`, `miles per hour`) and do not change it (`or 8`, `dozen`)."""
    words = re.split(r"[ ./^]+", text.casefold().rstrip("."))
    known = len(words[0]) > 2 or words[0] in _SHORT_UNITS.split()
    return known and set(_NOT_UNITS.split()).isdisjoint(words)


def parse_number(text: str) -> Fraction | None:
    """The exact value of a decimal, a fraction (`a/b`, `\\frac{a}{b}`), a mixed number or `a\\times10^n`; else None.

    Thousands are grouped in threes or not at all, digits are ASCII, and `a/0` is no number.
    """
    found = _read(text)
    return None if found is None else found[0]


def is_worked_out(text: str) -> bool:
    """Check that a text is a number with nothing left to calculate.

    1/2 and 1 1/2 are; 2/4, 22/2 and 11/1 are not.
    """
    found = _read(text)
    return found is not None and found[1]


def _read(text: str) -> tuple[Fraction, bool] | None:
    """Value, and whether it is worked out."""
    text = text.strip().replace("$", "")
    if not text or len(text) > MAX_CHARACTERS:
        return None
    if match := _DECIMAL.fullmatch(text):
        sign, whole, decimals = match.groups(default="")
        if not whole and not decimals:
            return None
        value = Fraction(int(whole.replace(",", "") + decimals), 10 ** len(decimals))
        return -value if sign == "-" else value, True
    if match := _RATIO.fullmatch(text):
        return _ratio("", match[1], match[2])
    if match := _MIXED.fullmatch(text):
        ratio = _ratio("", match[3] or match[5], match[4] or match[6])
        if ratio is None:
            return None
        mixed = int(match[2]) + ratio[0]
        return -mixed if match[1] == "-" else mixed, ratio[1] and ratio[0] < 1
    if match := _SCIENTIFIC.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2] or match[3]), True
    if ("\\overline" in text or "\\dot" in text) and (match := _REPEATING.fullmatch(text)):
        # `0.1\overline{6}` or `0.1\dot{6}`, 1/6; between two dots all digits repeat
        sign, whole, once, *repeated = match.groups(default="")
        period = "".join(repeated)
        value = Fraction(int(whole + once + period) - int(whole + once or 0), 10 ** len(period) - 1)
        return Fraction(-value if sign == "-" else value, 10 ** len(once)), True
    match = _FRAC.fullmatch(text)
    return _ratio(match[1], match[2] or match[3], match[4] or match[5]) if match else None


def _ratio(sign: str, top: str, bottom: str) -> tuple[Fraction, bool] | None:
    """Value of a fraction, and whether it is worked out; None where it divides by 0.

    Worked out: two whole numbers in lowest terms with one sign at most.
    """
    above, below = Fraction(top.replace(",", "")), Fraction(bottom.replace(",", ""))
    if not below:
        return None
    whole = above.denominator == below.denominator == 1 and "." not in top + bottom
    lowest = math.gcd(above.numerator, below.numerator) == 1 and abs(below) > 1
    signs = (sign, top[:1], bottom[:1]).count("-")
    return (-1 if sign == "-" else 1) * above / below, whole and lowest and signs < 2


def same_number(given: str, gold: str) -> bool:
    """Check that a text is the gold number, worked out at least as far.

    1,000 is 1000.0, and 22/2 is not 11.
    Two texts that are no numbers are never the same.
    """
    left, right = parse_number(given), parse_number(gold)
    return left is not None and left == right and (is_worked_out(given) or not is_worked_out(gold))
