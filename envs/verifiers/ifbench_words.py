"""IFBench's instructions on words and sentences (`words:*`, `sentence:*`); each function says what must hold."""

import re
from collections import Counter
from itertools import groupby, pairwise
from string import ascii_lowercase, punctuation

from envs.verifiers.english import starts_with_verb, syllables
from envs.verifiers.ifbench_counts import NO_PUNCTUATION, whole_word
from envs.verifiers.ifeval_rules import Arguments
from envs.verifiers.sentences import split, words

MIN_PALINDROMES = 10
MIN_PALINDROME_LETTERS = 5
MAX_VOWELS = 3

_CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")


def bare_words(text: str) -> list[str]:
    """Words in lower case without ASCII punctuation; a mark that stands alone is none."""
    return text.lower().translate(NO_PUNCTUATION).split()


def alphabet(text: str, arguments: Arguments) -> bool:
    """Each word begins with the letter after that of the word before; a follows z."""
    initials = [word[0] for word in bare_words(text)]
    places = [ascii_lowercase.find(letter) for letter in initials]
    if not places or min(places) < 0:
        return False
    return all(after == (place + 1) % 26 for place, after in pairwise(places))


def vowel(text: str, arguments: Arguments) -> bool:
    """One paragraph with at most three of a, e, i, o, u."""
    text = text.strip().lower()
    return "\n" not in text and len(set(text) & set("aeiou")) <= MAX_VOWELS


def consonants(text: str, arguments: Arguments) -> bool:
    """Two consonants stand together in each word; y is one."""
    return all(_CONSONANTS.search(word) for word in text.lower().split())


def palindrome(text: str, arguments: Arguments) -> bool:
    """Ten words of at least five letters that read the same backwards."""
    found = [word for word in bare_words(text) if len(word) >= MIN_PALINDROME_LETTERS and word == word[::-1]]
    return len(found) >= MIN_PALINDROMES


def prime_lengths(text: str, arguments: Arguments) -> bool:
    """The length of each word is a prime number."""
    lengths = {len(word) for word in bare_words(text)}
    return bool(lengths) and all(
        length > 1 and all(length % divisor for divisor in range(2, int(length**0.5) + 1))
        for length in lengths
    )


def start_verb(text: str, arguments: Arguments) -> bool:
    """The first word is a verb of `english.starts_with_verb`."""
    return starts_with_verb(text)


def repeats(text: str, arguments: Arguments) -> bool:
    """No word stands there more than `small_n` times."""
    counts = Counter(bare_words(text))
    return bool(counts) and max(counts.values()) <= arguments["small_n"]


def odd_even_syllables(text: str, arguments: Arguments) -> bool:
    """Words with an odd and an even number of syllables take turns."""
    parities = [syllables(word) % 2 for word in bare_words(text)]
    return bool(parities) and all(before != after for before, after in pairwise(parities))


def last_first(text: str, arguments: Arguments) -> bool:
    """Each sentence begins with the last word of the one before."""
    sentences = [[word.strip(punctuation) for word in _trimmed(sentence)] for sentence in split(text)]
    return all(sentences) and all(before[-1] == after[0] for before, after in pairwise(sentences))


def paragraph_last_first(text: str, arguments: Arguments) -> bool:
    """Each line ends with the word that it begins with."""
    lines = [[word.strip(punctuation) for word in _trimmed(line)] for line in text.split("\n")]
    return any(lines) and all(line[0] == line[-1] for line in lines if line)


def _trimmed(text: str) -> list[str]:
    """Words in lower case, without marks before the first and after the last one."""
    return text.lower().strip(punctuation + " \t\r\n").split()


def no_consecutive(text: str, arguments: Arguments) -> bool:
    """No two words in a row begin with the same letter."""
    found = bare_words(text)
    return bool(found) and all(before[0] != after[0] for before, after in pairwise(found))


def keywords_specific_position(text: str, arguments: Arguments) -> bool:
    """The `m`th word of the `n`th sentence is the keyword."""
    sentences = split(text)
    if not 1 <= arguments["n"] <= len(sentences):
        return False
    found = _tokens(sentences[arguments["n"] - 1])
    return 1 <= arguments["m"] <= len(found) and _same(found[arguments["m"] - 1], arguments["keyword"])


def words_position(text: str, arguments: Arguments) -> bool:
    """The second word and the last but one are the keyword."""
    found = _tokens(text)
    return len(found) > 1 and all(_same(found[place], arguments["keyword"]) for place in (1, -2))


def _tokens(text: str) -> list[str]:
    return [word for word in words(text) if any(map(str.isalnum, word))]


def _same(word: str, keyword: str) -> bool:
    return word.lower() == keyword.strip().lower()


def sentence_keyword(text: str, arguments: Arguments) -> bool:
    """The `N`th sentence has the word."""
    sentences = split(text)
    nth = arguments["N"]
    return 1 <= nth <= len(sentences) and whole_word(arguments["word"]).search(sentences[nth - 1]) is not None


def alliteration_increment(text: str, arguments: Arguments) -> bool:
    """Each sentence has more words than the one before that stand in runs of the same first letter."""
    counts = []
    for sentence in split(text):
        stripped = (word.lstrip(punctuation) for word in sentence.lower().split())
        runs = (len(list(run)) for _, run in groupby(word[0] for word in stripped if word))
        counts.append(sum(length for length in runs if length > 1))
    return all(before < after for before, after in pairwise(counts))


def increment(text: str, arguments: Arguments) -> bool:
    """Each sentence has `small_n` words more than the one before."""
    counts = [len(bare_words(sentence)) for sentence in split(text)]
    return all(after - before == arguments["small_n"] for before, after in pairwise(counts))
