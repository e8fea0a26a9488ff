"""Reproduces graders of other trainers that need math-verify or exact arithmetic.

Every grader returns the recorded verdicts of its system, faults included (a regular expression that stops at
the third brace, a wrong completion that scores better because of its length). None is a default. The module
`compat_rewards` makes rewards of the graders that `env.reward` can name. The graders have no time limit:
math-verify runs without its signal-based timeouts, and the caller's process has the deadline. Graders that need
no mathematics are in `compat_text`.
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
from envs.verifiers.expressions import EVALUATION_ERRORS, FOUR_OPERATIONS, evaluate, parse_expression

_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_BOX_OF_DEPTH_THREE = re.compile(rf"\\boxed\{{((?:[^{{}}]|{_GROUP})*)\}}", re.DOTALL)
_ANSWER_ON_A_LINE = re.compile(r"<answer>(.*?)</answer>")
COATI_SCORE = 10.0
"""Reward of a right answer in ColossalChat."""


def _parse(text: str, **options: Any) -> list[Any]:
    """Parses a text with math-verify without a timeout."""
    from math_verify import parse

    return list(parse(text, parsing_timeout=None, **options))


def _verify(reference: Any, answer: Any) -> bool:
    """Whether math-verify takes two parsed answers for equal, without a timeout."""
    from math_verify import verify

    return bool(verify(reference, answer, timeout_seconds=None))


def math_verify(text: str, reference: str, in_dollars: bool = False) -> bool:
    """Whether math-verify, called as in its manual, finds the reference answer.

    in_dollars: the reference answer is put in dollars before math-verify reads it.
    """
    return _verify(_parse(f"${reference}$" if in_dollars else reference), _parse(text))


# Megatron-LM ---------------------------------------------------------------------------------------------------


def megatron_math(
    text: str,
    reference: str,
    finish_reason: str = "stop",
    format_reward: float = 0.0,
    negative_reward: float = 0.0,
    partial_end_reward: float = 0.0,
) -> float:
    """Returns 1 for the right answer at the very end of the text.

    math-verify reads the answer in the text, and compares it with the reference answer as text.
    """
    matches = list(compat_text.ANSWER.finditer(text)) or list(_BOX_OF_DEPTH_THREE.finditer(text))
    if not matches:
        return negative_reward
    if not _verify(reference, _parse(matches[-1][1])) or finish_reason == "length":
        return format_reward
    return 1.0 if text.endswith(matches[-1][0]) else partial_end_reward


# ColossalChat --------------------------------------------------------------------------------------------------


class CoatiStatus(IntEnum):
    """Result of a comparison of two answers in ColossalChat."""

    SUCCESS = 1
    MATCHING_FAIL = 0
    CANNOT_PARSE_GT_ANSWER = -1
    CANNOT_PARSE_PREDICTION = -2


@cache
def _coati_config() -> tuple[Any, ...]:
    """Returns ColossalChat's configuration of math-verify."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    normalization = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
    )
    latex = LatexExtractionConfig(normalization_config=normalization, boxed_match_priority=0)
    return ExprExtractionConfig(), latex


def coati_equal(answer: str, reference: str) -> CoatiStatus:
    """Compares two answers, each in a box, with math-verify."""
    boxed_texts = [text if text.startswith("\\boxed{") else f"\\boxed{{{text}}}" for text in (answer, reference)]
    expected = _parse(boxed_texts[1], extraction_config=_coati_config())
    if not expected:
        return CoatiStatus.CANNOT_PARSE_GT_ANSWER
    prediction = _parse(boxed_texts[0], extraction_config=_coati_config())
    if not prediction:
        return CoatiStatus.CANNOT_PARSE_PREDICTION
    return CoatiStatus(int(_verify(expected, prediction)))


def coati_length_penalty(length: int, max_new_tokens: int, cache_length: int) -> float:
    """Returns the length penalty: 0 up to the cache, and -10 at the limit.

    The penalty falls linearly in the cache; it is the soft punishment of DAPO times 10.
    """
    start = max_new_tokens - cache_length
    return (start - length) / cache_length * COATI_SCORE if start < length < max_new_tokens else 0.0


