"""The graders of other systems as named rewards: `env.reward=compat_verl_dapo` pays what verl's grader `dapo` pays.

Behind `compat_` stand the system and its function, as in the presets of objectives. A grader reads the gold that the
task has: a text, or the numbers and the target of countdown. What the systems leave to settings has their defaults.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from config.schema.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.verifiers import compat, compat_text

Graded = Callable[[Completion, Example], Any]


def _judge(grader: Graded, completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """A grader's own verdict as a reward. Raises ValueError where it cannot read the gold."""
    graded = grader(completion, example)
    if graded is None:
        raise ValueError("this grader cannot read the gold of the row")
    if isinstance(graded, Mapping) and "acc" in graded:
        return Reward(graded["score"], {"accuracy": float(graded["acc"])})
    if isinstance(graded, Mapping):
        named = {"accuracy": "success", "format": "reward_answer", "think": "reward_think"}
        return Reward(graded["reward"], {name: float(graded[other]) for name, other in named.items()})
    if isinstance(graded, list):
        score, formatted, accuracy = graded
        return Reward(score, {"accuracy": accuracy, "format": formatted})
    return Reward(float(graded), {"accuracy": float(graded >= 1)})


def _of_text(grader: Callable[[str, str], Any]) -> Graded:
    """A grader of a text against a gold text."""
    return lambda completion, example: grader(completion.text, str(example.answer))


def _of_countdown(grader: Callable[[str, int, list[int]], Any]) -> Graded:
    return lambda completion, example: grader(
        completion.text, example.answer["target"], example.answer["numbers"]
    )


def _of_coati(grader: Callable[..., list[float]]) -> Graded:
    """ColossalChat pays nothing for a completion that reached the limit of its length."""
    return lambda completion, example: grader(
        completion.text, str(example.answer), length=int(completion.truncated), max_new_tokens=1
    )


REWARDS: Mapping[str, Graded] = {
    "coati_boxed": _of_coati(compat.coati_boxed),
    "coati_think_answer_tags": _of_coati(compat.coati_think_answer_tags),
    "megatron_countdown": _of_countdown(compat.megatron_countdown),
    "megatron_math": lambda completion, example: compat.megatron_math(
        completion.text, str(example.answer), "length" if completion.truncated else "stop"
    ),
    "nanochat_gsm8k": _of_text(compat_text.nanochat_gsm8k),
    "openai_gsm8k": _of_text(compat_text.openai_gsm8k),
    "torchrl_countdown": _of_countdown(compat.torchrl_countdown),
    "torchrl_gsm8k": _of_text(compat_text.torchrl_gsm8k),
    "torchrl_math": lambda completion, example: compat.torchrl_math(
        completion.text, compat_text.torchrl_boxed(str(example.answer))
    ),
    "trl_accuracy": _of_text(compat.trl_accuracy),
    "trl_reasoning_accuracy": _of_text(compat.trl_reasoning_accuracy),
    "trl_think_format": lambda completion, example: compat_text.trl_think_format(completion.text),
    "verl_dapo": _of_text(compat_text.verl_dapo),
    "verl_gsm8k": _of_text(compat_text.verl_gsm8k),
    "verl_math": _of_text(compat_text.verl_math),
    "verl_math_verify": _of_text(compat.verl_math_verify),
}
"""By the name of its system and function."""
LEAST = {"verl_dapo": -1.0}


for _name, _graded in REWARDS.items():
    reward(f"compat_{_name}", min_score=LEAST.get(_name))(partial(_judge, _graded))
