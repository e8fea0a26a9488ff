r"""Reference answers: common wrappings taken off, and a check that each can be met.

Data sets write `["2"]`, `The answer is 2.`, `<answer>2</answer>` or a whole solution that ends in `#### 2` where 2 is
meant. No final answer equals these, so that training on them teaches nothing. They are unwrapped, and each reference
answer is judged once as its own answer. Where a reward of the user's or of another system judges, neither is done.
"""

import ast
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Example
from envs.rewards import judge_names, reward_names
from envs.row_files import shown
from envs.user_code import is_own
from envs.verifiers.extract import boxed_together, marked, tagged
from envs.verifiers.rules import RULES

log = logging.getLogger(__name__)

LONGEST_JUDGED = 1000
"""Characters; of a longer reference answer nothing is said."""
LONGEST_LIST = 10_000
LONGEST_CLAIM = 200
MOST_WRAPPINGS = 4
FORMS = {
    "math": "\\boxed{{{}}}",
    "boxed": "\\boxed{{{}}}",
    "think_answer_tags": "<think></think><answer>{}</answer>",
    "gsm8k": "#### {}",
    "dapo": "Answer: {}",
    "exact": "{}",
    "last_number": "{}",
}
"""By rule, the form in which it reads a final answer."""
_STAND_INS = {"strict_math_verify": "math"}
"""The library takes a hundred times as long as the rule that reads the same final answers."""
_READ_LATEX = ("math", "boxed", "think_answer_tags", "dapo")
"""Rules to which `$2$` and a text with a box are as good as what is inside."""
_NUMBER = re.compile(r"[-+]?\d{1,60}(?:\.\d{1,60})?", re.ASCII)
_WRAPPED = re.compile(r"\[|\\\(|\$|\\boxed|####|answer|\bit is\b|^=", re.IGNORECASE)
_HOPE = re.compile(r"\s*I hope it is correct\.?\s*$")
_LEAD = re.compile(
    r"(?:^|[\n.!?:;,*_#(])\s*(?:(?:so|thus|hence|therefore|then|and),?\s+)?(?:the\s+|our\s+|my\s+)?"
    r"(?:final\s+|correct\s+)?$",
    re.IGNORECASE,
)
_CLAIM = re.compile(r"answer[*_]*\s*(?:is\s*:?|:|=)[*_\s]*(?P<claim>[^\n]+)", re.IGNORECASE)
_BARE_CLAIM = re.compile(
    r"(?:(?:(?:so|thus|hence|therefore),?\s+)?it\s+is\b\s*:?\s*(?=[-+$\\(.\d])|=)\s*(?P<claim>[^\n=]+)",
    re.IGNORECASE,
)
"""`= 2` and `It is 2`; before a word `It is` may be the answer's own beginning."""
_TEXT_AHEAD = re.compile(r"\\text\s*\{([^{}]*)\}\s*")
_SENTENCE_END = re.compile(r"[.!?]['\")]*\s+(?=[\"'(]?[A-Z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
LEAST_WORDS = 3
"""Of a sentence; two of them are prose."""
_NEXT_SENTENCE = re.compile(r"[.!?]\s+[A-Za-z]")
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]", re.DOTALL
)


def judging_rule(env: EnvConfig, own: str = "math") -> str | None:
    """The judging rule of `RULES`; None where another reward judges."""
    if any(is_own(name) for name in (env.dataset, *judge_names(env))):
        return None
    names = [_STAND_INS.get(name, name) for name in reward_names(env) or [own]]
    return names[0] if all(name in RULES for name in names) else None


def reference_answer(value: Any, env: EnvConfig, own: str = "math") -> Any:
    """Unwrap a reference answer, unless the judging rule reads it as it is.

    value: of a row; a list with one text or number is that, anything else that is no text stays.
    """
    rule = judging_rule(env, own)
    if rule is None:
        return value
    if isinstance(value, list) and len(value) == 1 and type(value[0]) in (str, int, float):
        value = value[0]
    if not isinstance(value, str) or (rule == "exact" and _is_right(value.strip(), value, rule, env)):
        return value
    return unwrapped(value, rule in _READ_LATEX)


