"""Tests named rewards against misleading answers, beside an independent strict check."""

import random

import pytest

from config.schema.env import EnvConfig
from envs.rewards import find_reward
from envs.task import Completion, Example
from tests.envs.attack_texts import BOXED_PATTERN, MARK_PATTERNS, is_right, sample_attempt

RNG = random.Random(0)
ATTEMPTS = [sample_attempt(RNG) for _ in range(2000)]


def is_paid(reward: str, question: str, answer: str) -> bool:
    """Whether the reward scores the answer to `A+B=` as right."""
    reference = sum(map(int, question.rstrip("=").split("+")))
    example = Example(({"role": "user", "content": question},), str(reference), 0)
    verdict = find_reward(reward).function(Completion(answer), example, EnvConfig(dataset="arithmetic"))
    assert isinstance(verdict.components, dict)
    return verdict.components["accuracy"] == 1.0


@pytest.mark.parametrize("reward", MARK_PATTERNS)
def test_rewards_reject_answers_without_the_sum(reward: str) -> None:
    accepted = [line for line in ATTEMPTS if is_paid(reward, *line)]
    assert len(accepted) > 20
    assert [line for line in accepted if not is_right(*line)] == []


@pytest.mark.parametrize("reward", ["math", "boxed", "dapo"])
def test_rewards_accept_a_sum_in_the_required_form(reward: str) -> None:
    right = [line for line in ATTEMPTS if is_right(*line, MARK_PATTERNS[reward])]
    assert len(right) > 20
    assert [line for line in right if not is_paid(reward, *line)] == []


@pytest.mark.parametrize(
    ("question", "answer", "mark", "right"),
    [
        ("8+3=", "11", "", True),
        ("8+3=", "The answer is 8 + 3 = 11.", "", True),
        ("8+3=", "eleven", "", True),
        ("8+3=", "+11", "", True),
        ("8+3=", "The answer is 8+3.", "", False),
        ("0+8=", "0+8", "", False),
        ("8+3=", "22/2", "", False),
        ("8+3=", "The answer is \\sqrt{11}.", "", False),
        ("8+3=", "11 or 12", "", False),
        ("8+3=", "--11", "", False),
        ("8+3=", "\\boxed{11}", BOXED_PATTERN, True),
        ("8+3=", "11", BOXED_PATTERN, False),
    ],
)
def test_the_check_is_strict(question: str, answer: str, mark: str, right: bool) -> None:
    assert is_right(question, answer, mark) is right
