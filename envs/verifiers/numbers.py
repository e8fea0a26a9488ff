"""Extracts plain numbers from completions, parses them exactly and compares them.

Decimals, fractions, mixed numbers and scientific notation become a `Fraction`, so 1,000 is 1000.0 and 3/6 is
0.5, while 9999 is not 10,000 and 0.333 is not 1/3. A number is simplified (docs/rewards.md: "worked out") if
nothing is left to calculate: a fraction is in lowest terms and is not a whole number. A text that has to be
calculated first, such as 8+3, is not a number. The module does not use sympy.
"""

import math
import re
from fractions import Fraction

from envs.verifiers.extract import chain_end, text_after_thinking

MAX_CHARACTERS = 400
"""Maximum length of a number's text."""
MAX_WITH_UNIT = 80
"""Maximum length of a text that is a number with a unit."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_GROUPED_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(\\[,! ]|\{,\}|[\xa0\u2007\u2009\u202f])\d{3}(?:\1\d{3})*(?!\d)", re.ASCII
)
"""Thousands that are grouped by marks of LaTeX, or by narrow or no-break spaces."""
_DECIMAL = re.compile(rf"([-+]?)({_DIGITS}?)(?:\.(\d*))?", re.ASCII)
_RATIO = re.compile(rf"([-+]?{_DIGITS}(?:\.\d+)?)\s*/\s*({_DIGITS}(?:\.\d+)?)", re.ASCII)
_FRAC = re.compile(r"([-+]?)\s*\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))", re.ASCII)
_MIXED_NUMBER = re.compile(
    r"([-+]?)(\d+)(?:\s+(\d+)\s*/\s*(\d+)|\s*\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})", re.ASCII
)
_SCIENTIFIC = re.compile(
    r"([-+]?[1-9](?:\.\d+)?)\s*(?:\\times|\\cdot|[x×*·])\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))", re.ASCII
)
_REPEATING = re.compile(
    r"([-+]?)(\d*)\.(\d*)(?:\\overline\s*\{(\d+)\}|\\overline\s*(\d)|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?)",
    re.ASCII,
)
_UNIT = re.compile(r"(?P<number>.*?[\d.])\s*(?P<unit>[A-Za-z][A-Za-z ./]*?(?:\s*\^?[23])?)\.?", re.ASCII | re.DOTALL)
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
"""Operator between two numbers, in words of LaTeX too; the line of a fraction is an operator."""
_PLAIN_NUMBER = rf"{_DIGITS}(?:\.\d+)?|\.\d+"
_CALCULATION = re.compile(
    rf"(?<![\w.\\])(?:\\?sqrt\s*[({{]\s*)?-?(?:{_PLAIN_NUMBER})(?:[)}}]*\s*{_OPERATOR}+\s*[({{]*-?(?:{_PLAIN_NUMBER}))*",
    re.ASCII,
)
_CALCULATION_CONTINUES = re.compile(r"[)}\s]*(?:[+/^×·÷]|\\times|\\cdot|\\div)")

_HASH_NUMBER = re.compile(r"####([^\n]{0,200})")
_TAG_NUMBER = re.compile(r"<answer>([^<]{1,200})</answer>")


def extract_final_number(text: str) -> str | None:
    """Extracts the number after the last `####` or in the last `<answer>`.

    Thoughts are skipped, and the result is None without such a number. The marked text must be one number. A
    currency sign, a percent sign, a unit in words and Markdown around the number are removed. "7 or 8", "3:30"
    and "12 apples and 3 pears" name no number, and 22/2 is not simplified. The end of "8 + 3 = 11" counts.
    """
    answer_text = text_after_thinking(text)
    found = [] if answer_text is None else _HASH_NUMBER.findall(answer_text) or _TAG_NUMBER.findall(answer_text)
    if not found:
        return None
    number = strip_number_marks(chain_end(_remove_grouping(found[-1])))
    return number if is_simplified_number(number) else None


def extract_last_number(text: str) -> str | None:
    """Extracts the last number after the thoughts, if the number is simplified.

    Words around the number do not count. The result is None if the last number is still to be calculated: the
    last number of "8+3" is not 3. The end of "8 + 3 = 11." counts.
    """
    answer_text = text_after_thinking(text)
    if answer_text is None:
        return None
    answer_text = _remove_grouping(answer_text.replace("−", "-"))
    *_, last = [None, *_CALCULATION.finditer(answer_text)]
    if last is None or _CALCULATION_CONTINUES.match(answer_text, last.end()):
        return None
    return last[0] if is_simplified_number(last[0]) else None


def _remove_grouping(text: str) -> str:
    r"""Removes the marks that group thousands, such as in `1\,234` and `1{,}234`.

    A comma alone and a plain space stay.
    """
    return _GROUPED_THOUSANDS.sub(lambda match: match[0].replace(match[1], ""), text)


def strip_number_marks(text: str) -> str:
    """Removes Markdown, quotes, currency, percent sign, unit and full stop around a number."""
    text = text.strip(_QUOTES).replace("−", "-").replace("\\$", "").replace("$", "").strip(_QUOTES)
    text = text.rstrip(".").replace("\\%", "").rstrip("%").strip(_QUOTES)
    with_unit = _UNIT.fullmatch(text) if len(text) <= MAX_WITH_UNIT else None
    if with_unit and is_unit(with_unit["unit"]):
        return with_unit["number"].strip()
    return text


def is_unit(text: str) -> bool:
    """Whether words behind a number are a unit and do not change the number.

    `cm^2` and `miles per hour` are units; `or 8` and `dozen` are not.
    """
    words = re.split(r"[ ./^]+", text.casefold().rstrip("."))
    is_known = len(words[0]) > 2 or words[0] in _SHORT_UNITS.split()
    return is_known and set(_NOT_UNITS.split()).isdisjoint(words)


def parse_number(text: str) -> Fraction | None:
    r"""Returns the exact value of a number's text, or None.

    The text is a decimal, a fraction (`a/b`, `\frac{a}{b}`), a mixed number or `a\times10^n`. Thousands are
    grouped in threes or not at all, digits are ASCII, and `a/0` is not a number.
    """
    found = _parse_exact(text)
    return None if found is None else found[0]


def is_simplified_number(text: str) -> bool:
    """Whether a text is a number with nothing left to calculate.

    1/2 and 1 1/2 are; 2/4, 22/2 and 11/1 are not.
    """
    found = _parse_exact(text)
    return found is not None and found[1]


def _parse_exact(text: str) -> tuple[Fraction, bool] | None:
    """Returns the exact value of a number's text, and whether the text is simplified."""
    text = text.strip().replace("$", "")
    if not text or len(text) > MAX_CHARACTERS:
        return None
    if match := _DECIMAL.fullmatch(text):
        sign, integer_part, decimals = match.groups(default="")
        if not integer_part and not decimals:
            return None
        value = Fraction(int(integer_part.replace(",", "") + decimals), 10 ** len(decimals))
        return -value if sign == "-" else value, True
    if match := _RATIO.fullmatch(text):
        return _parse_fraction("", match[1], match[2])
    if match := _MIXED_NUMBER.fullmatch(text):
        ratio = _parse_fraction("", match[3] or match[5], match[4] or match[6])
        if ratio is None:
            return None
        mixed = int(match[2]) + ratio[0]
        return -mixed if match[1] == "-" else mixed, ratio[1] and ratio[0] < 1
    if match := _SCIENTIFIC.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2] or match[3]), True
    if ("\\overline" in text or "\\dot" in text) and (match := _REPEATING.fullmatch(text)):
        # `0.1\overline{6}` and `0.1\dot{6}` are 1/6; all digits between two dots repeat.
        sign, integer_part, prefix, *repeated = match.groups(default="")
        period = "".join(repeated)
        value = Fraction(int(integer_part + prefix + period) - int(integer_part + prefix or 0), 10 ** len(period) - 1)
        return Fraction(-value if sign == "-" else value, 10 ** len(prefix)), True
    match = _FRAC.fullmatch(text)
    return _parse_fraction(match[1], match[2] or match[3], match[4] or match[5]) if match else None


def _parse_fraction(sign: str, top: str, bottom: str) -> tuple[Fraction, bool] | None:
    """Returns the value of a fraction, and whether the fraction is simplified.

    A simplified fraction has two whole numbers in lowest terms and one sign at most. The result is None for a
    division by 0.
    """
    above, below = Fraction(top.replace(",", "")), Fraction(bottom.replace(",", ""))
    if not below:
        return None
    is_integer_ratio = above.denominator == below.denominator == 1 and "." not in top + bottom
    is_lowest = math.gcd(above.numerator, below.numerator) == 1 and abs(below) > 1
    signs = (sign, top[:1], bottom[:1]).count("-")
    return (-1 if sign == "-" else 1) * above / below, is_integer_ratio and is_lowest and signs < 2


def same_number(number: str, reference: str) -> bool:
    """Whether a text is the reference number and simplified at least as far.

    1,000 is 1000.0, and 22/2 is not 11. Two texts that are not numbers are never the same.
    """
    left, right = parse_number(number), parse_number(reference)
    return left is not None and left == right and (is_simplified_number(number) or not is_simplified_number(reference))
