"""Rules that check the 25 kinds of instructions of IFEval (Zhou et al. 2023).

Every rule is a function of the response and the instruction's arguments. The rules are those of the published
evaluation, oddities included: a keyword is a regular expression, and an undecidable language counts as
followed. Where the published regular expressions take quadratic time on hostile text, the rules find the same
matches in one pass.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from envs.verifiers.language_detection import detect_language
from envs.verifiers.sentences import split_sentences, split_words

Arguments = Mapping[str, Any]
"""Arguments of one instruction by name."""
InstructionRule = Callable[[str, Arguments], bool]
"""Function of a response and the instruction's arguments: whether the response follows the instruction."""

_PARAGRAPH_STARS = re.compile(r"\s?\*\*\*\s?")
_BULLET_STAR = re.compile(r"^\s*+\*[^*].*$", re.MULTILINE)
_BULLET_DASH = re.compile(r"^\s*+-.*$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*[^\n*]*\*\*")
_CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD_END = frozenset(".,?!'\"")


def _satisfies_relation(count: int, relation: str, bound: int) -> bool:
    """Whether a count satisfies the relation `less than` or `at least` to a bound.

    Raises:
        ValueError: The relation is neither of the two, which are all of the data set.
    """
    if relation not in ("less than", "at least"):
        raise ValueError(f"unknown relation {relation!r}; known: less than, at least")
    return count < bound if relation == "less than" else count >= bound


def keyword_existence(text: str, arguments: Arguments) -> bool:
    """Whether every keyword occurs in the text."""
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in arguments["keywords"])


def keyword_frequency(text: str, arguments: Arguments) -> bool:
    """Whether a keyword occurs as often as the relation demands."""
    count = len(re.findall(arguments["keyword"], text, re.IGNORECASE))
    return _satisfies_relation(count, arguments["relation"], arguments["frequency"])


def forbidden_words(text: str, arguments: Arguments) -> bool:
    """Whether no forbidden word occurs in the text."""
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in arguments["forbidden_words"])


def letter_frequency(text: str, arguments: Arguments) -> bool:
    """Whether a letter occurs as often as the relation demands."""
    count = text.lower().count(arguments["letter"].lower())
    return _satisfies_relation(count, arguments["let_relation"], arguments["let_frequency"])


def response_language(text: str, arguments: Arguments) -> bool:
    """Whether the text is in the language of the instruction."""
    return detect_language(text) in (None, arguments["language"])


def number_sentences(text: str, arguments: Arguments) -> bool:
    """Whether the number of sentences satisfies the relation."""
    return _satisfies_relation(len(split_sentences(text)), arguments["relation"], arguments["num_sentences"])


def number_paragraphs(text: str, arguments: Arguments) -> bool:
    """Whether the text has exactly `num_paragraphs` paragraphs, separated by `***`.

    Only the first and the last paragraph may be empty, and then they are not counted.
    """
    paragraphs = _PARAGRAPH_STARS.split(text)
    if not all(paragraph.strip() for paragraph in paragraphs[1:-1]):
        return False
    return bool(sum(bool(paragraph.strip()) for paragraph in paragraphs) == arguments["num_paragraphs"])


def number_words(text: str, arguments: Arguments) -> bool:
    """Whether the number of words satisfies the relation."""
    return _satisfies_relation(len(re.findall(r"\w+", text)), arguments["relation"], arguments["num_words"])


def nth_paragraph_first_word(text: str, arguments: Arguments) -> bool:
    """Whether the `nth_paragraph` begins with `first_word`, and the number of paragraphs is right.

    Blank lines separate paragraphs. Empty paragraphs are not counted but keep their position.
    """
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    nth = arguments["nth_paragraph"]
    if nth > count or not paragraphs[nth - 1].strip():
        return False
    word = paragraphs[nth - 1].split()[0].lstrip("'").lstrip('"').lower()
    end = next((place for place, letter in enumerate(word) if letter in _WORD_END), len(word))
    return bool(count == arguments["num_paragraphs"] and word[:end] == arguments["first_word"].lower())


def number_placeholders(text: str, arguments: Arguments) -> bool:
    """Whether the text has at least `num_placeholders` texts in square brackets.

    A placeholder is on one line.
    """
    count = sum("[" in piece for line in text.split("\n") for piece in line.split("]")[:-1])
    return bool(count >= arguments["num_placeholders"])


def postscript(text: str, arguments: Arguments) -> bool:
    """Whether the text has a postscript with the marker of the instruction."""
    marker = arguments["postscript_marker"]
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, marker.lower()), text.lower()) is not None


def number_bullet_lists(text: str, arguments: Arguments) -> bool:
    """Whether the text has exactly `num_bullets` bullets."""
    text = _BLANK_LINES.sub("\n\n", text)
    count = len(_BULLET_STAR.findall(text)) + len(_BULLET_DASH.findall(text))
    return bool(count == arguments["num_bullets"])


def constrained_response(text: str, arguments: Arguments) -> bool:
    """Whether the text contains one of the three permitted answers."""
    return any(option in text for option in _CONSTRAINED_RESPONSES)


