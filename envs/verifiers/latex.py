"""LaTeX formulas in one spelling, and cut into their elements. Pure text, no sympy."""

import re

from envs.verifiers.characters import in_latex
from envs.verifiers.units import UNIT_LETTER, unit_in_words

_SIZES = (
    "left right middle displaystyle textstyle scriptstyle limits nolimits "
    "big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr "
    "tiny small normalsize large Large LARGE huge Huge mathstrut strut"
)
_ALIASES = {
    **dict.fromkeys(_SIZES.split(), ""),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "\\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), "\\binom"),
    **dict.fromkeys(("ge", "geqslant", "geqq"), "\\geq "),
    **dict.fromkeys(("le", "leqslant", "leqq"), "\\leq "),
    **dict.fromkeys(("ne", "neq"), "\\neq "),
    **dict.fromkeys(("varnothing", "emptyset"), "\\emptyset "),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("rm", "bf", "it", "pounds", "euro"), ""),
    **dict.fromkeys(("enspace", "thinspace", "medspace", "thickspace"), " "),
    **dict.fromkeys(("lor", "vee"), " or "),
    **dict.fromkeys(("land", "wedge"), " and "),
    "lt": "<", "gt": ">", "colon": ":", "ratio": ":",
    "lbrace": "\\{", "rbrace": "\\}", "langle": "(", "rangle": ")",
    "lg": "\\log_{10} ", "R": "\\mathbb{R}", "backslash": "\\setminus ",
}  # fmt: skip
_COMMAND = re.compile(r"\\([a-zA-Z]+)\s*")
_ESCAPED_TWICE = re.compile(
    r"\\\\(?=(?:left|right|[dt]?frac|sqrt|text|pi|cdot|times|leq?|geq?|infty|cup|boxed|in)(?![a-zA-Z]))"
)
_COLOUR = r"\\(?:text)?color(?:box)?\s*(?:\[[^\]]*\])?\{[^{}]*\}"
_COLOURED = re.compile(rf"(?<![\^_]){_COLOUR}\s*\{{([^{{}}]*(?<!\\))\}}")
_UNSEEN = re.compile(rf"{_COLOUR}|\\(?:tag\*?|label)\s*\{{[^{{}}]*\}}")
_ROOM = re.compile(r"\\(?:[hv]space\*?|[hv]?phantom)\s*\{[^{}]*\}")
_TWO_BRACES = re.compile(r"(?<!\\)\{\s*\{([^{}]*(?<!\\))\}\s*\}")
_NO_SIDE = re.compile(r"\\(?:left|right)\s*\.")
_SPACE = r"(?<!\\)\\[,;:!> ]"
_STEPS: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (mark, re.compile(pattern), replacement)
    for mark, pattern, replacement in (
        ("\\!", r"(?<=\d),?\\!\s*(?=\d{3}(?!\d))", ""),
        ("\\", rf"(?<=\d)(?:{_SPACE}|~|\{{,\}}|,{_SPACE})+(?=\d{{3}}(?!\d))", ""),
        ("{,}", rf"(?<=\d)(?:{_SPACE}|~|\{{,\}}|,{_SPACE})+(?=\d{{3}}(?!\d))", ""),
        ("~", r"(?<=\d)~(?=\d{3}(?!\d))", ""),
        ("\\!", r"(?<!\\)\\!", ""),
        ("quad", r"(?<=[\d)}\]])\s*\\q?quad\s*(?=-?[\d(]|-?\\(?:frac|sqrt|pi)|[a-zA-Z](?:_\S)?\s*=)", ", "),
        ("\\", rf"{_SPACE}|\\q?quad(?![a-zA-Z])", " "),
        ("~", r"~", " "),
        ("bmatrix", r"\{bmatrix\}", "{pmatrix}"),
        ("circ", r"\^\s*(?:\\circ|\{\s*\\circ\s*\})(?![a-zA-Z])", ""),
        ("degree", r"(?:\^\s*)?\\degree(?![a-zA-Z])", ""),
        ("\\", r"(?<!\\)\\[()\[\]]", ""),
        ("$", r"\\?\$", ""),
        ("%", r"\\?%", ""),
        ("approx", r"^\\approx(?![a-z])", ""),
        ("sqrt", r"(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        ("pi", r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        ("log", r"(?<![\\a-zA-Z])log(?=[ (_^])", r"\\log "),
        ("\\prime", r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-z]))", "'"),
        ("\\prime", r"\^\s*\{\s*\\prime\s*\\prime\s*\}", "''"),
        ("**", r"\*\*", "^"),
        (" to ", r"(?<=\d) to (?=\d)", ":"),
        ("!=", r"!=", r"\\neq "),
        ("<=", r"<=", r"\\leq "),
        (">=", r">=", r"\\geq "),
        ("\\infty", r"(?<![\w)}])\+\s*\\infty", r"\\infty"),
        ("\\{", r"\\\{\s*\\\}", r"\\emptyset"),
        ("choose", r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        (")_", r"(?<![\w)}\]])\((\d[\da-zA-Z]*|[a-z]+|[\dA-F]+(?=\)_\{?16))\)(?=_)", r"\1"),
        ("_{(", r"_\{\((\d+)\)\}", r"_{\1}"),
    )
)
"""A mark without which there is nothing to do, what is replaced, and by what."""
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|boldsymbol|mbox|hbox"
    r"|fbox|underline|emph|bm|ensuremath|operatorname)\s*\{([^{}]*)\}"
)
_FONTS_IN_FONTS = 3
_MATRIX_NAMES = r"\{(?:array|matrix|smallmatrix)\}"
_BRACKETED_ARRAY = re.compile(
    rf"[(\[]\s*\\begin{_MATRIX_NAMES}(?:\{{[lcr| ]*\}})?(.*?)\\end{_MATRIX_NAMES}\s*[)\]]", re.DOTALL
)
_ROW_NAMES = r"\{(?:cases|aligned|array|gathered|align\*?|split)\}"
_ROWS = re.compile(rf"(?:\\\{{)?\s*\\begin{_ROW_NAMES}(?:\{{[lcr| ]*\}})?(.*?)\\end{_ROW_NAMES}", re.DOTALL)
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?")
_LONGEST_ENVIRONMENT = 2000
_ARGUMENT = re.compile(r"\s*(\d|[a-zA-Z]|\{|\\[a-zA-Z]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z])")
_SHORT_GROUP = re.compile(r"([\^_])\s*\{\s*([a-zA-Z0-9])\s*\}")
_LOOSE_SPACE = re.compile(r"\s+(?![a-zA-Z0-9])|(?<![a-zA-Z0-9])\s+")
_THOUSANDS = re.compile(r"(?<![\d.,_^])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_EDGES = " \t\r\n*`"
_TRAILING = _EDGES + ".;,\\"
_QUOTES = (("``", "''"), ("''", "''"), ("`", "'"), ("'", "'"), ('"', '"'), ("“", "”"), ("‘", "’"))


def canonical(text: str) -> str:
    """One spelling of a LaTeX or plain text: sizes, colours, spacing, currency, per cent, degrees and fonts go.

    A space stays only between two letters or digits, where it means something (`1 1/2`, `5 cm`).
    """
    text = in_latex(_without_edges(text))
    if "\\" in text:
        text = _without_commands(text)
    for mark, pattern, replacement in _STEPS:
        if mark in text:
            text = pattern.sub(replacement, text)
    text = _without_edges(" ".join(text.split()))
    if text[:1] not in "([{\\":
        text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)
    text = _LOOSE_SPACE.sub("", text)
    text = _braced_fractions(text)
    if "\\sqrt" in text:
        text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    return without_brackets(_SHORT_GROUP.sub(r"\1\2", text))


