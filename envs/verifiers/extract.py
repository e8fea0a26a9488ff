"""Finders of the final answer in a completion. Pure text, linear in its length, no sympy.

The final answer is what a completion claims; `answer` alone is the gold, here as everywhere. Each finder returns the
text of the final answer or None; one that was begun and not finished is None, never a guess.
"""

import re

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer(?:\s+is)?[*_]*\s*:[*_]*\s*([^\n]+)", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$((?s:.{1,400}?))\$\$|\\\[((?s:.{1,400}?))\\\]|\$([^$\n]{1,400})\$|\\\((.{1,400}?)\\\)"
)
_OPENED = ("\\[", "$$")
"""A line that only begins a formula."""
_HOPE, _CLAIM_LIMIT = "I hope it is correct", 300
_FINAL_CLAIM = re.compile(r"final answer is:?\s*(\S.*?)[.\s]*", re.IGNORECASE | re.DOTALL)
_DECORATION = re.compile(r"\$|\\[()\[\],;:! ]|\\q?quad|\\(?:text|mathrm)|[{}~\s]")
_JOINED = re.compile(
    r"(?:[a-z]{1,12} ){0,2}(?:[,;]|[,;]? ?(?:and|or)) ?(?:[a-z](?:_\d)? ?= ?)?", re.IGNORECASE
)
_LONGEST_JOINT = 80
MAX_BOXES = 64
_LEAD = re.compile(r"[^\d\\]*\b(?:is|equals|are)\b:?\s+(?P<claim>.+?)\.?", re.DOTALL | re.IGNORECASE)
_CLAUSE = re.compile(r"(?P<lead>[^.;,:!?\n]*?)\b(?:is|equals)\s+(?P<claim>[^\n]+?)\.?", re.IGNORECASE)
_UNDECIDED = re.compile(r"\b(?:is|are|equals|or|if|not|either|neither|between|than)\b", re.IGNORECASE)
NOT_VARIABLES = re.compile(r"\\[a-zA-Z]+|(?:sqrt|sin|cos|tan|sec|csc|cot|log|ln|exp|pi)(?![a-zA-Z])")
"""Names in a formula that stand for no unknown."""
_UNKNOWN = re.compile(r"(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|\d[a-zA-Z]|[a-zA-Z]\d")
_PROSE_LIMIT = 300
_FORMULA_REACH = 4000


def boxed(text: str) -> str | None:
    """Contents of the last `\\boxed{...}`, braces matched; None without one or when the last is unclosed."""
    start = text.rfind("\\boxed")
    found = _box_at(text, start) if start >= 0 else None
    return None if found is None else found[0]


def boxed_together(text: str) -> str | None:
    """As `boxed`, with the boxes that a comma, `and` or `or` joins to it: `\\boxed{2} and \\boxed{3}` is `2, 3`.

    Such boxes are one answer, and none of them is one by itself.
    """
    start = text.rfind("\\boxed")
    found = _box_at(text, start) if start >= 0 else None
    if found is None:
        return None
    contents = [found[0]]
    while len(contents) < MAX_BOXES and (before := text.rfind("\\boxed", 0, start)) >= 0:
        earlier = _box_at(text, before)
        if earlier is None or not 0 < start - earlier[1] <= _LONGEST_JOINT:
            break
        joint = " ".join(_DECORATION.sub(" ", text[earlier[1] : start]).split())
        if not _JOINED.fullmatch(joint + " ") and not _JOINED.fullmatch(joint):
            break
        contents.append(earlier[0])
        start = before
    return contents[0] if len(set(contents)) == 1 else ", ".join(reversed(contents))


def _box_at(text: str, start: int) -> tuple[str, int] | None:
    """Contents of the box that starts there, and where it ends; None where it does not."""
    opened = start + len("\\boxed")
    while opened < len(text) and text[opened] == " ":
        opened += 1
    if text[opened : opened + 1] != "{":
        return None
    depth = 0
    for token in _BRACE.finditer(text, opened):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return text[opened + 1 : token.start()].strip(), token.end()
    return None


