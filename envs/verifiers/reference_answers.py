"""Strips wrappers from reference answers, and warns of those that no final answer can match.

Data sets write `["2"]`, `The answer is 2.`, `<answer>2</answer>` or a whole solution that ends in `#### 2`
where 2 is meant. No final answer equals these texts, so a policy cannot earn their reward. They are unwrapped
here, and each reference answer is scored once as its own final answer. Neither happens if a reward of the user
or of another system scores the completions.
"""

import ast
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.model_rewards import MODEL_REWARDS
from envs.example import Example
from envs.rewards import all_reward_names, reward_names
from envs.row_files import format_value
from envs.user_code import is_user_code
from envs.verifiers.extract import answer_after_hashes, answer_in_tags, joined_boxes
from envs.verifiers.rules import RULES

log = logging.getLogger(__name__)

MAX_CHECKED_CHARACTERS = 1000
"""Maximum length of a reference answer that is checked."""
MAX_LIST_CHARACTERS = 10_000
MAX_CLAIM_CHARACTERS = 200
MAX_WRAPPINGS = 4
ANSWER_FORMS = {
    "math": "\\boxed{{{}}}",
    "boxed": "\\boxed{{{}}}",
    "think_answer_tags": "<think></think><answer>{}</answer>",
    "gsm8k": "#### {}",
    "dapo": "Answer: {}",
    "exact": "{}",
    "last_number": "{}",
}
"""Format in which a rule reads a final answer, by rule."""
_EQUIVALENT_RULES = {"strict_math_verify": "math"}
"""Fast rule that reads the same final answers as a library, by reward."""
_LATEX_RULES = ("math", "boxed", "think_answer_tags", "dapo")
"""Rules that read `$2$` and a text with a box like the text inside."""
_NUMBER = re.compile(r"[-+]?\d{1,60}(?:\.\d{1,60})?", re.ASCII)
_WRAPPING_MARK = re.compile(r"\[|\\\(|\$|\\boxed|####|answer|\bit is\b|^=", re.IGNORECASE)
_MINERVA_ENDING = re.compile(r"\s*I hope it is correct\.?\s*$")
_CLAIM_LEAD = re.compile(
    r"(?:^|[\n.!?:;,*_#(])\s*(?:(?:so|thus|hence|therefore|then|and),?\s+)?(?:the\s+|our\s+|my\s+)?"
    r"(?:final\s+|correct\s+)?$",
    re.IGNORECASE,
)
_CLAIM = re.compile(r"answer[*_]*\s*(?:is\s*:?|:|=)[*_\s]*(?P<claim>[^\n]+)", re.IGNORECASE)
_BARE_CLAIM = re.compile(
    r"(?:(?:(?:so|thus|hence|therefore),?\s+)?it\s+is\b\s*:?\s*(?=[-+$\\(.\d])|=)\s*(?P<claim>[^\n=]+)", re.IGNORECASE
)
"""Claims such as `= 2` and `It is 2`; before a word, `It is` may be the beginning of the answer itself."""
_LEADING_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}\s*")
_SENTENCE_END = re.compile(r"[.!?]['\")]*\s+(?=[\"'(]?[A-Z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MIN_SENTENCE_WORDS = 3
"""Minimum number of words of a sentence; two sentences are prose."""
_NEXT_SENTENCE = re.compile(r"[.!?]\s+[A-Za-z]")
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]", re.DOTALL)


def scoring_rule(env: EnvConfig, default_rule: str = "math") -> str | None:
    """Returns the rule of `RULES` that scores completions; None if another reward does.

    default_rule: the rule if `env.reward` names none.
    """
    if any(is_user_code(name) for name in (env.dataset, *all_reward_names(env))):
        return None
    names = [name for name in reward_names(env) or [default_rule] if name not in MODEL_REWARDS]
    rules = [_EQUIVALENT_RULES.get(name, name) for name in names]
    return rules[0] if rules and all(rule in RULES for rule in rules) else None


def unwrap_reference(value: Any, env: EnvConfig, default_rule: str = "math") -> Any:
    """Unwraps a reference answer, unless the scoring rule reads the answer as it is.

    value: the reference answer of a row. A list with one text or number stands for its element; any other value
        that is not text stays unchanged.
    """
    rule = scoring_rule(env, default_rule)
    if rule is None:
        return value
    if isinstance(value, list) and len(value) == 1 and type(value[0]) in (str, int, float):
        value = value[0]
    if not isinstance(value, str) or (rule == "exact" and _is_right(value.strip(), value, rule, env)):
        return value
    return unwrap_text(value, rule in _LATEX_RULES)


def unwrap_text(text: str, keep_latex: bool = False) -> str:
    """Returns the final answer in a text with a common wrapping; any other text stays.

    keep_latex: a text with a box, and a formula in dollars, stay unchanged too.
    """
    for _ in range(MAX_WRAPPINGS):
        text = text.strip()
        formula = _FORMULA.fullmatch(text)
        if not _WRAPPING_MARK.search(text) or (keep_latex and ("\\boxed" in text or formula)):
            return text
        elements = _parse_text_list(text)
        only = elements[0].strip() if len(elements) == 1 else None
        inner = only or _find_marked_answer(text) or _extract_claim(text)
        if not inner and formula:
            inner = next(part for part in formula.groups() if part).strip()
        if not inner:
            return text
        text = inner
    return text


