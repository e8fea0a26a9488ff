"""LaTeX formulas in one spelling, and cut into their elements. Pure text, no sympy."""

import re
import unicodedata

from envs.verifiers.numbers import is_unit

_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "÷": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "∪": "\\cup ",
        "≤": "\\leq ",
        "≥": "\\geq ",
        "√": "\\sqrt ",
        "°": "",
        "²": "^2",
        "³": "^3",
        "\xa0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "“": '"',
        "”": '"',
    }
)
_SPACE = r"(?<!\\)\\[,;:!> ]"
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d),?\\!\s*(?=\d{3}(?!\d))", ""),
        (rf"(?<=\d)(?:{_SPACE}|\{{,\}}|,{_SPACE})+(?=\d{{3}}(?!\d))", ""),
        (r"\\(?:left|right|displaystyle|textstyle|limits|big|Big|bigg|Bigg)(?![a-zA-Z])\s*", ""),
        (r"(?<!\\)\\!", ""),
        (rf"{_SPACE}|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:ge|geqslant)(?![a-zA-Z])", r"\\geq"),
        (r"\\(?:le|leqslant)(?![a-zA-Z])", r"\\leq"),
        (r"\{bmatrix\}", "{pmatrix}"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|\\degree)(?![a-zA-Z])|\\degree(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[()\[\]]|\\?\$", ""),
        (r"\\?%", ""),
        (r"\*\*", "^"),
    )
)
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_FRACTION_ARGUMENTS = re.compile(r"\\frac\s*(\d|[a-zA-Z]|\{)\s*(\d|[a-zA-Z]|\{)?")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z])")
_SHORT_GROUP = re.compile(r"([\^_])\s*\{\s*([a-zA-Z0-9])\s*\}")
_LOOSE_SPACE = re.compile(r"\s+(?![a-zA-Z0-9])|(?<![a-zA-Z0-9])\s+")
_THOUSANDS = re.compile(r"(?<![\d.,_^])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_EDGES = " \t\r\n*`'\"“”"
_TRAILING = _EDGES + ".;,"


def canonical(text: str) -> str:
    """One spelling of a LaTeX or plain text: sizes, spacing, currency, per cent, degrees and fonts are gone.

    A space stays only between two letters or digits, where it means something (`1 1/2`, `5 cm`).
    """
    text = text.strip(_EDGES).rstrip(_TRAILING).translate(_UNICODE)
    if not text.isascii():
        text = "".join(_vulgar(character) for character in text)
    text = _WORDS.sub(_spaced_words, text)
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split()).strip(_EDGES).rstrip(_TRAILING)
    if text[:1] not in "([{\\":
        text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)
    text = _LOOSE_SPACE.sub("", text)
    text = _braced_fractions(text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    return without_brackets(_SHORT_GROUP.sub(r"\1\2", text))


def _vulgar(character: str) -> str:
    """½ becomes ` 1/2`; other characters stay."""
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKD", character).replace("\u2044", "/")
    return character


def _spaced_words(found: re.Match[str]) -> str:
    inner = found[1].strip()
    return f" {inner} " if len(inner) > 1 else inner


def _braced_fractions(text: str) -> str:
    """`\\frac12` and `\\frac1{12}` with both arguments in braces."""
    if "\\frac" not in text:
        return text
    pieces, position = [], 0
    for found in _FRACTION_ARGUMENTS.finditer(text):
        top, bottom = found[1], found[2]
        if top == "{" or not bottom:
            continue
        pieces.append(text[position : found.start()] + f"\\frac{{{top}}}")
        position = found.start(2) if bottom == "{" else found.end(2)
        if bottom != "{":
            pieces.append(f"{{{bottom}}}")
    text = "".join(pieces) + text[position:]
    return re.sub(r"\\frac(\{[^{}]*\})\s*(\d|[a-zA-Z])", r"\\frac\1{\2}", text)


def without_brackets(text: str) -> str:
    """Without brackets or braces that surround all of a text that is not a list: ((7)) is 7, (1,2) stays."""
    count = 0
    while count < len(text) // 2 and (text[count], text[-1 - count]) in (("(", ")"), ("{", "}")):
        count += 1
    inner = text[count : len(text) - count]
    depth, lowest, comma = 0, 0, False
    for character in inner if count else "":
        depth += (character in "({[") - (character in ")}]")
        lowest = min(lowest, depth)
        comma = comma or (character == "," and depth <= 0)
    kept = -lowest + (1 if comma and lowest == 0 else 0)
    if depth or not inner or kept >= count:
        return text
    return text[count - kept : len(text) - count + kept]


def split_top(text: str, separators: tuple[str, ...]) -> list[str]:
    """Cut at separators that stand outside every bracket and brace. `\\{` and `\\}` count as brackets."""
    pieces, depth, begun, position = [], 0, 0, 0
    while position < len(text):
        found = next((mark for mark in separators if depth == 0 and text.startswith(mark, position)), None)
        if found is not None:
            pieces.append(text[begun:position])
            position += len(found)
            begun = position
            continue
        depth += (text[position] in "({[") - (text[position] in ")}]")
        position += 1
    return [*pieces, text[begun:]]


def split_unit(text: str) -> tuple[str, str]:
    """A canonical text and the unit in words behind it (empty without one): `5 cm^2` is 5 and cm^2."""
    found = _UNIT.fullmatch(text)
    if found is None or not is_unit(found["unit"]):
        return text, ""
    return found["value"].strip(), found["unit"].casefold().replace("feet", "foot").rstrip("es.")


_UNIT = re.compile(
    r"(?P<value>[^a-zA-Z]*[\d)}]|.*\})\s*(?P<unit>(?<=[\s})])[a-zA-Z]{2,}\.?(?:[ /][a-zA-Z.]+)*(?:\^[23])?)"
)
