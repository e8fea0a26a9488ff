"""IFBench's instructions on counts and ratios (`count:*`, `ratio:*`); each function says what must hold."""

import re
from string import punctuation

from envs.verifiers.english import CONJUNCTIONS, PRONOUNS, STOP_WORDS
from envs.verifiers.ifeval_rules import Arguments
from envs.verifiers.sentences import split, words

NO_PUNCTUATION = str.maketrans("", "", punctuation)
"""For `str.translate`: drops ASCII punctuation."""
PERSON_NAMES = (
    "Emma|Liam|Sophia|Jackson|Olivia|Noah|Ava|Lucas|Isabella|Mason|Mia|Ethan|Charlotte|Alexander|Amelia|Benjamin|"
    "Harper|Leo|Zoe|Daniel|Chloe|Samuel|Lily|Matthew|Grace|Owen|Abigail|Gabriel|Ella|Jacob|Scarlett|Nathan|Victoria|"
    "Elijah|Layla|Nicholas|Audrey|David|Hannah|Christopher|Penelope|Thomas|Nora|Andrew|Aria|Joseph|Claire|Ryan|Stella|"
    "Jonathan"
)
"""Those that the instruction lists."""
KEYWORD_COUNTS = {"keyword1": 1, "keyword2": 2, "keyword3": 3, "keyword4": 5, "keyword5": 7}

_WORD = re.compile(r"\w+")
_NAME = re.compile(rf"\b(?:{PERSON_NAMES})\b")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_OVERLAP_POINTS = 2
"""The overlap may be this many percentage points off."""


def whole_word(keyword: str) -> re.Pattern[str]:
    """The keyword, in any case, not as a part of a longer word."""
    return re.compile(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", re.IGNORECASE)


def word_count_range(text: str, arguments: Arguments) -> bool:
    """From `min_words` to `max_words` words."""
    return bool(arguments["min_words"] <= len(_WORD.findall(text)) <= arguments["max_words"])


def unique_word_count(text: str, arguments: Arguments) -> bool:
    """At least `N` different words, in lower case and without punctuation around them."""
    unique = {word.strip(punctuation) for word in text.lower().split()} - {""}
    return bool(len(unique) >= arguments["N"])


def conjunctions(text: str, arguments: Arguments) -> bool:
    """At least `small_n` different coordinating conjunctions."""
    used = {word.strip(punctuation) for word in text.lower().split()} & CONJUNCTIONS
    return bool(len(used) >= arguments["small_n"])


def person_names(text: str, arguments: Arguments) -> bool:
    """At least `N` different names of `PERSON_NAMES`."""
    return bool(len(set(_NAME.findall(text))) >= arguments["N"])


def numbers(text: str, arguments: Arguments) -> bool:
    """Exactly `N` numbers in digits; 3.14 and 100,000 are one each."""
    return bool(len(re.findall(r"\d+", text.translate(NO_PUNCTUATION))) == arguments["N"])


def punctuation_marks(text: str, arguments: Arguments) -> bool:
    """Each of `.,!?;:` and an interrobang (`?!`, `!?` or `‽`) beside them."""
    interrobang = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return interrobang is not None and set(".,!?;:") <= set(text.replace(interrobang, "", 1))


def words_japanese(text: str, arguments: Arguments) -> bool:
    """Every `N`th word has a kana or kanji; a number or a lone mark in its place does not count."""
    nth = arguments["N"]
    if nth < 1:
        return False
    asked = [word.strip(punctuation) for word in text.split()[nth - 1 :: nth]]
    return all(_JAPANESE.search(word) for word in asked if word and not word.isdigit())


def pronouns(text: str, arguments: Arguments) -> bool:
    """At least `N` pronouns, repeated ones counted again; she/her are two."""
    return bool(sum(word in PRONOUNS for word in words(text.replace("/", " ").lower())) >= arguments["N"])


def keywords_multiple(text: str, arguments: Arguments) -> bool:
    """Five keywords as whole words: once, twice, three, five and seven times."""
    return all(
        sum(1 for _ in whole_word(arguments[name]).finditer(text)) == count
        for name, count in KEYWORD_COUNTS.items()
    )


def stop_words(text: str, arguments: Arguments) -> bool:
    """At most `percentage` per cent of the words are stop words."""
    found = _WORD.findall(text.lower())
    stopped = sum(word in STOP_WORDS for word in found)
    return bool(found) and 100 * stopped <= arguments["percentage"] * len(found)


def _endings(text: str) -> list[int]:
    """How many sentences end in a period, a question mark and an exclamation mark."""
    sentences = split(text)
    return [sum(sentence.endswith(mark) for sentence in sentences) for mark in ".?!"]


def sentence_type(text: str, arguments: Arguments) -> bool:
    """Twice as many sentences end in a period as in a question mark, of which there is one."""
    declarative, interrogative, _ = _endings(text)
    return declarative == 2 * interrogative > 0


def sentence_balance(text: str, arguments: Arguments) -> bool:
    """As many sentences end in a period as in a question mark and in an exclamation mark, at least one each."""
    declarative, interrogative, exclamatory = _endings(text)
    return declarative == interrogative == exclamatory > 0


def sentence_words(text: str, arguments: Arguments) -> bool:
    """Three sentences of equally many characters, no word twice."""
    sentences = split(text)
    used = text.lower().translate(NO_PUNCTUATION).split()
    return len(sentences) == 3 and len(set(map(len, sentences))) == 1 and len(used) == len(set(used))


def overlap(text: str, arguments: Arguments) -> bool:
    """Of the different trigrams of words, `percentage` per cent, to 2 points, are trigrams of `reference_text`."""
    given, reference = _trigrams(text), _trigrams(arguments["reference_text"])
    if not given:
        return False
    share = 100 * len(given & reference) / len(given)
    return bool(abs(share - arguments["percentage"]) <= _OVERLAP_POINTS)


def _trigrams(text: str) -> set[tuple[str, str, str]]:
    found = words(text)
    return set(zip(found, found[1:], found[2:], strict=False))
