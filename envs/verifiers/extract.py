"""Finds the final answer in a completion.

The final answer is the claim of a completion; the name `answer` alone stands for the reference answer here as
elsewhere. Every finder returns the text of the final answer or None. An answer that begins and does not end is
None, never a guess. The finders take linear time and do not use sympy.
"""

import re

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer(?:\s+is)?[*_]*\s*:[*_]*\s*([^\n]+)", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$((?s:.{1,400}?))\$\$|\\\[((?s:.{1,400}?))\\\]|\$([^$\n]{1,400})\$|\\\((.{1,400}?)\\\)")
_FORMULA_OPENINGS = ("\\[", "$$")
"""Lines that only begin a formula."""
_MINERVA_ENDING, _CLAIM_LIMIT = "I hope it is correct", 300
_FINAL_CLAIM = re.compile(r"final answer is:?\s*(\S.*?)[.\s]*", re.IGNORECASE | re.DOTALL)
_DECORATION = re.compile(r"\$|\\[()\[\],;:! ]|\\q?quad|\\(?:text|mathrm)|[{}~\s]")
_BOX_JOINT = re.compile(r"(?:[a-z]{1,12} ){0,2}(?:[,;]|[,;]? ?(?:and|or)) ?(?:[a-z](?:_\d)? ?= ?)?", re.IGNORECASE)
_MAX_JOINT_CHARACTERS = 80
MAX_BOXES = 64
_LEAD = re.compile(r"[^\d\\]*\b(?:is|equals|are)\b:?\s+(?P<claim>.+?)\.?", re.DOTALL | re.IGNORECASE)
_CLAUSE = re.compile(r"(?P<lead>[^.;,:!?\n]*?)\b(?:is|equals)\s+(?P<claim>[^\n]+?)\.?", re.IGNORECASE)
_UNDECIDED_WORD = re.compile(r"\b(?:is|are|equals|or|if|not|either|neither|between|than)\b", re.IGNORECASE)
NON_VARIABLE_NAMES = re.compile(r"\\[a-zA-Z]+|(?:sqrt|sin|cos|tan|sec|csc|cot|log|ln|exp|pi)(?![a-zA-Z])")
"""Names in a formula that are no unknowns."""
_UNKNOWN = re.compile(r"(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|\d[a-zA-Z]|[a-zA-Z]\d")
_PROSE_LIMIT = 300
_FORMULA_REACH = 4000


def last_boxed(text: str) -> str | None:
    r"""Returns the contents of the last `\boxed{...}`, with braces matched.

    The result is None without a box, or if the last box is unclosed.
    """
    start = text.rfind("\\boxed")
    found = _read_box(text, start) if start >= 0 else None
    return None if found is None else found[0]


def joined_boxes(text: str) -> str | None:
    r"""Returns the contents of the last boxes that a comma, `and` or `or` joins.

    `\boxed{2} and \boxed{3}` is `2, 3`. Such boxes are one answer, and a single one of them is not an answer.
    The result is None without a box, or if the last box is unclosed.
    """
    start = text.rfind("\\boxed")
    found = _read_box(text, start) if start >= 0 else None
    if found is None:
        return None
    contents = [found[0]]
    while len(contents) < MAX_BOXES and (before := text.rfind("\\boxed", 0, start)) >= 0:
        earlier = _read_box(text, before)
        if earlier is None or not 0 < start - earlier[1] <= _MAX_JOINT_CHARACTERS:
            break
        joint = " ".join(_DECORATION.sub(" ", text[earlier[1] : start]).split())
        if not _BOX_JOINT.fullmatch(joint + " ") and not _BOX_JOINT.fullmatch(joint):
            break
        contents.append(earlier[0])
        start = before
    return contents[0] if len(set(contents)) == 1 else ", ".join(reversed(contents))


def _read_box(text: str, start: int) -> tuple[str, int] | None:
    """Returns the contents of the box that starts at a position, and its end.

    The result is None if no box starts there.
    """
    position = start + len("\\boxed")
    while position < len(text) and text[position] == " ":
        position += 1
    if text[position : position + 1] != "{":
        return None
    depth = 0
    for token in _BRACE.finditer(text, position):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return text[position + 1 : token.start()].strip(), token.end()
    return None


