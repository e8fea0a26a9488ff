"""Graders of other systems, reproduced for comparison with their published numbers.

Each gives the recorded verdicts of the system it is named after, faults included (a regular expression that
stops at the third brace, a wrong completion that scores better for being longer). None is a default;
`compat_rewards` makes rewards of them that `env.reward` can name. They bound nothing: math-verify is called without
its signal-based timeouts, the caller's process has the deadline. Those that need no mathematics are in `compat_text`.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from fractions import Fraction
from functools import cache, partial
from typing import Any

from envs.verifiers import compat_text
from envs.verifiers.expressions import FOUR_OPERATIONS, NOT_ARITHMETIC, parse, value

_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_BOX_OF_DEPTH_THREE = re.compile(rf"\\boxed\{{((?:[^{{}}]|{_GROUP})*)\}}", re.DOTALL)
_ANSWER_ON_A_LINE = re.compile(r"<answer>(.*?)</answer>")
COATI_SCORE = 10.0


def _parse(text: str, **options: Any) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=None, **options))


def _verify(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))


def math_verify(text: str, gold: str, in_dollars: bool = False) -> bool:
    """math-verify as its manual calls it."""
    return _verify(_parse(f"${gold}$" if in_dollars else gold), _parse(text))


# Megatron-LM ---------------------------------------------------------------------------------------------------


def megatron_math(
    text: str,
    gold: str,
    finish_reason: str = "stop",
    format_reward: float = 0.0,
    negative_reward: float = 0.0,
    partial_end_reward: float = 0.0,
) -> float:
    """1 for the right answer at the very end; the gold is compared as text with what math-verify reads."""
    found = list(compat_text.ANSWER.finditer(text)) or list(_BOX_OF_DEPTH_THREE.finditer(text))
    if not found:
        return negative_reward
    if not _verify(gold, _parse(found[-1][1])) or finish_reason == "length":
        return format_reward
    return 1.0 if text.endswith(found[-1][0]) else partial_end_reward


# ColossalChat --------------------------------------------------------------------------------------------------


class CoatiStatus(IntEnum):
    """Why two answers do or do not match."""

    SUCCESS = 1
    MATCHING_FAIL = 0
    CANNOT_PARSE_GT_ANSWER = -1
    CANNOT_PARSE_PREDICTION = -2


@cache
def _coati_config() -> tuple[Any, ...]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    normalization = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
    )
    latex = LatexExtractionConfig(normalization_config=normalization, boxed_match_priority=0)
    return ExprExtractionConfig(), latex


def coati_equal(answer: str, gold: str) -> CoatiStatus:
    """Both in a box, read by math-verify."""
    boxed = [text if text.startswith("\\boxed{") else f"\\boxed{{{text}}}" for text in (answer, gold)]
    expected = _parse(boxed[1], extraction_config=_coati_config())
    if not expected:
        return CoatiStatus.CANNOT_PARSE_GT_ANSWER
    given = _parse(boxed[0], extraction_config=_coati_config())
    if not given:
        return CoatiStatus.CANNOT_PARSE_PREDICTION
    return CoatiStatus(int(_verify(expected, given)))


def coati_length_penalty(length: int, max_new_tokens: int, cache_length: int) -> float:
    """0 up to the cache, then down to -10 at the limit: the soft punishment of DAPO times 10."""
    start = max_new_tokens - cache_length
    return (start - length) / cache_length * COATI_SCORE if start < length < max_new_tokens else 0.0


def _coati_reward(
    read: Callable[[str], tuple[str | None, bool]],
    text: str,
    gold: str,
    length: int,
    max_new_tokens: int,
    cache_length: int = 0,
    soft_over_length_punishment: bool = False,
) -> list[float]:
    """[reward, format, accuracy]. No answer earns and loses nothing; at the limit the reward is 0.

    read: from a text to its answer, and whether it has the form that is asked for.
    """
    answer, formatted = read(text)
    if answer is None:
        return [0.0, 0.0, 0.0]
    reward, accuracy = 0.0, 0.0
    if formatted:
        status = coati_equal(answer, gold)
        if status is CoatiStatus.SUCCESS:
            reward, accuracy = COATI_SCORE, 1.0
        elif status is CoatiStatus.CANNOT_PARSE_PREDICTION and answer.strip().lower() == gold.strip().lower():
            reward, accuracy = COATI_SCORE / 2, 1.0
    if soft_over_length_punishment:
        reward += coati_length_penalty(length, max_new_tokens, cache_length)
    if length >= max_new_tokens:
        reward = 0.0
    return [reward, float(formatted), accuracy]


coati_think_answer_tags = partial(
    _coati_reward, lambda text: (compat_text.coati_solution(text), compat_text.coati_structure(text))
)
"""Reward 10 for the right answer in `<think>...</think><answer>...</answer>`."""
coati_boxed = partial(_coati_reward, lambda text: (compat_text.coati_boxed_solution(text), True))
"""Reward 10 for the right answer in the last box."""


# TRL, verl, TorchRL --------------------------------------------------------------------------------------------


def trl_accuracy(text: str, gold: str) -> float | None:
    """1 or 0 for LaTeX in a formula or box; None where the gold cannot be read."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    expected = _parse(gold)
    if not expected:
        return None
    anchored = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    given = _parse(text, extraction_config=[anchored], extraction_mode="first_match")
    return float(_verify(expected, given))


def trl_reasoning_accuracy(text: str, gold: str) -> float | None:
    """The same of what follows the first `</think>`; 0 for a thought without end."""
    _, closed, spoken = text.partition("</think>")
    return trl_accuracy(spoken, gold) if closed else 0.0


def verl_math_verify(text: str, gold: str) -> float:
    """1 where math-verify matches the boxed gold with anything it extracts."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    expected = _parse(f"\\boxed{{{gold}}}", extraction_config=[latex])
    return float(_verify(expected, _parse(text, extraction_config=[plain, latex])))


def torchrl_math(text: str, gold: str, format_reward: float = 0.1) -> dict[str, Any]:
    """The first `<answer>`; math-verify with the answer in the place of the gold."""
    return compat_text.torchrl_verdict(
        text, lambda answer: _verify(_parse(answer), _parse(gold)), format_reward
    )


# Countdown -----------------------------------------------------------------------------------------------------


def megatron_countdown(text: str, target: float, numbers: Sequence[int], format_score: float = 0.1) -> float:
    """1 when the last answer uses all numbers once and hits the target, the format score for any other."""
    found = _ANSWER_ON_A_LINE.findall(text)
    if not found:
        return 0.0
    hit = _hits(found[-1], target) and Counter(_integers(found[-1])) == Counter(numbers)
    return 1.0 if hit else format_score


def torchrl_countdown(
    text: str, target: int, numbers: Sequence[int], format_reward: float = 0.1
) -> dict[str, Any]:
    """The first answer may use each number at most once."""

    def right(answer: str) -> bool:
        return not Counter(_integers(answer)) - Counter(numbers) and _hits(answer, target)

    return compat_text.torchrl_verdict(text, right, format_reward)


_WITH_FLOOR = {**FOUR_OPERATIONS, ast.FloorDiv: lambda a, b: Fraction(a // b)}


def _integers(expression: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", expression)]


def _hits(expression: str, target: float) -> bool:
    if not re.fullmatch(r"[\d\s+\-*/().]+", expression):
        return False
    try:
        reached = value(parse(expression.strip()), _WITH_FLOOR)
    except NOT_ARITHMETIC:
        return False
    return abs(reached - Fraction(target)) < Fraction(1, 10**5)