def _coati_reward(
    read_answer: Callable[[str], tuple[str | None, bool]],
    text: str,
    reference: str,
    length: int,
    max_new_tokens: int,
    cache_length: int = 0,
    soft_over_length_punishment: bool = False,
) -> list[float]:
    """Returns the reward, the format score and the accuracy of a text.

    A text without an answer earns and loses nothing. The reward is 0 at the length limit.
    read_answer: maps a text to its answer, and to whether the text has the requested format.
    """
    answer, has_format = read_answer(text)
    if answer is None:
        return [0.0, 0.0, 0.0]
    reward, accuracy = 0.0, 0.0
    if has_format:
        status = coati_equal(answer, reference)
        if status is CoatiStatus.SUCCESS:
            reward, accuracy = COATI_SCORE, 1.0
        elif status is CoatiStatus.CANNOT_PARSE_PREDICTION and answer.strip().lower() == reference.strip().lower():
            reward, accuracy = COATI_SCORE / 2, 1.0
    if soft_over_length_punishment:
        reward += coati_length_penalty(length, max_new_tokens, cache_length)
    if length >= max_new_tokens:
        reward = 0.0
    return [reward, float(has_format), accuracy]


coati_think_answer_tags = partial(
    _coati_reward, lambda text: (compat_text.coati_solution(text), compat_text.coati_structure(text))
)
"""Reward of 10 for the right answer in `<think>...</think><answer>...</answer>`."""
coati_boxed = partial(_coati_reward, lambda text: (compat_text.coati_boxed_solution(text), True))
"""Reward of 10 for the right answer in the last box."""


# TRL, verl, TorchRL --------------------------------------------------------------------------------------------


def trl_accuracy(text: str, reference: str) -> float | None:
    """Returns 1 for a right answer in a LaTeX formula or box, else 0.

    The result is None if the reference answer cannot be read.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    expected = _parse(reference)
    if not expected:
        return None
    anchored_latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    prediction = _parse(text, extraction_config=[anchored_latex], extraction_mode="first_match")
    return float(_verify(expected, prediction))


def trl_reasoning_accuracy(text: str, reference: str) -> float | None:
    """Returns `trl_accuracy` of the text after the first `</think>`, else 0."""
    _, closed, answer_text = text.partition("</think>")
    return trl_accuracy(answer_text, reference) if closed else 0.0


def verl_math_verify(text: str, reference: str) -> float:
    """Returns 1 if math-verify matches the boxed reference answer with any answer in the text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    expected = _parse(f"\\boxed{{{reference}}}", extraction_config=[latex])
    return float(_verify(expected, _parse(text, extraction_config=[plain, latex])))


def torchrl_math(text: str, reference: str, format_reward: float = 0.1) -> dict[str, Any]:
    """Scores the first `<answer>` by math-verify, with answer and reference exchanged."""
    return compat_text.torchrl_verdict(text, lambda answer: _verify(_parse(answer), _parse(reference)), format_reward)


# Countdown -----------------------------------------------------------------------------------------------------


def megatron_countdown(text: str, target: float, numbers: Sequence[int], format_score: float = 0.1) -> float:
    """Returns 1 if the last answer uses all numbers once and reaches the target.

    Any other answer earns the format score.
    """
    matches = _ANSWER_ON_A_LINE.findall(text)
    if not matches:
        return 0.0
    hit = _hits_target(matches[-1], target) and Counter(_integers(matches[-1])) == Counter(numbers)
    return 1.0 if hit else format_score


def torchrl_countdown(text: str, target: int, numbers: Sequence[int], format_reward: float = 0.1) -> dict[str, Any]:
    """Scores the first answer, which may use each number at most once."""

    def is_right(answer: str) -> bool:
        return not Counter(_integers(answer)) - Counter(numbers) and _hits_target(answer, target)

    return compat_text.torchrl_verdict(text, is_right, format_reward)


_WITH_FLOOR = {**FOUR_OPERATIONS, ast.FloorDiv: lambda a, b: Fraction(a // b)}


def _integers(expression: str) -> list[int]:
    """Returns the integers in an expression."""
    return [int(number) for number in re.findall(r"\d+", expression)]


def _hits_target(expression: str, target: float) -> bool:
    """Whether an expression has the value of the target."""
    if not re.fullmatch(r"[\d\s+\-*/().]+", expression):
        return False
    try:
        result = evaluate(parse_expression(expression.strip()), _WITH_FLOOR)
    except EVALUATION_ERRORS:
        return False
    return abs(result - Fraction(target)) < Fraction(1, 10**5)
