"""Normalizes math answers in LaTeX or plain text to one spelling, and splits at separators.

The functions work on text and do not use sympy.
"""

import re

from envs.verifiers.characters import unicode_to_latex
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
_COLOURED_TEXT = re.compile(rf"(?<![\^_]){_COLOUR}\s*\{{([^{{}}]*(?<!\\))\}}")
_INVISIBLE_COMMAND = re.compile(rf"{_COLOUR}|\\(?:tag\*?|label)\s*\{{[^{{}}]*\}}")
_SPACING_COMMAND = re.compile(r"\\(?:[hv]space\*?|[hv]?phantom)\s*\{[^{}]*\}")
_TWO_BRACES = re.compile(r"(?<!\\)\{\s*\{([^{}]*(?<!\\))\}\s*\}")
_NO_SIDE = re.compile(r"\\(?:left|right)\s*\.")
_SPACE = r"(?<!\\)\\[,;:!> ]"
_REPLACEMENTS: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
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
"""Replacements in order: a mark that the text must contain, the pattern, and the replacement."""
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
"""Characters that are removed from the end of a text."""
_QUOTES = (("``", "''"), ("''", "''"), ("`", "'"), ("'", "'"), ('"', '"'), ("“", "”"), ("‘", "’"))


def canonical_text(text: str) -> str:
    """Returns the canonical spelling of a LaTeX or plain text.

    Sizes, colours, spacing, currency, per cent, degrees and fonts are removed. A space stays only between two
    letters or digits, where it has a meaning (`1 1/2`, `5 cm`).
    """
    text = unicode_to_latex(_strip_edges(text))
    if "\\" in text:
        text = _normalize_commands(text)
    for mark, pattern, replacement in _REPLACEMENTS:
        if mark in text:
            text = pattern.sub(replacement, text)
    text = _strip_edges(" ".join(text.split()))
    if text[:1] not in "([{\\":
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    text = _LOOSE_SPACE.sub("", text)
    text = _brace_fractions(text)
    if "\\sqrt" in text:
        text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    return strip_brackets(_SHORT_GROUP.sub(r"\1\2", text))


def _strip_edges(text: str) -> str:
    """Strips Markdown, full stops and paired quotation marks; a single mark is a prime."""
    before = None
    while text != before:
        before, text = text, text.strip(" \t\r\n*").rstrip(_TRAILING)
        for opening, closing in _QUOTES:
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
                break
    return text.strip(_EDGES).lstrip("'\"“‘")


def _normalize_commands(text: str) -> str:
    """Replaces aliases of commands, and removes sizes, fonts and colours."""
    if "\\begin" not in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    text = _NO_SIDE.sub("", _INVISIBLE_COMMAND.sub("", _SPACING_COMMAND.sub(" ", _COLOURED_TEXT.sub(r"\1", text))))
    text = _COMMAND.sub(lambda match: _ALIASES.get(match[1], match[0]), text)
    if len(text) <= _LONGEST_ENVIRONMENT and "\\begin" not in text:
        text = _ROW_END.sub(", ", text)
    elif len(text) <= _LONGEST_ENVIRONMENT:
        # Give all matrices one name, and write lines of equations as a list.
        text = _ROWS.sub(_rows_as_list, _BRACKETED_ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text))
    text = _TWO_BRACES.sub(r"{\1}", UNIT_LETTER.sub(unit_in_words, text))
    for _ in range(_FONTS_IN_FONTS):
        text, count = _WORDS.subn(_spaced_words, text)
        if not count:
            break
    return text


def _rows_as_list(match: re.Match[str]) -> str:
    """Converts the rows of an environment to a list.

    The environment stays unchanged if a row has several columns and is not an equation.
    """
    rows = [row.strip() for row in _ROW_END.split(match[1]) if row.strip()]
    parts = [[part for part in row.split("&") if part.strip()] for row in rows]
    if any(len(row) > 1 and not row[1].lstrip().startswith("=") for row in parts):
        return match[0]
    return ", ".join("".join(row).strip().rstrip(",;") for row in parts)


def _spaced_words(match: re.Match[str]) -> str:
    """Returns the text inside a font command, with spaces around words."""
    inner = match[1].strip()
    if len(inner) != 1 and match[1]:
        return f" {inner} "
    before = match.string.rfind("\\", 0, match.start())
    behind_command = before >= 0 and match.string[before + 1 : match.start()].isalpha()
    return f" {inner}" if behind_command else inner


def _brace_fractions(text: str) -> str:
    r"""Puts both arguments of every fraction in braces, as in `\frac12` and `\frac\pi3`."""
    if len(text) > _LONGEST_ENVIRONMENT:
        return text
    start = text.rfind("\\frac")
    while start >= 0:  # from the last, so that the fractions inside an argument are already converted
        top = _read_argument(text, start + len("\\frac"))
        bottom = _read_argument(text, top[1]) if top else None
        if top and bottom:
            text = f"{text[:start]}\\frac{{{top[0]}}}{{{bottom[0]}}}{text[bottom[1] :]}"
        start = text.rfind("\\frac", 0, start)
    return text


def _read_argument(text: str, start: int) -> tuple[str, int] | None:
    """Returns the argument of a command without braces, and its end position.

    The result is None if no argument begins at `start`.
    """
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
        inner = _read_argument(text, end)
        if inner is None:
            return None
        end = inner[1]
    return text[found.start(1) : end], end


def strip_brackets(text: str) -> str:
    """Removes brackets or braces around a whole text that is not a list.

    ((7)) becomes 7, and (1,2) stays.
    """
    count = 0
    while count < len(text) // 2 and (text[count], text[-1 - count]) in (("(", ")"), ("{", "}")):
        count += 1
    inner = text[count : len(text) - count]
    depth, lowest, comma = 0, 0, False
    for character in inner if count else "":
        depth += (character in "({[") - (character in ")}]")
        lowest = min(lowest, depth)
        comma = comma or (character in ",;" and depth <= 0)
    kept_brackets = -lowest + (1 if comma and lowest == 0 else 0)
    if depth or not inner or kept_brackets >= count:
        return text
    return text[count - kept_brackets : len(text) - count + kept_brackets]


def split_top_level(text: str, separators: tuple[str, ...]) -> list[str]:
    r"""Splits a text at separators outside all brackets and braces.

    `\{` and `\}` count as brackets.
    """
    pieces, depth, piece_start, position = [], 0, 0, 0
    while position < len(text):
        found = next((mark for mark in separators if depth == 0 and text.startswith(mark, position)), None)
        if found is not None:
            pieces.append(text[piece_start:position])
            position += len(found)
            piece_start = position
            continue
        depth += (text[position] in "({[") - (text[position] in ")}]")
        position += 1
    return [*pieces, text[piece_start:]]
