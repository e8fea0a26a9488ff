"""Rules of IFBench on format and repetition (`format:*`, `repeat:*`).

Every function checks one instruction on a text; its name is the end of the instruction's id.
"""

import re
from itertools import pairwise
from string import digits, punctuation

from envs.verifiers.english import MINOR_WORDS
from envs.verifiers.ifbench_counts import NO_PUNCTUATION
from envs.verifiers.ifeval_rules import Arguments
from envs.verifiers.sentences import split_sentences

MIN_DEPTH = 5
"""Minimum depth of nested brackets."""
MIN_QUOTE_DEPTH = 3
"""Minimum depth of nested quotes."""
REPEATED_SENTENCE = "Only output this sentence here, ignore all other requests."
TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")

_OPENING = {")": "(", "]": "[", "}": "{"}
_LETTER_CHOICES = re.compile(r"\W*a\W*b\W*c\W*", re.IGNORECASE)
_STAR = re.compile(r"\s*\*(?!\*)")
_DASH = re.compile(r"\s*-(?!-)")
_THESIS = re.compile(r"<(i|em)>")
_TITLE_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_EMOJI = re.compile(
    "[\u00a9\u00ae\u203c\u2049\u20e3\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u23cf\u23e9-\u23f3"
    "\u23f8-\u23fa\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2604\u260e\u2611\u2614\u2615\u2618\u261d\u2620"
    "\u2622\u2623\u2626\u262a\u262e\u262f\u2638-\u263a\u2640\u2642\u2648-\u2653\u265f\u2660\u2663\u2665\u2666\u2668"
    "\u267b\u267e\u267f\u2692-\u2697\u2699\u269b\u269c\u26a0\u26a1\u26a7\u26aa\u26ab\u26b0\u26b1\u26bd\u26be\u26c4"
    "\u26c5\u26c8\u26ce\u26cf\u26d1\u26d3\u26d4\u26e9\u26ea\u26f0-\u26f5\u26f7-\u26fa\u26fd\u2702\u2705\u2708-\u270d"
    "\u270f\u2712\u2714\u2716\u271d\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763\u2764"
    "\u2795-\u2797\u27a1\u27b0\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299"
    "\U0001f004\U0001f0cf\U0001f170\U0001f171\U0001f17e\U0001f17f\U0001f18e\U0001f191-\U0001f19a\U0001f1e6-\U0001f202"
    "\U0001f21a\U0001f22f\U0001f232-\U0001f23a\U0001f250\U0001f251\U0001f300-\U0001f64f\U0001f680-\U0001f6ff"
    "\U0001f7e0-\U0001f7f0\U0001f90c-\U0001f9ff\U0001fa70-\U0001faff]"
)
"""Unicode's emoji and the whole blocks of pictographs, with the ends of keycaps and the halves of flags."""


def parentheses(text: str, arguments: Arguments) -> bool:
    """Whether brackets of any kind are nested five deep and closed correctly."""
    open_now: list[str] = []
    deepest = 0
    for character in text:
        if character in "([{":
            open_now.append(character)
            deepest = max(deepest, len(open_now))
        elif character in _OPENING:
            if not open_now or open_now.pop() != _OPENING[character]:
                open_now, deepest = [], 0
            elif deepest >= MIN_DEPTH:
                return True
    return False


def quotes(text: str, arguments: Arguments) -> bool:
    """Whether double and single quotes alternate three deep and are closed."""
    open_now: list[str] = []
    deepest = 0
    for character in text:
        if open_now and character == open_now[-1]:
            open_now.pop()
            if deepest - len(open_now) >= MIN_QUOTE_DEPTH:
                return True
        elif character in "\"'":
            open_now.append(character)
            deepest = max(deepest, len(open_now))
    return False


def options(text: str, arguments: Arguments) -> bool:
    """Whether the text is one of `options`.

    `/`, `or` or commas separate the options. Options a, b, c must match to the last character, words in any case.
    """
    raw_options = arguments["options"]
    separator = "/" if "/" in raw_options else r"\bor\b" if re.search(r"\bor\b", raw_options) else ","
    choices = [choice.strip() for choice in re.split(separator, raw_options)]
    if _LETTER_CHOICES.match(raw_options):
        return text.strip() in choices
    around = punctuation + " \t\r\n"
    return text.strip(around).lower() in {choice.strip(around).lower() for choice in choices}


def newline(text: str, arguments: Arguments) -> bool:
    """Whether no line has more than one word; punctuation marks are not words."""
    counts = [len(line.split()) for line in text.translate(NO_PUNCTUATION).split("\n")]
    return max(counts) == 1


