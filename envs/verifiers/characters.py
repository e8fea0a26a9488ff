"""Characters beyond ASCII as LaTeX: operators, signs, raised digits, fractions; invisible ones go. No sympy.

Digits of other scripts and of other widths stay as they are, and a text with one of them is no number.
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
_ONE_BY_ONE = str.maketrans(
    {sign: latex for latex, signs in _LATEX.items() for sign in signs}
    | {letter: f"\\{name} " for letter, name in zip("αβγδεηθκλμνξπρστφχψωΔΩ", _GREEK.split(), strict=True)}
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_AS_WRITTEN = str.maketrans(_RAISED + _LOWERED, "0123456789+-n" * 2)
_SHIFTED = re.compile(f"(?P<up>[{_RAISED}]+)|[{_LOWERED}]+")
_GROUPED = re.compile(
    "(?<![\\d.])\\d{1,3}(?:([\xa0\u2009\u202f\u2007])\\d{3})(?:\\1\\d{3})*(?!\\d)", re.ASCII
)
_SPACES = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")


def in_latex(text: str) -> str:
    """The text with known characters as LaTeX: `x²≥½` is `x^{2}\\geq  1/2`; others stay.

    Thousands behind narrow or no-break spaces of one kind are grouped no more.
    """
    if text.isascii():
        return text
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = _GROUPED.sub(lambda found: _SPACES.sub("", found[0]), text)
    text = _SPACES.sub(" ", text)
    text = _SHIFTED.sub(
        lambda found: f"{'^' if found['up'] else '_'}{{{found[0].translate(_AS_WRITTEN)}}}", text
    )
    return "".join(_latin(character) for character in text.translate(_ONE_BY_ONE))


def _latin(character: str) -> str:
    """½ becomes ` 1/2`, a wide letter the usual one."""
    if character.isascii():
        return character
    decomposition = unicodedata.decomposition(character)
    if decomposition.startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if decomposition.startswith(("<wide>", "<font>")) and character.isalpha():
        return unicodedata.normalize("NFKC", character)
    return character