def _parse_text_list(text: str) -> list[str]:
    """Returns the elements of a list of texts in JSON or Python notation.

    The result is empty for any other text.
    """
    if text[:1] != "[" or text[-1:] != "]" or text[1:].lstrip()[:1] not in ("'", '"'):
        return []
    if len(text) > MAX_LIST_CHARACTERS:
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if all(isinstance(each, str) for each in found) else []
    return []


def _find_marked_answer(text: str) -> str | None:
    """Returns the answer in the last tags, behind the last `####`, or in a box."""
    if text.endswith("</answer>"):
        return answer_in_tags(text)
    if "\n" not in text[max(0, text.rfind("####")) :] and (found := answer_after_hashes(text)):
        return found
    return joined_boxes(text) if "\\boxed" in text else None


def _extract_claim(text: str) -> str | None:
    """Returns the claim at the end of a text.

    `The answer is 2.` has the claim `2`. The result is None without a claim.
    """
    text = _LEADING_TEXT.sub(r"\1 ", _MINERVA_ENDING.sub("", text[-2 * MAX_CLAIM_CHARACTERS :]), count=1)
    start = text.lower().rfind("answer")
    found = _CLAIM.fullmatch(text, start) if start >= 0 and _CLAIM_LEAD.search(text[:start]) else None
    found = found or _BARE_CLAIM.fullmatch(text)
    if found is None:
        return None
    claim = found["claim"].strip(" .*_")
    return claim if len(claim) <= MAX_CLAIM_CHARACTERS and not _NEXT_SENTENCE.search(claim) else None


def check_references(
    locations: Iterable[str], examples: Sequence[Example], env: EnvConfig, default_rule: str = "math"
) -> None:
    """Warns about reference answers that no final answer can equal under the scoring rule.

    locations: the file and line of every example, for the message.
    default_rule: the task's rule.

    Raises:
        ConfigError: No reference answer can be equalled.
    """
    rule = scoring_rule(env, default_rule)
    pairs = zip(locations, examples, strict=True)
    references = [(place, each.answer) for place, each in pairs if isinstance(each.answer, str)]
    if rule is None or not references:
        return
    distinct = dict.fromkeys(reference for _, reference in references if not _NUMBER.fullmatch(reference))
    unreachable = {reference for reference in distinct if not _is_reachable(reference, rule, env)}
    unreachable_pairs = [(place, reference) for place, reference in references if reference in unreachable]
    if not unreachable_pairs:
        return
    place, reference = unreachable_pairs[0]
    message = (
        f"{len(unreachable_pairs)} of {len(references)} reference answers match no final answer that the rule {rule} "
        f"reads, for example {place}: {format_value(reference)}; write the final answer alone, or set env.reward to a "
        "reward that reads the answer"
    )
    if len(unreachable_pairs) == len(references):
        raise ConfigError(message)
    log.warning("%s", message)


def _is_reachable(reference: str, rule: str, env: EnvConfig) -> bool:
    """Whether a final answer can equal a reference answer.

    The reference answer equals itself, and is neither data nor prose.
    """
    if rule != "exact" and (_is_data(reference) or _is_prose(reference)):
        return False
    answer = reference if rule == "exact" else ", ".join(_parse_text_list(reference)) or reference
    return len(reference) > MAX_CHECKED_CHARACTERS or _is_right(answer, reference, rule, env)


def _is_data(reference: str) -> bool:
    """Whether a text is a JSON object, or nested lists that are not a matrix."""
    if (reference[:1], reference[-1:]) not in (("{", "}"), ("[", "]")):
        return False
    try:
        found = json.loads(reference)
    except (ValueError, RecursionError):
        return False
    if isinstance(found, dict):
        return bool(found)
    rows = [row for row in found if isinstance(row, list)]
    numbers = [type(each) in (int, float) for row in rows for each in row]
    no_matrix = bool(rows) and (not all(numbers) or len(numbers) < 2)
    return no_matrix or any(isinstance(each, dict) for each in found)


def _is_prose(reference: str) -> bool:
    """Whether a text without a box has two sentences or more."""
    if "\\boxed" in reference:
        return False
    sentences = _SENTENCE_END.split(reference[:MAX_LIST_CHARACTERS])
    return sum(len(_WORD.findall(sentence)) >= MIN_SENTENCE_WORDS for sentence in sentences) > 1


def _is_right(answer: str, reference: str, rule: str, env: EnvConfig) -> bool:
    """Whether the rule scores the answer as right for the reference answer."""
    return RULES[rule].score(ANSWER_FORMS[rule].format(answer), reference, env)["accuracy"] == 1.0