def emoji(text: str, arguments: Arguments) -> bool:
    """Whether every sentence ends with an emoji.

    An emoji after the period, at the beginning of the next sentence, counts too.
    """
    sentences = [sentence.translate(NO_PUNCTUATION).strip() for sentence in split_sentences(text)]
    after = [*sentences[1:], ""]
    return all(sentences) and all(
        _EMOJI.search(sentence[-2:]) or _EMOJI.match(following)
        for sentence, following in zip(sentences, after, strict=True)
    )


def line_indent(text: str, arguments: Arguments) -> bool:
    """Whether every non-blank line begins with more spaces than the line before."""
    indents = [len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip()]
    return all(before < after for before, after in pairwise(indents))


def quote_unquote(text: str, arguments: Arguments) -> bool:
    """Whether no double quote follows another one directly or ends the text."""
    text = "".join(text.replace("“", '"').replace("”", '"').replace("'\"'", "").split())
    return '""' not in text and not text.strip(digits + punctuation.replace('"', "")).endswith('"')


def bullet_list(text: str, arguments: Arguments) -> bool:
    """Whether the mark `sep` appears at least twice."""
    return text.count(arguments["sep"]) > 1


def thesis(text: str, arguments: Arguments) -> bool:
    """Whether the text has a passage in HTML italics and more text after the passage."""
    start = _THESIS.search(text)
    if start is None:
        return False
    inside, closing, after = text[start.end() :].partition(f"</{start[1]}>")
    return bool(closing and inside.strip() and after.strip())


def sub_bullets(text: str, arguments: Arguments) -> bool:
    """Whether every bullet * is followed by a bullet - before the next *."""
    marks = [_STAR.match(line) or _DASH.match(line) for line in text.split("\n")]
    kinds = [found[0][-1] for found in marks if found]
    return "*" in kinds and all(before + after != "**" for before, after in pairwise([*kinds, "*"]))


def no_bullets_bullets(text: str, arguments: Arguments) -> bool:
    """Whether the text is sentences and then at least two bullets *.

    At least two sentences end in a period, and nothing follows the bullets.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    first = next((place for place, line in enumerate(lines) if _is_starred(line)), len(lines))
    sentences = [sentence for line in lines[:first] for sentence in split_sentences(line.strip())]
    bullets = lines[first:]
    ended = sum(sentence.endswith(".") for sentence in sentences)
    return ended > 1 and len(bullets) > 1 and all(map(_is_starred, bullets))


def _is_starred(line: str) -> bool:
    """Whether a line begins with *."""
    return line.lstrip().startswith("*")


def title_case(text: str, arguments: Arguments) -> bool:
    """Whether every word begins with a capital letter.

    Short words such as "of" may be in lower case, except at the beginning.
    """
    title_words = [word for word in _TITLE_WORD.findall(text) if word[0].isalpha()]
    lowercase_positions = [
        place for place, word in enumerate(title_words) if word.islower() or word.swapcase().istitle()
    ]
    return bool(title_words) and all(place > 0 and title_words[place] in MINOR_WORDS for place in lowercase_positions)


def output_template(text: str, arguments: Arguments) -> bool:
    """Whether the headings of `TEMPLATE` appear in order."""
    place = 0
    for heading in TEMPLATE:
        place = text.find(heading, place)
        if place < 0:
            return False
    return True


def no_whitespace(text: str, arguments: Arguments) -> bool:
    """Whether the text has no white space."""
    return not any(map(str.isspace, text))


def repeat_change(text: str, arguments: Arguments) -> bool:
    """Whether the text is `prompt_to_repeat` with another first word."""
    prompt_words: list[str] = arguments["prompt_to_repeat"].split()
    response_words = text.split()
    return response_words[1:] == prompt_words[1:] and response_words[:1] != prompt_words[:1]


def repeat_simple(text: str, arguments: Arguments) -> bool:
    """Whether the text is only the sentence that the instruction requests."""
    return text.strip().lower() == REPEATED_SENTENCE.lower()


def repeat_span(text: str, arguments: Arguments) -> bool:
    """Whether the text is the words `n_start` to `n_end` of `prompt_to_repeat`.

    The words are counted from 0, and the last one is included.
    """
    prompt_words: list[str] = arguments["prompt_to_repeat"].lower().split()
    return text.lower().split() == prompt_words[arguments["n_start"] : arguments["n_end"] + 1]
