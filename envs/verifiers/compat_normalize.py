"""Normalizes mathematical answers by the methods of Minerva and of the MATH data set.

The default rewards do not use them.
"""

import re

_MINERVA_REPLACEMENTS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_MINERVA_REMOVALS = (
    *_MINERVA_WORDS.split(),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_MINERVA_PATTERNS = (
    (re.compile(r".*?\$(.*?)\$.*", re.DOTALL), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalize_minerva(answer: str) -> str:
    """Normalizes an answer by Lewkowycz et al. 2022, appendix D.1, as DAPO does.

    Only the text after the last `=` stays, without units and words.
    """
    answer = answer.split("=")[-1]
    for old, new in _MINERVA_REPLACEMENTS:
        answer = answer.replace(old, new)
    for expression in _MINERVA_REMOVALS:
        answer = answer.replace(expression, "")
    for pattern, new in _MINERVA_PATTERNS:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


_HENDRYCKS_REPLACEMENTS = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"),
    ("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_SHORT_SLASH = re.compile(r"(-?\d+)/(-?\d+)")


def normalize_hendrycks(answer: str) -> str:
    """Normalizes an answer by Hendrycks et al. 2021, the comparison of the MATH data set.

    An answer that the method cannot treat stays unchanged.
    """
    text = answer
    for old, new in _HENDRYCKS_REPLACEMENTS:
        text = text.replace(old, new)
    if text.count("\\text{ ") > 1:
        return answer
    head, unit, _ = text.partition("\\text{ ")
    text = head.replace("\\%", "")
    text = text.replace("%", "") if unit else text
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = re.sub(r"\\?sqrt(?!\{)(.)", r"\\sqrt{\1}", text) if "sqrt" in text else text
    text = _brace_fractions(text.replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    slash = _SHORT_SLASH.fullmatch(text)
    if slash and slash[1] == str(int(slash[1])) and slash[2] == str(int(slash[2])):
        return f"\\frac{{{slash[1]}}}{{{slash[2]}}}"
    return text


def _brace_fractions(text: str) -> str:
    r"""Adds braces to the arguments of `\frac1b` and `\frac12`.

    A truncated fraction leaves the text unchanged.
    """
    head, *rest = text.split("\\frac")
    for piece in rest:
        if piece.startswith("{"):
            head += "\\frac" + piece
        elif len(piece) < 2:
            return text
        elif piece[1] == "{":
            head += f"\\frac{{{piece[0]}}}{piece[1:]}"
        else:
            head += f"\\frac{{{piece[0]}}}{{{piece[1]}}}{piece[2:]}"
    return head