def number_highlighted_sections(text: str, arguments: Arguments) -> bool:
    """Whether the text has at least `num_highlights` passages in asterisks."""
    single = sum(bool(found.strip("*").strip()) for found in _HIGHLIGHT.findall(text))
    double = sum(bool(found[2:-2].strip()) for found in _DOUBLE_HIGHLIGHT.findall(text))
    return bool(single + double >= arguments["num_highlights"])


def multiple_sections(text: str, arguments: Arguments) -> bool:
    """Whether the text has at least `num_sections` numbered section headings."""
    heading = rf"\s?{arguments['section_spliter']}\s?\d+\s?"
    return bool(len(re.split(heading, text)) - 1 >= arguments["num_sections"])


def json_format(text: str, arguments: Arguments) -> bool:
    """Whether the text is JSON, perhaps in a fenced block."""
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str, arguments: Arguments) -> bool:
    """Whether a line has a title between `<<` and `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str, arguments: Arguments) -> bool:
    """Whether the text is two different responses, separated by six asterisks."""
    pieces = text.split("******")
    if not all(piece.strip() for piece in pieces[1:-1]):
        return False
    responses = [piece.strip() for piece in pieces if piece.strip()]
    return len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, arguments: Arguments) -> bool:
    """Whether the text begins with the prompt."""
    return text.strip().lower().startswith(arguments["prompt_to_repeat"].strip().lower())


def end_checker(text: str, arguments: Arguments) -> bool:
    """Whether the text ends with a phrase."""
    return text.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower())


def quotation(text: str, arguments: Arguments) -> bool:
    """Whether the text is in double quotes."""
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def capital_word_frequency(text: str, arguments: Arguments) -> bool:
    """Whether the number of words in capitals satisfies the relation."""
    count = sum(word.isupper() for word in split_words(text))
    return _satisfies_relation(count, arguments["capital_relation"], arguments["capital_frequency"])


def english_capital(text: str, arguments: Arguments) -> bool:
    """Whether the text is English in capital letters."""
    return text.isupper() and detect_language(text) in (None, "en")


def english_lowercase(text: str, arguments: Arguments) -> bool:
    """Whether the text is English in lower case."""
    return text.islower() and detect_language(text) in (None, "en")


def no_comma(text: str, arguments: Arguments) -> bool:
    """Whether the text has no comma."""
    return "," not in text


_INSTRUCTIONS: Mapping[str, tuple[InstructionRule, *tuple[str, ...]]] = {
    "keywords:existence": (keyword_existence, "keywords"),
    "keywords:frequency": (keyword_frequency, "keyword", "frequency", "relation"),
    "keywords:forbidden_words": (forbidden_words, "forbidden_words"),
    "keywords:letter_frequency": (letter_frequency, "letter", "let_frequency", "let_relation"),
    "language:response_language": (response_language, "language"),
    "length_constraints:number_sentences": (number_sentences, "num_sentences", "relation"),
    "length_constraints:number_paragraphs": (number_paragraphs, "num_paragraphs"),
    "length_constraints:number_words": (number_words, "num_words", "relation"),
    "length_constraints:nth_paragraph_first_word": (
        nth_paragraph_first_word,
        *("num_paragraphs", "nth_paragraph", "first_word"),
    ),
    "detectable_content:number_placeholders": (number_placeholders, "num_placeholders"),
    "detectable_content:postscript": (postscript, "postscript_marker"),
    "detectable_format:number_bullet_lists": (number_bullet_lists, "num_bullets"),
    "detectable_format:constrained_response": (constrained_response,),
    "detectable_format:number_highlighted_sections": (number_highlighted_sections, "num_highlights"),
    "detectable_format:multiple_sections": (multiple_sections, "section_spliter", "num_sections"),
    "detectable_format:json_format": (json_format,),
    "detectable_format:title": (title,),
    "combination:two_responses": (two_responses,),
    "combination:repeat_prompt": (repeat_prompt, "prompt_to_repeat"),
    "startend:end_checker": (end_checker, "end_phrase"),
    "startend:quotation": (quotation,),
    "change_case:capital_word_frequency": (capital_word_frequency, "capital_frequency", "capital_relation"),
    "change_case:english_capital": (english_capital,),
    "change_case:english_lowercase": (english_lowercase,),
    "punctuation:no_comma": (no_comma,),
}
"""Rule of every instruction by id, followed by the arguments that the rule reads."""

RULES: Mapping[str, InstructionRule] = {name: rule for name, (rule, *_) in _INSTRUCTIONS.items()}
"""Rule of every instruction of the data set by id."""
NEEDED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(needed) for name, (_, *needed) in _INSTRUCTIONS.items() if needed
}
"""Arguments that every rule reads; a rule without arguments is not listed."""
SENTENCE_RULES = frozenset(("length_constraints:number_sentences", "change_case:capital_word_frequency"))
"""Instructions that need NLTK's sentence data."""
LANGUAGE_RULES = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)
"""Instructions that need the language detector."""
