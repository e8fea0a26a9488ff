"""Named rewards under attack by answers that look right, beside a strict check of its own."""

import random

import pytest

from config.schema.env import EnvConfig
from envs.rewards import find_reward
from envs.task import Completion, Example
from tests.envs.attack_texts import BOXED, FORMS, attempt, is_right

CHANCE = random.Random(0)
ATTEMPTS = [attempt(CHANCE) for _ in range(2000)]


def paid(reward: str, question: str, answer: str) -> bool:
    """Whether the reward calls the answer to `A+B=` right."""
    gold = sum(map(int, question.rstrip("=").split("+")))
    example = Example(({"role": "user", "content": question},), str(gold), 0)
    judged = find_reward(reward).function(Completion(answer), example, EnvConfig(dataset="arithmetic"))
    assert isinstance(judged.parts, dict)
    return judged.parts["accuracy"] == 1.0


@pytest.mark.parametrize("reward", FORMS)
def test_nothing_is_paid_that_leaves_the_sum_to_the_reader(reward: str) -> None:
    accepted = [line for line in ATTEMPTS if paid(reward, *line)]
    assert len(accepted) > 20
    assert [line for line in accepted if not is_right(*line)] == []


@pytest.mark.parametrize("reward", ["math", "boxed", "dapo"])
def test_a_sum_in_the_form_that_is_asked_for_is_paid(reward: str) -> None:
    right = [line for line in ATTEMPTS if is_right(*line, FORMS[reward])]
    assert len(right) > 20
    assert [line for line in right if not paid(reward, *line)] == []


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
        ("8+3=", "\\boxed{11}", BOXED, True),
        ("8+3=", "11", BOXED, False),
    ],
)
def test_the_check_is_strict(question: str, answer: str, mark: str, right: bool) -> None:
    assert is_right(question, answer, mark) is right