def tagged(text: str) -> str | None:
    """Contents of the last complete `<answer>...</answer>`; None without one."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`; all of it without any `<think>`; None while a thought is unfinished."""
    closed = text.rfind(_THINK_CLOSE)
    if text.find(_THINK_OPEN, max(closed, 0)) >= 0:
        return None
    return text if closed < 0 else text[closed + len(_THINK_CLOSE) :]


def without_empty_thought(text: str) -> str:
    """The text without an empty thought at its beginning."""
    found = _EMPTY_THOUGHT.match(text)
    return text[found.end() :] if found else text


def marked(text: str) -> str | None:
    """The rest of the line after the last `####`; None without one, or where a fifth `#` makes it a heading."""
    start = text.rfind("####")
    if start < 0 or text[start - 1 : start] == "#":
        return None
    line = text[start + 4 :].split("\n", 1)[0].strip()
    return line or None


def answer_line(text: str) -> str | None:
    """What follows the last `Answer:`, on its line or, if that is empty, on the next; None without one."""
    found = _ANSWER_LINE.findall(text)
    return found[-1].strip() if found else None


def final_answer(text: str) -> str | None:
    """The final answer however it is marked.

    In this order, after the thoughts: `The final answer is ... I hope it is correct` behind every other mark, the last
    `<answer>`, the last `\\boxed`, the last `####`, the last `Answer:`, the last formula; a box inside any of them
    is opened.
    """
    spoken = after_thinking(text)
    if spoken is None:
        return None
    if (claim := _hoped(spoken)) is not None:
        return claim
    if "\\boxed" in spoken and "</answer>" not in spoken:
        return boxed_together(spoken)
    for find in (tagged, marked, answer_line):
        if (found := find(spoken)) not in (None, *_OPENED):
            return boxed_together(found) if "\\boxed" in found else found
    return last_formula(spoken)


def _hoped(text: str) -> str | None:
    """What stands before `I hope it is correct`, the form that Minerva's prompt made common; None without it."""
    end = text.rfind(_HOPE)
    if end < 0 or any(mark in text[end:] for mark in ("\\boxed", "</answer>", "####")):
        return None
    start = text.lower().rfind("final answer is", max(0, end - _CLAIM_LIMIT), end)
    found = _FINAL_CLAIM.fullmatch(text, start, end) if start >= 0 else None
    if found is None:
        return None
    return boxed_together(found[1]) if "\\boxed" in found[1] else found[1]


def last_formula(text: str) -> str | None:
    """The last `$...$`, `\\(...\\)`, `$$...$$` or `\\[...\\]` near the end of the text; None without one.

    The former two are of one line.
    """
    found = _FORMULA.findall(text[-_FORMULA_REACH:])
    return "".join(found[-1]).strip() if found else None


def from_prose(given: str) -> str:
    """`the answer is 7.` and `The sum of 3 and 4 is 7.` become `7`; anything else stays, `it is 5 or it is 7` too."""
    if len(given) > _PROSE_LIMIT:
        return given
    sentence = _LEAD.fullmatch(given.strip())
    if sentence is None:
        sentence = _CLAUSE.fullmatch(given.strip())
        if sentence is None or _UNDECIDED.search(sentence["lead"]):
            return given
    return sentence["claim"]


def chain_end(text: str) -> str:
    """`8 + 3 = 11` ends in `11`, `11 = 8 + 3` in `8 + 3`; an equation with an unknown (`2k = 6`) is no chain."""
    *begun, end = text.split("=")
    known = all(side.strip() and not _UNKNOWN.search(NOT_VARIABLES.sub(" ", side)) for side in begun)
    return end.strip() if known else text


def think_answer_format(text: str) -> bool:
    """Whether the text has exactly one thought, then exactly one final answer, and nothing after it."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags):
        return False
    positions = [text.index(tag) for tag in tags]
    return positions == sorted(positions) and text.rstrip().endswith("</answer>")
