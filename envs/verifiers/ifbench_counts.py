"""Rules of IFBench on counts and ratios (`count:*`, `ratio:*`).

Every function checks one instruction on a text; its name is the end of the instruction's id.
"""

import re
from string import punctuation

from envs.verifiers.english import CONJUNCTIONS, PRONOUNS, STOP_WORDS
from envs.verifiers.ifeval_rules import Arguments
from envs.verifiers.sentences import split_sentences, split_words

NO_PUNCTUATION = str.maketrans("", "", punctuation)
"""Table for `str.translate` that removes ASCII punctuation."""
PERSON_NAMES = (
    "Emma|Liam|Sophia|Jackson|Olivia|Noah|Ava|Lucas|Isabella|Mason|Mia|Ethan|Charlotte|Alexander|Amelia|Benjamin|"
    "Harper|Leo|Zoe|Daniel|Chloe|Samuel|Lily|Matthew|Grace|Owen|Abigail|Gabriel|Ella|Jacob|Scarlett|Nathan|Victoria|"
    "Elijah|Layla|Nicholas|Audrey|David|Hannah|Christopher|Penelope|Thomas|Nora|Andrew|Aria|Joseph|Claire|Ryan|Stella|"
    "Jonathan"
)
"""Names of persons that the instruction lists."""
KEYWORD_COUNTS = {"keyword1": 1, "keyword2": 2, "keyword3": 3, "keyword4": 5, "keyword5": 7}
"""Required number of occurrences of each keyword of `count:keywords_multiple`."""

_WORD = re.compile(r"\w+")
_NAME = re.compile(rf"\b(?:{PERSON_NAMES})\b")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_OVERLAP_POINTS = 2
"""Maximum difference of the overlap in percentage points."""


def whole_word_pattern(keyword: str) -> re.Pattern[str]:
    """Returns a pattern for a keyword in any case, outside longer words."""
    return re.compile(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", re.IGNORECASE)


def word_count_range(text: str, arguments: Arguments) -> bool:
    """Whether the text has `min_words` to `max_words` words."""
    return bool(arguments["min_words"] <= len(_WORD.findall(text)) <= arguments["max_words"])


def unique_word_count(text: str, arguments: Arguments) -> bool:
    """Whether the text has at least `N` different words.

    Words are compared in lower case, without punctuation around them.
    """
    unique = {word.strip(punctuation) for word in text.lower().split()} - {""}
    return bool(len(unique) >= arguments["N"])


def conjunctions(text: str, arguments: Arguments) -> bool:
    """Whether the text has at least `small_n` different coordinating conjunctions."""
    used_words = {word.strip(punctuation) for word in text.lower().split()} & CONJUNCTIONS
    return bool(len(used_words) >= arguments["small_n"])


def person_names(text: str, arguments: Arguments) -> bool:
    """Whether the text has at least `N` different names of `PERSON_NAMES`."""
    return bool(len(set(_NAME.findall(text))) >= arguments["N"])


def numbers(text: str, arguments: Arguments) -> bool:
    """Whether the text has exactly `N` numbers in digits.

    3.14 and 100,000 are one number each.
    """
    return bool(len(re.findall(r"\d+", text.translate(NO_PUNCTUATION))) == arguments["N"])


def punctuation_marks(text: str, arguments: Arguments) -> bool:
    """Whether the text has every mark of `.,!?;:` and an interrobang beside them.

    An interrobang is `?!`, `!?` or `‽`.
    """
    interrobang = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return interrobang is not None and set(".,!?;:") <= set(text.replace(interrobang, "", 1))


def words_japanese(text: str, arguments: Arguments) -> bool:
    """Whether every `N`th word has a kana or kanji.

    A number or a lone punctuation mark at such a position does not count.
    """
    nth = arguments["N"]
    if nth < 1:
        return False
    nth_words = [word.strip(punctuation) for word in text.split()[nth - 1 :: nth]]
    return all(_JAPANESE.search(word) for word in nth_words if word and not word.isdigit())


def pronouns(text: str, arguments: Arguments) -> bool:
    """Whether the text has at least `N` pronouns.

    Repeated pronouns count again; she/her are two pronouns.
    """
    return bool(sum(word in PRONOUNS for word in split_words(text.replace("/", " ").lower())) >= arguments["N"])


def keywords_multiple(text: str, arguments: Arguments) -> bool:
    """Whether the five keywords appear once, twice, three, five and seven times.

    Only whole words count.
    """
    return all(
        sum(1 for _ in whole_word_pattern(arguments[name]).finditer(text)) == count
        for name, count in KEYWORD_COUNTS.items()
    )


def stop_words(text: str, arguments: Arguments) -> bool:
    """Whether at most `percentage` per cent of the words are stop words."""
    found_words = _WORD.findall(text.lower())
    num_stop_words = sum(word in STOP_WORDS for word in found_words)
    return bool(found_words) and 100 * num_stop_words <= arguments["percentage"] * len(found_words)


def _count_endings(text: str) -> list[int]:
    """Counts the sentences that end in a period, a question mark and an exclamation mark."""
    sentences = split_sentences(text)
    return [sum(sentence.endswith(mark) for sentence in sentences) for mark in ".?!"]


def sentence_type(text: str, arguments: Arguments) -> bool:
    """Whether twice as many sentences end in a period as in a question mark.

    At least one sentence ends in a question mark.
    """
    declarative, interrogative, _ = _count_endings(text)
    return declarative == 2 * interrogative > 0


def sentence_balance(text: str, arguments: Arguments) -> bool:
    """Whether periods, question marks and exclamation marks end equally many sentences.

    Each mark ends at least one sentence.
    """
    declarative, interrogative, exclamatory = _count_endings(text)
    return declarative == interrogative == exclamatory > 0


def sentence_words(text: str, arguments: Arguments) -> bool:
    """Whether the text is three sentences of equal length without repeated words.

    The length is the number of characters.
    """
    sentences = split_sentences(text)
    used_words = text.lower().translate(NO_PUNCTUATION).split()
    return len(sentences) == 3 and len(set(map(len, sentences))) == 1 and len(used_words) == len(set(used_words))


def overlap(text: str, arguments: Arguments) -> bool:
    """Whether `percentage` per cent of the text's trigrams are in `reference_text`.

    The trigrams consist of words, and each distinct trigram counts once. The percentage may differ by 2 points.
    """
    answer_trigrams, reference_trigrams = _trigrams(text), _trigrams(arguments["reference_text"])
    if not answer_trigrams:
        return False
    share = 100 * len(answer_trigrams & reference_trigrams) / len(answer_trigrams)
    return bool(abs(share - arguments["percentage"]) <= _OVERLAP_POINTS)


def _trigrams(text: str) -> set[tuple[str, str, str]]:
    """Returns the distinct trigrams of a text's words."""
    found_words = split_words(text)
    return set(zip(found_words, found_words[1:], found_words[2:], strict=False))
