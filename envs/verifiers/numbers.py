"""Plain numbers in answers: where the final one stands, and when two are the same."""

import re
from decimal import Decimal, InvalidOperation

MAX_CHARACTERS = 40
_MARKED = re.compile(r"####[ \t]*([^\n]{1,120})")
_TAGGED = re.compile(r"<answer>([^<]{1,120})</answer>")
_NUMBER = re.compile(r"-?\$?-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?-?\.\d+")


def final_number(text: str) -> str | None:
    """The number after the last `####`, or inside the last `<answer>` tag; None where there is neither."""
    found = _MARKED.findall(text) or _TAGGED.findall(text)
    if not found:
        return None
    number = _NUMBER.search(found[-1].strip())
    return number.group().rstrip(".") if number else None


def parse_number(text: str) -> Decimal | None:
    """A decimal number without thousands separators and currency signs; None for anything else."""
    plain = text.strip().replace(",", "").replace("$", "")
    if len(plain) > MAX_CHARACTERS:
        return None
    try:
        number = Decimal(plain)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def same_number(given: str, gold: str) -> bool:
    """Equal in value: 1,000 is 1000.0. Two texts that are no numbers are never the same."""
    left, right = parse_number(given), parse_number(gold)
    return left is not None and left == right
