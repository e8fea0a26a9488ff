"""Whole numbers below a million written in English words."""

import re

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENTHS = "twenty thirty forty fifty sixty seventy eighty ninety"
_UNITS = {word: value for value, word in enumerate(_SMALL.split())}
_TENS = {word: 10 * value for value, word in enumerate(_TENTHS.split(), start=2)}
_SCALES = {"hundred": 100, "thousand": 1000}
_PHRASE = re.compile(r"[a-zA-Z]+(?:[ -][a-zA-Z]+){0,8}")


def number_in_words(text: str) -> int | None:
    """`thirty-four` is 34, `two hundred and five` is 205; None for any other text."""
    if not _PHRASE.fullmatch(text):
        return None
    total, group = 0, 0
    for word in re.split(r"[ -]", text.casefold()):
        if word in _UNITS or word in _TENS:
            group += _UNITS.get(word, _TENS.get(word, 0))
        elif word in _SCALES and group:
            group *= _SCALES[word]
            if word == "thousand":
                total, group = total + group, 0
        elif word != "and" or not (group or total):
            return None
    return total + group
