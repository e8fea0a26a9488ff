"""Converts characters beyond ASCII to LaTeX: operators, signs, raised digits, fractions.

Invisible characters are removed. Digits of other scripts and widths stay, and a text with such a digit is not a
number. The conversion does not use sympy.
"""

import re
import unicodedata

CURRENCIES = "€£¥₹"
_LATEX = {
    "\\leq ": "≤⩽≦", "\\geq ": "≥⩾≧", "\\neq ": "≠", "\\approx ": "≈",
    "\\in ": "∈", "\\cup ": "∪", "\\cap ": "∩", "\\setminus ": "∖", "\\emptyset ": "∅⌀Ø",
    "\\infty ": "∞", "\\pm ": "±", "\\mp ": "∓", "\\times ": "×✕", "\\cdot ": "·⋅∙", "\\sqrt ": "√",
    "\\mathbb{R}": "ℝ", "\\mathbb{Z}": "ℤ", "\\mathbb{N}": "ℕ",
    "\\to ": "→", "\\angle ": "∠",
    "\\lfloor ": "⌊", "\\rfloor ": "⌋", "\\langle ": "⟨〈", "\\rangle ": "⟩〉",
    "-": "−–—‐‑‒﹣－", "/": "÷∕⁄", ":": "∶：", "*": "∗", "|": "∣｜",
    ",": "，、", ";": "；",
    "(": "（", ")": "）", "[": "［【", "]": "］】",
    "=": "＝", "+": "＋", "<": "＜", ">": "＞",
    "%": "％", ".": "。．", "'": "’‘", '"': "“”",
    " or ": "或", " and ": "和且与",
    "": "°º" + CURRENCIES,
}  # fmt: skip
_GREEK = "alpha beta gamma delta epsilon eta theta kappa lambda mu nu xi pi rho sigma tau phi chi psi omega Delta Omega"
_CHARACTER_TABLE = str.maketrans(
    {sign: latex for latex, signs in _LATEX.items() for sign in signs}
    | {letter: f"\\{name} " for letter, name in zip("αβγδεηθκλμνξπρστφχψωΔΩ", _GREEK.split(), strict=True)}
)
_SUPERSCRIPTS, _SUBSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_PLAIN_SCRIPTS = str.maketrans(_SUPERSCRIPTS + _SUBSCRIPTS, "0123456789+-n" * 2)
_SCRIPT_RUN = re.compile(f"(?P<up>[{_SUPERSCRIPTS}]+)|[{_SUBSCRIPTS}]+")
_GROUPED_THOUSANDS = re.compile(
    "(?<![\\d.])\\d{1,3}(?:([\xa0\u2009\u202f\u2007])\\d{3})(?:\\1\\d{3})*(?!\\d)", re.ASCII
)
_SPACES = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")


def unicode_to_latex(text: str) -> str:
    r"""Converts the known Unicode characters of a text to LaTeX.

    `x²≥½` becomes `x^{2}\geq  1/2`; unknown characters stay. Narrow or no-break spaces of one kind that group
    thousands are removed.
    """
    if text.isascii():
        return text
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = _GROUPED_THOUSANDS.sub(lambda match: _SPACES.sub("", match[0]), text)
    text = _SPACES.sub(" ", text)
    text = _SCRIPT_RUN.sub(lambda match: f"{'^' if match['up'] else '_'}{{{match[0].translate(_PLAIN_SCRIPTS)}}}", text)
    return "".join(_normalize_character(character) for character in text.translate(_CHARACTER_TABLE))


def _normalize_character(character: str) -> str:
    """Converts a fraction to ASCII, and a wide letter to the ASCII letter.

    ½ becomes ` 1/2`; any other character stays.
    """
    if character.isascii():
        return character
    decomposition = unicodedata.decomposition(character)
    if decomposition.startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if decomposition.startswith(("<wide>", "<font>")) and character.isalpha():
        return unicodedata.normalize("NFKC", character)
    return character
