"""Detects reference answers that are text although they look like arithmetic.

Examples are `2024-05-17`, `10-20`, `555-1234`, `v2.0.1`, `H2O` and `e4`. Such answers are compared as written.
Nobody writes a reference answer that is a difference of plain numbers still to be calculated, so `3-2` is a score.
`$3-2$`, `3 - 2` and a minus sign (U+2212) are formulas, and `1/2` is a number. The functions do not use sympy.
"""

import re
from functools import lru_cache

from envs.verifiers.latex import split_top_level
from envs.verifiers.numbers import is_unit, parse_number

MAX_CHARACTERS = 200
"""Maximum length of a text reference answer."""
MAX_LATEX_CHARACTERS = 4 * MAX_CHARACTERS
_CHEMICAL_ELEMENTS = (
    "He Li Be Ne Na Mg Al Si Cl Ar Ca Sc Ti Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Zr Nb Mo Tc Ru Rh Pd Ag Cd "
    "In Sn Sb Te Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr "
    "Ra Ac Th Pa Np Pu Am Cm Bk Cf Es Fm Md No Lr H B C N O F P S K V Y I W U"
)
_CHEMICAL_ELEMENT = f"(?:{'|'.join(_CHEMICAL_ELEMENTS.split())})"
_COUNT = r"(?:_?\d+|_\{\d+\})?"
_MONEY = r"(?:\\?\$|[€£¥₹])?"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?"
_DASH = r"(?:-{1,2}|\s*[‐‑‒–—]\s*)"
_RANGE = re.compile(
    rf"{_MONEY}{_NUMBER}(?:\\?%)?{_DASH}{_MONEY}{_NUMBER}(?:\s?(?:\\?%|[€£¥₹])|\s+(?P<unit>[A-Za-z][A-Za-z .]+))?",
    re.ASCII,
)
"""A range, a score, a month, a local telephone number."""
_TELEPHONE = r"\+\d+(?:[- .]\d+)+|(?:\+?\d{1,3}[- .]?)?\(\d{2,4}\) ?\d{2,}(?:[- .]\d{2,})+"
_GROUPS = r"\d+(?:(?:-\d+){2,}|(?:/\d+){2,}|(?:\.\d+){2,})|(?:\d+-){3}X|\d{9}X"
"""A date, a number of several groups, an address, an ISBN."""
_VERSION = r"[vV]\.?\d+(?:\.\d+)+|[vV]?\d+(?:\.\d+)+-?[a-z]{1,5}\.?\d+"
_COORDINATES = r"""\d[\d.]*\s?°[\d.°'"′″ ]*[NSEW](?:[, ]+\d[\d.]*\s?°[\d.°'"′″ ]*[NSEW])?"""
_MOVE = r"(?:[KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](?:=[QRBN])?|O-O(?:-O)?)[+#]?"
_LETTERS_AND_DIGITS = r"[A-Za-z0-9]*[A-Za-z]\d[A-Za-z0-9]*"
"""Letters with digits behind them: a code, a cell, a formula of chemistry."""
_OTHER_TEXT = re.compile(f"{_TELEPHONE}|{_GROUPS}|{_VERSION}|{_COORDINATES}|{_MOVE}|{_LETTERS_AND_DIGITS}", re.ASCII)
_CHEMISTRY = re.compile(
    rf"\d*(?:{_CHEMICAL_ELEMENT}{_COUNT}|[(\[](?:{_CHEMICAL_ELEMENT}{_COUNT}|\((?:{_CHEMICAL_ELEMENT}{_COUNT})+\){_COUNT})+[)\]]{_COUNT})+"
    r"(?:\^?\{?\d*[-+]\}?)?",
    re.ASCII,
)
_COUNTS = re.compile(r"[A-Za-z)\]](?:_\{?)?(\d+)", re.ASCII)
_CHEMICAL_SYMBOL = re.compile(r"[HCNO]|[A-Z][a-z]")
_SUBSCRIPT = re.compile(r"_\{?(\d+)\}?", re.ASCII)
_CODE = re.compile(r"0\d{3,}|[A-Z]{1,3}-\d{2,}", re.ASCII)
"""A number whose first zeros count, such as a telephone number or a postal code; letters and a number."""
_NON_UNIT_WORDS = "and|or|to|if|for|sqrt|sin|cos|tan|log|ln|exp|pi"
_PHRASE = rf"(?!(?:{_NON_UNIT_WORDS})(?![A-Za-z]))[A-Za-z]+\.?"
_AMOUNTS = re.compile(
    rf"(?:{_MONEY}{_NUMBER} ?{_PHRASE}(?: {_PHRASE})* )+{_MONEY}{_NUMBER}(?: ?{_PHRASE}(?: {_PHRASE})*)?", re.ASCII
)
"""Numbers with words between them: `5 ft 10 in`, `4 by 6`, `1 in 4`."""
_RAISED_TRANSPOSE = r"\^(?:T|\\top|\{\s*(?:T|\\top|-\s*1)\s*\})"
_ORDERED_PRODUCT = re.compile(
    rf"[A-Z]{_RAISED_TRANSPOSE}\s*[A-Z]|[A-Z]\s*[A-Z]{_RAISED_TRANSPOSE}"
    r"|\\(?:mathbf|boldsymbol|bm|vec|overrightarrow)\s*(?:\{[^{}]+\}|\w)\s*\\times"
)
"""Products of matrices and vectors, which depend on their order."""
_REACTION = re.compile(r"=|->|→|\\(?:long)?rightarrow(?![a-z])|\\to(?![a-z])")
_PLUS = re.compile(r"(?<!\^)\+(?!\})")
_TEXT_HINT = re.compile(r"[\d%][-‐‑‒–—./°) ]|[A-Za-z)\]_{]\d|O-O|\dX|0\d{3}|[A-Z]-\d|[a-z.] \d", re.ASCII)
_FORMULA = re.compile(r"\d+(?:\.\d+)?[eE]\d+|.*(?:sqrt|sin|cos|tan|sec|csc|cot|log|ln|exp|pi).*", re.ASCII)
_FONT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|ce)\s*\{((?:[^{}]|\{\d*[-+]?\})*)\}")
_GAP = re.compile(r"(?<=\d) (?=[A-Za-z])|(?<=[A-Za-z]) (?=\d)|(?<=[A-Z]) (?=[A-Z](?![a-z]))")
_CHARGE = re.compile(r"\^\{?(\d*[-+])\}?$", re.ASCII)