def _without_edges(text: str) -> str:
    """Strip Markdown, full stops and paired quotation marks; a single one is a prime."""
    before = None
    while text != before:
        before, text = text, text.strip(" \t\r\n*").rstrip(_TRAILING)
        for opening, closing in _QUOTES:
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
                break
    return text.strip(_EDGES).lstrip("'\"“‘")


def _without_commands(text: str) -> str:
    """One name for commands that have several, without sizes, fonts and colours."""
    if "\\begin" not in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    text = _NO_SIDE.sub("", _UNSEEN.sub("", _ROOM.sub(" ", _COLOURED.sub(r"\1", text))))
    text = _COMMAND.sub(lambda found: _ALIASES.get(found[1], found[0]), text)
    if len(text) <= _LONGEST_ENVIRONMENT and "\\begin" not in text:
        text = _ROW_END.sub(", ", text)
    elif len(text) <= _LONGEST_ENVIRONMENT:
        # Matrices under one name, lines of equations as a list; a line with two parts or more stays as it is.
        text = _ROWS.sub(_listed_rows, _BRACKETED_ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text))
    text = _TWO_BRACES.sub(r"{\1}", UNIT_LETTER.sub(unit_in_words, text))
    for _ in range(_FONTS_IN_FONTS):
        text, count = _WORDS.subn(_spaced_words, text)
        if not count:
            break
    return text


def _listed_rows(found: re.Match[str]) -> str:
    rows = [row.strip() for row in _ROW_END.split(found[1]) if row.strip()]
    parts = [[part for part in row.split("&") if part.strip()] for row in rows]
    if any(len(row) > 1 and not row[1].lstrip().startswith("=") for row in parts):
        return found[0]
    return ", ".join("".join(row).strip().rstrip(",;") for row in parts)


def _spaced_words(found: re.Match[str]) -> str:
    inner = found[1].strip()
    if len(inner) != 1 and found[1]:
        return f" {inner} "
    before = found.string.rfind("\\", 0, found.start())
    behind_command = before >= 0 and found.string[before + 1 : found.start()].isalpha()
    return f" {inner}" if behind_command else inner


def _braced_fractions(text: str) -> str:
    """`\\frac12`, `\\frac1{12}` and `\\frac\\pi3` with both arguments in braces."""
    if len(text) > _LONGEST_ENVIRONMENT:
        return text
    start = text.rfind("\\frac")
    while start >= 0:  # the last first, so that those inside an argument are done
        top = _argument(text, start + len("\\frac"))
        bottom = _argument(text, top[1]) if top else None
        if top and bottom:
            text = f"{text[:start]}\\frac{{{top[0]}}}{{{bottom[0]}}}{text[bottom[1] :]}"
        start = text.rfind("\\frac", 0, start)
    return text


def _argument(text: str, start: int) -> tuple[str, int] | None:
    """Read an argument of a command, without braces, and its end."""
    found = _ARGUMENT.match(text, start)
    if found is None:
        return None
    if found[1] == "{":
        depth = 1
        for token in _BRACE.finditer(text, found.end()):
            depth += {"{": 1, "}": -1}.get(token.group(), 0)
            if depth == 0:
                return text[found.end() : token.start()], token.end()
        return None
    end = found.end()
    for _ in range({"\\frac": 2, "\\sqrt": 1}.get(found[1], 0)):
        inner = _argument(text, end)
        if inner is None:
            return None
        end = inner[1]
    return text[found.start(1) : end], end


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
        comma = comma or (character in ",;" and depth <= 0)
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
