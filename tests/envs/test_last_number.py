"""Tests the reward `last_number`: the last number must be simplified, whatever surrounds it."""

import pytest

from config.schema.env import EnvConfig
from envs.example import Completion, Example
from envs.rewards import find_reward

RIGHT = [
    ("12", "12"), ("7+5 = 12.", "12"), ("The sum of 7 and 5 is **12**.", "12"),
    ("First 7, then 5, so 12!", "12"), ("\\boxed{12}", "12"), ("(12)", "12"), ("$1,000", "1000"),
    ("it is -3.", "-3"), ("8 − 11 = −3", "-3"), ("that is 1/2", "0.5"), ("11 - right?", "11"),
    ("<think>3</think>12", "12"),
    *((f"It is 1{mark}234.", "1234") for mark in ("\\,", "\\!", "\\ ", "{,}", "\xa0", "\u2009", "\u202f")),
]  # fmt: skip
WRONG = [
    ("8+3", "11"), ("8+3", "3"), ("0 + 3", "3"), ("5 - 2", "2"), ("3 x 4", "4"), ("3 \\times 4", "4"),
    ("11 = 8+3", "11"), ("11+", "11"), ("11 + 0", "11"), ("22/2", "11"), ("2^{10}", "10"), ("\\sqrt{9}", "9"),
    ("\\frac{1}{2}", "2"), ("3:30", "30"), ("10-12", "12"), ("x2", "2"), ("12\n13", "12"),
    *((f"It is 1{mark}234.", "234") for mark in ("\\,", "{,}", "\xa0", "\u202f")),
    ("<think>12</think>", "12"), ("", "12"), ("1" * 5000, "1"),
]  # fmt: skip


def score_text(text: str, reference: str) -> float:
    """Returns the score of a text under `last_number`."""
    example = Example(({"role": "user", "content": "?"},), reference, 0)
    return find_reward("last_number").function(Completion(text), example, EnvConfig(dataset="jsonl")).score


@pytest.mark.parametrize(("text", "reference"), RIGHT)
def test_simplified_numbers_score_one(text: str, reference: str) -> None:
    assert score_text(text, reference) == 1.0


@pytest.mark.parametrize(("text", "reference"), WRONG)
def test_other_numbers_score_zero(text: str, reference: str) -> None:
    assert score_text(text, reference) == 0.0


def test_repeating_any_question_of_the_recipe_earns_nothing() -> None:
    questions = [(f"{a}+{b}", str(a + b)) for a in range(10) for b in range(10)]
    assert not any(score_text(text, reference) for text, reference in questions)
    assert not any(score_text(f"The sum of {text} is {text}=", reference) for text, reference in questions)
