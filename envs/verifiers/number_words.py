"""Parses whole numbers below a million in English words."""

import re

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENTHS = "twenty thirty forty fifty sixty seventy eighty ninety"
_UNITS = {word: value for value, word in enumerate(_SMALL.split())}
_TENS = {word: 10 * value for value, word in enumerate(_TENTHS.split(), start=2)}
_SCALES = {"hundred": 100, "thousand": 1000}
_SMALL_NUMBERS = "|".join(_SMALL.split())
_BELOW_HUNDRED = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_SMALL.split()[1:10])}))?|{_SMALL_NUMBERS})"
_BELOW_THOUSAND = rf"(?:(?:{_SMALL_NUMBERS}) hundred(?:(?: and)? {_BELOW_HUNDRED})?|{_BELOW_HUNDRED})"
_PHRASE = re.compile(
    rf"(?:{_BELOW_THOUSAND} thousand(?:(?: and)? {_BELOW_THOUSAND})?|{_BELOW_THOUSAND})", re.IGNORECASE
)
_MAX_CHARACTERS = 120


def parse_number_words(text: str) -> int | None:
    """Returns the number that a text states in words, or None.

    `thirty-four` is 34, and `two hundred and five` is 205. Any other text is None, such as `eight three`.
    """
    if len(text) > _MAX_CHARACTERS or not _PHRASE.fullmatch(text):
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
