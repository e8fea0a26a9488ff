"""Units behind a number: cut off, and one name for those that have several. Pure text, no sympy."""

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
_ONE_NAME = {other: name for name, others in _NAMES.items() for other in others.split()}
_ONE_NAME |= {"m": "meter", "s": "second", "h": "hour", "g": "gram", "l": "liter"}
_KNOWN = frozenset((*_NAMES, "cubic", "unit", "units"))
_LETTERS = {
    "m": "meters", "s": "seconds", "g": "grams", "h": "hours", "L": "liters",
    "J": "joules", "N": "newtons", "K": "kelvins", "W": "watts", "V": "volts", "A": "amperes",
}  # fmt: skip
"""What a single letter means where it is set as text behind a number."""
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
"""Marks of a quantity that are no words, without white space."""
_QUANTITIES = frozenset(_NAMES) - {"square"}
_POWERS = {"2": "square", "3": "cubic"}


def unit_in_words(found: re.Match[str]) -> str:
    """The match of UNIT_LETTER in words: `5\\mathrm{~J}` is `5 joules`; without such a number in front it stays."""
    return f" {_LETTERS[found['letter']]} "


def split_unit(text: str) -> tuple[str, str]:
    """A canonical text and the unit in words behind it (empty without one): `5 cm^2` is 5 and `square centimeter`."""
    if prime := _PRIMES.fullmatch(text):
        return prime["value"], "foot" if prime["mark"] == "'" else "inch"
    found = _UNIT.fullmatch(text)
    if found is None or not is_unit(found["unit"].strip("()")):
        return text, ""
    unit = _one_name(found["unit"].strip("()"))
    if found["value"].endswith("\\pi") and not _KNOWN.issuperset(unit.replace("/", " ").split()):
        return text, ""  # in LaTeX letters follow this one behind a space
    return found["value"].strip(), unit


def has_sign(text: str) -> bool:
    """Whether a text has a sign of money, per cent or degrees."""
    compact = "".join(text.split())
    return "$" in text or "degree" in text or any(sign in compact for sign in _SIGNS)


def quantities(text: str, unit: str) -> frozenset[str]:
    """Quantities that an answer names, as far as they are known here.

    `\\$5` is dollars, `5 cents` is cents.
    text: as it is written. unit: what `split_unit` finds behind its canonical form.
    """
    compact = "".join(text.split())
    signs = {name for sign, name in _SIGNS.items() if sign in compact}
    if (text.count("$") - text.count("\\$")) % 2:  # two of them are around a formula
        signs.add("dollar")
    return frozenset(signs | _QUANTITIES.intersection(unit.replace("/", " ").split()))


@lru_cache(maxsize=4096)
def _one_name(unit: str) -> str:
    unit, _, power = unit.casefold().partition("^")
    words = re.findall(r"[a-z]+|/", unit.replace(" per ", "/"))
    named = [_singular(word) for word in words]
    return " ".join([_POWERS[power], *named] if power else named)


def _singular(word: str) -> str:
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in _ONE_NAME or form in _NAMES:
            return _ONE_NAME.get(form, form)
    return word.rstrip("es")
