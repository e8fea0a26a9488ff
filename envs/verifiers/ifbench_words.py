"""Rules of IFBench on words and sentences (`words:*`, `sentence:*`).

Every function checks one instruction on a text; its name is the end of the instruction's id.
"""

import re
from collections import Counter
from itertools import groupby, pairwise
from string import ascii_lowercase, punctuation

from envs.verifiers.english import count_syllables, starts_with_verb
from envs.verifiers.ifbench_counts import NO_PUNCTUATION, whole_word_pattern
from envs.verifiers.ifeval_rules import Arguments
from envs.verifiers.sentences import split_sentences, split_words

MIN_PALINDROMES = 10
"""Minimum number of palindromes."""
MIN_PALINDROME_LETTERS = 5
MAX_VOWELS = 3
"""Maximum number of different vowels."""

_CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")


def bare_words(text: str) -> list[str]:
    """Returns the words in lower case without ASCII punctuation.

    A mark that stands alone is not a word.
    """
    return text.lower().translate(NO_PUNCTUATION).split()


def alphabet(text: str, arguments: Arguments) -> bool:
    """Whether the first letters of successive words follow the alphabet (a follows z)."""
    initials = [word[0] for word in bare_words(text)]
    places = [ascii_lowercase.find(letter) for letter in initials]
    if not places or min(places) < 0:
        return False
    return all(after == (place + 1) % 26 for place, after in pairwise(places))


def vowel(text: str, arguments: Arguments) -> bool:
    """Whether the text is one paragraph with at most three different vowels."""
    text = text.strip().lower()
    return "\n" not in text and len(set(text) & set("aeiou")) <= MAX_VOWELS


def consonants(text: str, arguments: Arguments) -> bool:
    """Whether every word has two consonants in a row; y is a consonant."""
    return all(_CONSONANTS.search(word) for word in text.lower().split())


def palindrome(text: str, arguments: Arguments) -> bool:
    """Whether the text has ten palindromes of at least five letters."""
    found_words = [word for word in bare_words(text) if len(word) >= MIN_PALINDROME_LETTERS and word == word[::-1]]
    return len(found_words) >= MIN_PALINDROMES


def prime_lengths(text: str, arguments: Arguments) -> bool:
    """Whether the length of every word is a prime number."""
    lengths = {len(word) for word in bare_words(text)}
    return bool(lengths) and all(
        length > 1 and all(length % divisor for divisor in range(2, int(length**0.5) + 1)) for length in lengths
    )


def start_verb(text: str, arguments: Arguments) -> bool:
    """Whether the first word is a verb according to `english.starts_with_verb`."""
    return starts_with_verb(text)


def repeats(text: str, arguments: Arguments) -> bool:
    """Whether no word appears more than `small_n` times."""
    counts = Counter(bare_words(text))
    return bool(counts) and max(counts.values()) <= arguments["small_n"]


def odd_even_syllables(text: str, arguments: Arguments) -> bool:
    """Whether words with an odd and an even number of syllables alternate."""
    parities = [count_syllables(word) % 2 for word in bare_words(text)]
    return bool(parities) and all(before != after for before, after in pairwise(parities))


def last_first(text: str, arguments: Arguments) -> bool:
    """Whether every sentence begins with the last word of the sentence before."""
    sentences = [
        [word.strip(punctuation) for word in _edge_trimmed_words(sentence)] for sentence in split_sentences(text)
    ]
    return all(sentences) and all(before[-1] == after[0] for before, after in pairwise(sentences))


def paragraph_last_first(text: str, arguments: Arguments) -> bool:
    """Whether every line ends with its first word."""
    lines = [[word.strip(punctuation) for word in _edge_trimmed_words(line)] for line in text.split("\n")]
    return any(lines) and all(line[0] == line[-1] for line in lines if line)


def _edge_trimmed_words(text: str) -> list[str]:
    """Returns the words in lower case, without marks at the text's beginning and end."""
    return text.lower().strip(punctuation + " \t\r\n").split()


def no_consecutive(text: str, arguments: Arguments) -> bool:
    """Whether no two successive words begin with the same letter."""
    found_words = bare_words(text)
    return bool(found_words) and all(before[0] != after[0] for before, after in pairwise(found_words))


def keywords_specific_position(text: str, arguments: Arguments) -> bool:
    """Whether the `m`th word of the `n`th sentence is the keyword."""
    sentences = split_sentences(text)
    if not 1 <= arguments["n"] <= len(sentences):
        return False
    found_words = _alphanumeric_words(sentences[arguments["n"] - 1])
    return 1 <= arguments["m"] <= len(found_words) and _is_keyword(
        found_words[arguments["m"] - 1], arguments["keyword"]
    )


def words_position(text: str, arguments: Arguments) -> bool:
    """Whether the second word and the last but one are the keyword."""
    found_words = _alphanumeric_words(text)
    return len(found_words) > 1 and all(_is_keyword(found_words[place], arguments["keyword"]) for place in (1, -2))


def _alphanumeric_words(text: str) -> list[str]:
    """Returns the words that have a letter or digit."""
    return [word for word in split_words(text) if any(map(str.isalnum, word))]


def _is_keyword(word: str, keyword: str) -> bool:
    """Whether a word is the keyword, in any case."""
    return word.lower() == keyword.strip().lower()


def sentence_keyword(text: str, arguments: Arguments) -> bool:
    """Whether the `N`th sentence contains the word."""
    sentences = split_sentences(text)
    nth = arguments["N"]
    return 1 <= nth <= len(sentences) and whole_word_pattern(arguments["word"]).search(sentences[nth - 1]) is not None


def alliteration_increment(text: str, arguments: Arguments) -> bool:
    """Whether every sentence has more alliterating words than the sentence before.

    Alliterating words are in runs of words with the same first letter.
    """
    counts = []
    for sentence in split_sentences(text):
        stripped = (word.lstrip(punctuation) for word in sentence.lower().split())
        runs = (len(list(run)) for _, run in groupby(word[0] for word in stripped if word))
        counts.append(sum(length for length in runs if length > 1))
    return all(before < after for before, after in pairwise(counts))


def increment(text: str, arguments: Arguments) -> bool:
    """Whether every sentence has `small_n` words more than the sentence before."""
    counts = [len(bare_words(sentence)) for sentence in split_sentences(text)]
    return all(after - before == arguments["small_n"] for before, after in pairwise(counts))
