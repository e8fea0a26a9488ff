"""Registers the graders of other systems as named rewards, such as `compat_verl_dapo`.

The name consists of `compat_`, the system, and the system's function, as in the presets of objectives. A grader
reads the reference answer of the task: a text, or the numbers and the target of countdown. Settings of the
systems have their defaults.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from config.schema.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.verifiers import compat, compat_text

Grader = Callable[[Completion, Example], Any]
"""Function of a completion and its example, with the verdict of another system."""


def _score_with_grader(grader: Grader, completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """Converts a grader's verdict to a reward.

    Raises:
        ValueError: The grader cannot read the reference answer.
    """
    grade = grader(completion, example)
    if grade is None:
        raise ValueError("this grader cannot read the row's reference answer")
    if isinstance(grade, Mapping) and "acc" in grade:
        return Reward(grade["score"], {"accuracy": float(grade["acc"])})
    if isinstance(grade, Mapping):
        component_keys = {"accuracy": "success", "format": "reward_answer", "think": "reward_think"}
        return Reward(grade["reward"], {name: float(grade[key]) for name, key in component_keys.items()})
    if isinstance(grade, list):
        score, format_score, accuracy = grade
        return Reward(score, {"accuracy": accuracy, "format": format_score})
    return Reward(float(grade), {"accuracy": float(grade >= 1)})


def _text_grader(grader: Callable[[str, str], Any]) -> Grader:
    """Adapts a grader that takes a text and a reference text."""
    return lambda completion, example: grader(completion.text, str(example.answer))


def _countdown_grader(grader: Callable[[str, int, list[int]], Any]) -> Grader:
    """Adapts a grader that takes a text, a target and numbers."""
    return lambda completion, example: grader(completion.text, example.answer["target"], example.answer["numbers"])


def _coati_grader(grader: Callable[..., list[float]]) -> Grader:
    """Adapts a grader of ColossalChat, which pays nothing for a truncated completion."""
    return lambda completion, example: grader(
        completion.text, str(example.answer), length=int(completion.truncated), max_new_tokens=1
    )


REWARDS: Mapping[str, Grader] = {
    "coati_boxed": _coati_grader(compat.coati_boxed),
    "coati_think_answer_tags": _coati_grader(compat.coati_think_answer_tags),
    "megatron_countdown": _countdown_grader(compat.megatron_countdown),
    "megatron_math": lambda completion, example: compat.megatron_math(
        completion.text, str(example.answer), "length" if completion.truncated else "stop"
    ),
    "nanochat_gsm8k": _text_grader(compat_text.nanochat_gsm8k),
    "openai_gsm8k": _text_grader(compat_text.openai_gsm8k),
    "torchrl_countdown": _countdown_grader(compat.torchrl_countdown),
    "torchrl_gsm8k": _text_grader(compat_text.torchrl_gsm8k),
    "torchrl_math": lambda completion, example: compat.torchrl_math(
        completion.text, compat_text.torchrl_boxed(str(example.answer))
    ),
    "trl_accuracy": _text_grader(compat.trl_accuracy),
    "trl_reasoning_accuracy": _text_grader(compat.trl_reasoning_accuracy),
    "trl_think_format": lambda completion, example: compat_text.trl_think_format(completion.text),
    "verl_dapo": _text_grader(compat_text.verl_dapo),
    "verl_gsm8k": _text_grader(compat_text.verl_gsm8k),
    "verl_math": _text_grader(compat_text.verl_math),
    "verl_math_verify": _text_grader(compat.verl_math_verify),
}
"""Graders by the name of their system and function."""
MIN_SCORES = {"verl_dapo": -1.0}
"""Minimum score of the graders whose score can be negative."""


for _name, _grader in REWARDS.items():
    reward(f"compat_{_name}", min_score=MIN_SCORES.get(_name))(partial(_score_with_grader, _grader))
