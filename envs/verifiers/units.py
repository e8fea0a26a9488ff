"""Splits units from numbers, and maps every unit to one name.

The functions work on text and do not use sympy.
"""

import re
from functools import lru_cache

from envs.verifiers.numbers import is_unit

_NAMES = {
    "millimeter": "mm millimetre", "centimeter": "cm centimetre",
    "meter": "metre mtr", "kilometer": "km kilometre",
    "inch": "in", "foot": "ft feet", "yard": "yd", "mile": "mi",
    "gram": "gm", "kilogram": "kg kilo", "milligram": "mg",
    "pound": "lb gbp", "ounce": "oz",
    "liter": "litre", "milliliter": "ml millilitre",
    "second": "sec", "minute": "min", "hour": "hr",
    "percent": "pct", "degree": "deg", "square": "sq",
    "dollar": "usd", "euro": "eur", "yen": "jpy", "rupee": "inr",
    "ampere": "amp", "radian": "rad",
    **dict.fromkeys(("joule", "newton", "kelvin", "watt", "volt", "cent"), ""),
}  # fmt: skip
_UNIT_ALIASES = {other: name for name, others in _NAMES.items() for other in others.split()}
_UNIT_ALIASES |= {"m": "meter", "s": "second", "h": "hour", "g": "gram", "l": "liter"}
_KNOWN_UNITS = frozenset((*_NAMES, "cubic", "unit", "units"))
_LETTERS = {
    "m": "meters", "s": "seconds", "g": "grams", "h": "hours", "L": "liters",
    "J": "joules", "N": "newtons", "K": "kelvins", "W": "watts", "V": "volts", "A": "amperes",
}  # fmt: skip
"""Unit that a single letter means if the letter is set as text behind a number."""
UNIT_LETTER = re.compile(
    rf"(?<=[\d)}}/])(?P<gap>[\s~]*(?:\\[,;: ])*)\\(?:text|mathrm|mbox|textrm|textnormal)\{{[\s~]*"
    rf"(?P<letter>[{''.join(_LETTERS)}])\s*\}}(?=$|[\s/^.$}}])"
)
_UNIT = re.compile(
    r"(?P<value>[^a-zA-Z]*[\d)}]|.*\}|.*\\pi)\s*"
    r"(?P<unit>(?<=[\s})])\(?(?:[a-zA-Z]{2,}|[mgl](?=/))(?:(?:\. ?|[ /]|\\cdot )[a-zA-Z]+)*\.?(?:\^[23])?\)?)"
)
_PRIMES = re.compile(r"(?P<value>[-\d.,/ ]*\d)(?P<mark>'{1,2}|\")", re.ASCII)
_SIGNS = {
    "\\$": "dollar", "%": "percent",
    "^\\circ": "degree", "^{\\circ}": "degree", "°": "degree", "º": "degree", "\\degree": "degree",
    "€": "euro", "\\euro": "euro",
    "£": "pound", "\\pounds": "pound",
    "¥": "yen", "₹": "rupee",
}  # fmt: skip
"""Unit of every sign, without white space."""
_UNIT_NAMES = frozenset(_NAMES) - {"square"}
_POWERS = {"2": "square", "3": "cubic"}


def unit_in_words(match: re.Match[str]) -> str:
    r"""Returns the unit in words for a match of `UNIT_LETTER`.

    `5\mathrm{~J}` becomes `5 joules`; a letter without a number in front does not match.
    """
    return f" {_LETTERS[match['letter']]} "


def split_unit(text: str) -> tuple[str, str]:
    """Splits a canonical text into the text and the unit in words behind it.

    `5 cm^2` is split into 5 and `square centimeter`. The unit is empty if the text has none.
    """
    if prime := _PRIMES.fullmatch(text):
        return prime["value"], "foot" if prime["mark"] == "'" else "inch"
    found = _UNIT.fullmatch(text)
    if found is None or not is_unit(found["unit"].strip("()")):
        return text, ""
    unit = _canonical_unit(found["unit"].strip("()"))
    if found["value"].endswith("\\pi") and not _KNOWN_UNITS.issuperset(unit.replace("/", " ").split()):
        return text, ""  # the space after \pi separates letters, not a unit
    return found["value"].strip(), unit


def has_unit_sign(text: str) -> bool:
    """Whether a text has a sign of money, per cent or degrees."""
    compact = "".join(text.split())
    return "$" in text or "degree" in text or any(sign in compact for sign in _SIGNS)


def named_units(text: str, unit: str) -> frozenset[str]:
    r"""Returns the known units that an answer names.

    `\$5` names dollars, `5 cents` names cents.
    text: the answer as written.
    unit: the unit that `split_unit` finds behind the canonical form of the answer.
    """
    compact = "".join(text.split())
    signs = {name for sign, name in _SIGNS.items() if sign in compact}
    if (text.count("$") - text.count("\\$")) % 2:  # a pair of dollars encloses a formula
        signs.add("dollar")
    return frozenset(signs | _UNIT_NAMES.intersection(unit.replace("/", " ").split()))


@lru_cache(maxsize=4096)
def _canonical_unit(unit: str) -> str:
    """Returns the canonical name of a unit, such as `square centimeter` for `cm^2`."""
    unit, _, power = unit.casefold().partition("^")
    words = re.findall(r"[a-z]+|/", unit.replace(" per ", "/"))
    unit_names = [_singular(word) for word in words]
    return " ".join([_POWERS[power], *unit_names] if power else unit_names)


def _singular(word: str) -> str:
    """Returns the canonical singular of a unit's word."""
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in _UNIT_ALIASES or form in _NAMES:
            return _UNIT_ALIASES.get(form, form)
    return word.rstrip("es")