def unwrapped(text: str, keep_latex: bool = False) -> str:
    """The final answer that a text in a common wrapping holds; any other text stays.

    keep_latex: a text with a box, and a formula in dollars, stay as well.
    """
    for _ in range(MOST_WRAPPINGS):
        text = text.strip()
        formula = _FORMULA.fullmatch(text)
        if not _WRAPPED.search(text) or (keep_latex and ("\\boxed" in text or formula)):
            return text
        elements = _elements(text)
        only = elements[0].strip() if len(elements) == 1 else None
        inner = only or _last_answer(text) or _claim(text)
        if not inner and formula:
            inner = next(part for part in formula.groups() if part).strip()
        if not inner:
            return text
        text = inner
    return text


def _elements(text: str) -> list[str]:
    """Elements of a list of texts in JSON or Python notation; else none."""
    if text[:1] != "[" or text[-1:] != "]" or text[1:].lstrip()[:1] not in ("'", '"'):
        return []
    if len(text) > LONGEST_LIST:
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if all(isinstance(each, str) for each in found) else []
    return []


def _last_answer(text: str) -> str | None:
    """The answer in the last tags, behind the last mark, or in a box."""
    if text.endswith("</answer>"):
        return tagged(text)
    if "\n" not in text[max(0, text.rfind("####")) :] and (found := marked(text)):
        return found
    return boxed_together(text) if "\\boxed" in text else None


def _claim(text: str) -> str | None:
    """The `2` of `The answer is 2.` at the end of a text."""
    text = _TEXT_AHEAD.sub(r"\1 ", _HOPE.sub("", text[-2 * LONGEST_CLAIM :]), count=1)
    start = text.lower().rfind("answer")
    found = _CLAIM.fullmatch(text, start) if start >= 0 and _LEAD.search(text[:start]) else None
    found = found or _BARE_CLAIM.fullmatch(text)
    if found is None:
        return None
    claim = found["claim"].strip(" .*_")
    return claim if len(claim) <= LONGEST_CLAIM and not _NEXT_SENTENCE.search(claim) else None


def check_references(
    places: Iterable[str], examples: Sequence[Example], env: EnvConfig, own: str = "math"
) -> None:
    """Warns of reference answers that no final answer can equal under the rule that judges.

    places: where the row of each example is. own: the task's rule.

    Raises:
        ConfigError: none of them can be equalled.
    """
    rule = judging_rule(env, own)
    pairs = zip(places, examples, strict=True)
    golds = [(place, each.answer) for place, each in pairs if isinstance(each.answer, str)]
    if rule is None or not golds:
        return
    distinct = dict.fromkeys(gold for _, gold in golds if not _NUMBER.fullmatch(gold))
    bad = {gold for gold in distinct if not _can_be_met(gold, rule, env)}
    unmet = [(place, gold) for place, gold in golds if gold in bad]
    if not unmet:
        return
    place, gold = unmet[0]
    said = (
        f"{len(unmet)} of {len(golds)} reference answers can be equalled by no final answer that the rule {rule} "
        f"reads, as {place}: {shown(gold)}; write the final answer alone, or judge by a reward that reads it "
        "(env.reward)"
    )
    if len(unmet) == len(golds):
        raise ConfigError(said)
    log.warning("%s", said)


def _can_be_met(gold: str, rule: str, env: EnvConfig) -> bool:
    """Whether a reference answer is its own answer, and neither data nor prose."""
    if rule != "exact" and (_is_data(gold) or _is_prose(gold)):
        return False
    answer = gold if rule == "exact" else ", ".join(_elements(gold)) or gold
    return len(gold) > LONGEST_JUDGED or _is_right(answer, gold, rule, env)


def _is_data(gold: str) -> bool:
    """Whether a text is a JSON object, or nested lists but no matrix."""
    if (gold[:1], gold[-1:]) not in (("{", "}"), ("[", "]")):
        return False
    try:
        found = json.loads(gold)
    except (ValueError, RecursionError):
        return False
    if isinstance(found, dict):
        return bool(found)
    rows = [row for row in found if isinstance(row, list)]
    numbers = [type(each) in (int, float) for row in rows for each in row]
    no_matrix = bool(rows) and (not all(numbers) or len(numbers) < 2)
    return no_matrix or any(isinstance(each, dict) for each in found)


def _is_prose(gold: str) -> bool:
    """Whether a text without a box has two sentences or more."""
    if "\\boxed" in gold:
        return False
    sentences = _SENTENCE_END.split(gold[:LONGEST_LIST])
    return sum(len(_WORD.findall(sentence)) >= LEAST_WORDS for sentence in sentences) > 1


def _is_right(answer: str, gold: str, rule: str, env: EnvConfig) -> bool:
    return RULES[rule].judge(FORMS[rule].format(answer), gold, env)["accuracy"] == 1.0