@lru_cache(maxsize=4096)
def is_text_reference(reference: str) -> bool:
    """Whether a reference answer, as in the data, is compared as written."""
    if len(reference) > MAX_LATEX_CHARACTERS or not _TEXT_HINT.search(reference):
        return False
    bare_text = _FONT.sub(r"\1", reference).strip()
    if len(bare_text) > MAX_CHARACTERS:
        return False
    if _CODE.fullmatch(bare_text):
        return True
    if parse_number(bare_text) is not None:
        return False
    if _AMOUNTS.fullmatch(" ".join(bare_text.split())):
        return True
    if found := _RANGE.fullmatch(bare_text):
        return found["unit"] is None or is_unit(found["unit"].strip())
    bare_text = bare_text.strip("$ ")
    if _OTHER_TEXT.fullmatch(bare_text) and not _FORMULA.fullmatch(bare_text):
        return True
    return _is_chemistry(bare_text) or _is_reaction(bare_text)


def is_compared_as_text(final_answer: str, reference: str) -> bool:
    """Whether two answers are compared as written: text, or products that do not commute."""
    is_ordered = (
        len(reference) <= MAX_LATEX_CHARACTERS
        and "=" not in reference
        and _ORDERED_PRODUCT.search(reference) is not None
    )
    return is_ordered or is_text_reference(reference) or is_text_reference(final_answer)


def _is_chemistry(text: str) -> bool:
    """Whether a text is a formula of chemistry, such as `Ca(OH)2` or `H_2O`."""
    counts = _COUNTS.findall(text)
    if not counts or _CHEMISTRY.fullmatch(text) is None:
        return False
    return "_" not in text or (_CHEMICAL_SYMBOL.search(text) is not None and min(map(int, counts)) > 1)


def _is_reaction(text: str) -> bool:
    """Whether a text is an equation of chemistry with the same elements on both sides."""
    sides = [[term.strip() for term in _PLUS.split(side)] for side in _REACTION.split(text)]
    terms = [term for side in sides for term in side]
    if len(sides) != 2 or not all(map(_CHEMISTRY.fullmatch, terms)) or not any(map(_is_chemistry, terms)):
        return False
    before, after = ({name for term in side for name in re.findall(_CHEMICAL_ELEMENT, term)} for side in sides)
    return before == after


@lru_cache(maxsize=4096)
def text_elements(reference: str) -> tuple[str, ...]:
    """Returns the elements of a bare list with a text in it.

    The result is empty for any other reference answer.
    """
    if len(reference) > MAX_CHARACTERS or not _TEXT_HINT.search(reference):
        return ()
    elements = [piece.strip() for piece in split_top_level(reference, (",", ";", " and ", " or ")) if piece.strip()]
    return tuple(elements) if len(elements) > 1 and any(map(is_text_reference, elements)) else ()


def normalize_spelling(text: str) -> str:
    r"""Normalizes the spelling: `\ce{H_{2}O}` becomes `H2O`, and terms of a reaction are sorted."""
    text = _SUBSCRIPT.sub(r"\1", _FONT.sub(r"\1", text))
    if _REACTION.search(text):
        sides = (sorted(map(str.strip, _PLUS.split(side))) for side in _REACTION.split(text))
        return "=".join("+".join(side) for side in sides)
    return _GAP.sub("", _CHARGE.sub(r"\1", text)).replace("--", "-")