def answer_in_tags(text: str) -> str | None:
    """Returns the contents of the last complete `<answer>...</answer>`, or None."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def text_after_thinking(text: str) -> str | None:
    """Returns the text after the last `</think>`.

    The result is the whole text if it has no `<think>`, and None if a thought is unfinished.
    """
    end = text.rfind(_THINK_CLOSE)
    if text.find(_THINK_OPEN, max(end, 0)) >= 0:
        return None
    return text if end < 0 else text[end + len(_THINK_CLOSE) :]


def strip_empty_thought(text: str) -> str:
    """Removes an empty thought from the beginning of a text."""
    found = _EMPTY_THOUGHT.match(text)
    return text[found.end() :] if found else text


def answer_after_hashes(text: str) -> str | None:
    """Returns the rest of the line after the last `####`, or None.

    The result is also None if a fifth `#` makes the line a heading.
    """
    start = text.rfind("####")
    if start < 0 or text[start - 1 : start] == "#":
        return None
    line = text[start + 4 :].split("\n", 1)[0].strip()
    return line or None


def answer_after_label(text: str) -> str | None:
    """Returns the text after the last `Answer:`, or None.

    The text is on the same line, or on the next line if the same line is empty.
    """
    found = _ANSWER_LINE.findall(text)
    return found[-1].strip() if found else None


def find_marked_answer(text: str) -> str | None:
    r"""Finds the final answer by any of the known marks.

    The order of the marks, after the thoughts: `The final answer is ... I hope it is correct` behind every
    other mark, the last `<answer>`, the last `\boxed`, the last `####`, the last `Answer:`, the last formula. A
    box inside any of them is opened.
    """
    answer_text = text_after_thinking(text)
    if answer_text is None:
        return None
    if (claim := _minerva_answer(answer_text)) is not None:
        return claim
    if "\\boxed" in answer_text and "</answer>" not in answer_text:
        return joined_boxes(answer_text)
    for find in (answer_in_tags, answer_after_hashes, answer_after_label):
        if (found := find(answer_text)) not in (None, *_FORMULA_OPENINGS):
            return joined_boxes(found) if "\\boxed" in found else found
    return last_formula(answer_text)


def _minerva_answer(text: str) -> str | None:
    """Returns the answer before `I hope it is correct`, the form of Minerva's prompt.

    The result is None without that sentence, or if another mark follows.
    """
    end = text.rfind(_MINERVA_ENDING)
    if end < 0 or any(mark in text[end:] for mark in ("\\boxed", "</answer>", "####")):
        return None
    start = text.lower().rfind("final answer is", max(0, end - _CLAIM_LIMIT), end)
    found = _FINAL_CLAIM.fullmatch(text, start, end) if start >= 0 else None
    if found is None:
        return None
    return joined_boxes(found[1]) if "\\boxed" in found[1] else found[1]


def last_formula(text: str) -> str | None:
    r"""Returns the last formula near the end of a text, or None.

    A formula is `$...$` or `\(...\)` on one line, or `$$...$$` or `\[...\]`.
    """
    found = _FORMULA.findall(text[-_FORMULA_REACH:])
    return "".join(found[-1]).strip() if found else None


def claim_in_sentence(text: str) -> str:
    """Returns the claim at the end of a sentence.

    `the answer is 7.` and `The sum of 3 and 4 is 7.` have the claim `7`. Any other text stays unchanged, such
    as `it is 5 or it is 7`.
    """
    if len(text) > _PROSE_LIMIT:
        return text
    sentence = _LEAD.fullmatch(text.strip())
    if sentence is None:
        sentence = _CLAUSE.fullmatch(text.strip())
        if sentence is None or _UNDECIDED_WORD.search(sentence["lead"]):
            return text
    return sentence["claim"]


def chain_end(text: str) -> str:
    """Returns the last side of a chain of equations.

    `8 + 3 = 11` ends in `11`, and `11 = 8 + 3` ends in `8 + 3`. An equation with an unknown (`2k = 6`) is not a
    chain and stays unchanged.
    """
    *sides, end = text.split("=")
    is_chain = all(side.strip() and not _UNKNOWN.search(NON_VARIABLE_NAMES.sub(" ", side)) for side in sides)
    return end.strip() if is_chain else text


def has_think_answer_format(text: str) -> bool:
    """Whether a text consists of one thought and then one final answer.

    Both are in tags, and nothing follows the final answer.
    """
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags):
        return False
    positions = [text.index(tag) for tag in tags]
    return positions == sorted(positions) and text.rstrip().endswith("</answer>")
