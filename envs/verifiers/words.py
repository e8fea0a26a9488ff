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
_ONES = "|".join(_SMALL.split())
_BELOW_HUNDRED = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_SMALL.split()[1:10])}))?|{_ONES})"
_BELOW_THOUSAND = rf"(?:(?:{_ONES}) hundred(?:(?: and)? {_BELOW_HUNDRED})?|{_BELOW_HUNDRED})"
_PHRASE = re.compile(
    rf"(?:{_BELOW_THOUSAND} thousand(?:(?: and)? {_BELOW_THOUSAND})?|{_BELOW_THOUSAND})", re.IGNORECASE
)
_LONGEST = 120


def number_in_words(text: str) -> int | None:
    """`thirty-four` is 34, `two hundred and five` is 205; None for any other text, such as `eight three`."""
    if len(text) > _LONGEST or not _PHRASE.fullmatch(text):
        return None
    total, group = 0, 0
    for word in re.split(r"[ -]", text.casefold()):
        if word in _SCALES:
            group *= _SCALES[word]
        else:
            group += _UNITS.get(word, _TENS.get(word, 0))
        if word == "thousand":
            total, group = total + group, 0
    return total + group
