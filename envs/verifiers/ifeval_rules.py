"""The 25 kinds of instructions of IFEval (Zhou et al. 2023), each a function of the response and its arguments.

The rules are those of the published evaluation, oddities included (a keyword is a regular expression, an
undecidable language counts as followed). Where its regular expressions take quadratic time on hostile text, the
same matches are found in one pass.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from envs.verifiers.language import detect_language
from envs.verifiers.sentences import split, words

Arguments = Mapping[str, Any]
Rule = Callable[[str, Arguments], bool]

_PARAGRAPH_STARS = re.compile(r"\s?\*\*\*\s?")
_BULLET_STAR = re.compile(r"^\s*+\*[^*].*$", re.MULTILINE)
_BULLET_DASH = re.compile(r"^\s*+-.*$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*[^\n*]*\*\*")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD_END = frozenset(".,?!'\"")


def _related(count: int, relation: str, bound: int) -> bool:
    """`less than` or `at least`, all of the data set. Raises ValueError for another relation."""
    if relation not in ("less than", "at least"):
        raise ValueError(f"unknown relation {relation!r}; known: less than, at least")
    return count < bound if relation == "less than" else count >= bound


def keyword_existence(text: str, arguments: Arguments) -> bool:
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in arguments["keywords"])


def keyword_frequency(text: str, arguments: Arguments) -> bool:
    count = len(re.findall(arguments["keyword"], text, re.IGNORECASE))
    return _related(count, arguments["relation"], arguments["frequency"])


def forbidden_words(text: str, arguments: Arguments) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in arguments["forbidden_words"])


def letter_frequency(text: str, arguments: Arguments) -> bool:
    count = text.lower().count(arguments["letter"].lower())
    return _related(count, arguments["let_relation"], arguments["let_frequency"])


def response_language(text: str, arguments: Arguments) -> bool:
    return detect_language(text) in (None, arguments["language"])


def number_sentences(text: str, arguments: Arguments) -> bool:
    return _related(len(split(text)), arguments["relation"], arguments["num_sentences"])


def number_paragraphs(text: str, arguments: Arguments) -> bool:
    """Separated by `***`; only the first and the last may be empty, and are not counted then."""
    paragraphs = _PARAGRAPH_STARS.split(text)
    if not all(paragraph.strip() for paragraph in paragraphs[1:-1]):
        return False
    return bool(sum(bool(paragraph.strip()) for paragraph in paragraphs) == arguments["num_paragraphs"])


def number_words(text: str, arguments: Arguments) -> bool:
    return _related(len(re.findall(r"\w+", text)), arguments["relation"], arguments["num_words"])


def nth_paragraph_first_word(text: str, arguments: Arguments) -> bool:
    """Paragraphs are separated by blank lines; empty ones are not counted but keep their place."""
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    nth = arguments["nth_paragraph"]
    if nth > count or not paragraphs[nth - 1].strip():
        return False
    word = paragraphs[nth - 1].split()[0].lstrip("'").lstrip('"').lower()
    end = next((place for place, letter in enumerate(word) if letter in _WORD_END), len(word))
    return bool(count == arguments["num_paragraphs"] and word[:end] == arguments["first_word"].lower())


def number_placeholders(text: str, arguments: Arguments) -> bool:
    """Texts in square brackets on one line."""
    count = sum("[" in piece for line in text.split("\n") for piece in line.split("]")[:-1])
    return bool(count >= arguments["num_placeholders"])


def postscript(text: str, arguments: Arguments) -> bool:
    marker = arguments["postscript_marker"]
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, marker.lower()), text.lower()) is not None


def number_bullet_lists(text: str, arguments: Arguments) -> bool:
    text = _BLANK_LINES.sub("\n\n", text)
    count = len(_BULLET_STAR.findall(text)) + len(_BULLET_DASH.findall(text))
    return bool(count == arguments["num_bullets"])


def constrained_response(text: str, arguments: Arguments) -> bool:
    return any(option in text for option in _CONSTRAINED)


def number_highlighted_sections(text: str, arguments: Arguments) -> bool:
    single = sum(bool(found.strip("*").strip()) for found in _HIGHLIGHT.findall(text))
    double = sum(bool(found[2:-2].strip()) for found in _DOUBLE_HIGHLIGHT.findall(text))
    return bool(single + double >= arguments["num_highlights"])


def multiple_sections(text: str, arguments: Arguments) -> bool:
    heading = rf"\s?{arguments['section_spliter']}\s?\d+\s?"
    return bool(len(re.split(heading, text)) - 1 >= arguments["num_sections"])


def json_format(text: str, arguments: Arguments) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str, arguments: Arguments) -> bool:
    """A line with something between `<<` and `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str, arguments: Arguments) -> bool:
    """Exactly two different texts, separated by six asterisks."""
    pieces = text.split("******")
    if not all(piece.strip() for piece in pieces[1:-1]):
        return False
    responses = [piece.strip() for piece in pieces if piece.strip()]
    return len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, arguments: Arguments) -> bool:
    return text.strip().lower().startswith(arguments["prompt_to_repeat"].strip().lower())


def end_checker(text: str, arguments: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower())


def quotation(text: str, arguments: Arguments) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def capital_word_frequency(text: str, arguments: Arguments) -> bool:
    count = sum(word.isupper() for word in words(text))
    return _related(count, arguments["capital_relation"], arguments["capital_frequency"])


def english_capital(text: str, arguments: Arguments) -> bool:
    return text.isupper() and detect_language(text) in (None, "en")


def english_lowercase(text: str, arguments: Arguments) -> bool:
    return text.islower() and detect_language(text) in (None, "en")


def no_comma(text: str, arguments: Arguments) -> bool:
    return "," not in text


_KINDS: Mapping[str, tuple[Rule, *tuple[str, ...]]] = {
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
"""By id, the rule of an instruction, and what it reads from its arguments."""

RULES: Mapping[str, Rule] = {name: rule for name, (rule, *_) in _KINDS.items()}
"""Every instruction of the data set by its id."""
NEEDED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(needed) for name, (_, *needed) in _KINDS.items() if needed
}
"""What each rule reads from its arguments; rules that are not listed read nothing."""
SENTENCE_RULES = frozenset(("length_constraints:number_sentences", "change_case:capital_word_frequency"))
LANGUAGE_RULES = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)
