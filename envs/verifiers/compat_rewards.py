"""The graders of other systems as named rewards: `env.reward=compat_verl_dapo` pays what verl's grader `dapo` pays.

Behind `compat_` stand the system and its function, as in the presets of objectives. A grader reads the gold that the
task has: a text, or the numbers and the target of countdown. What the systems leave to settings has their defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any

from config.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.verifiers.compat import GRADERS

Graded = Callable[[Completion, Example], Any]


def _as_reward(graded: Any) -> Reward:
    """A grader's own form of verdict as a reward.

    Raises:
        ValueError: the grader cannot read the gold.
    """
    if graded is None:
        raise ValueError("this grader cannot read the gold of the row")
    if isinstance(graded, Mapping) and "acc" in graded:
        return Reward(graded["score"], {"accuracy": float(graded["acc"])})
    if isinstance(graded, Mapping):
        parts = {
            "accuracy": graded["success"],
            "format": graded["reward_answer"],
            "think": graded["reward_think"],
        }
        return Reward(graded["reward"], {name: float(value) for name, value in parts.items()})
    if isinstance(graded, list):
        score, formatted, accuracy = graded
        return Reward(score, {"accuracy": accuracy, "format": formatted})
    return Reward(float(graded), {"accuracy": float(graded >= 1)})


def _of_text(name: str) -> Graded:
    """A grader of a text against a gold text."""
    return lambda completion, example: GRADERS[name](completion.text, str(example.answer))


def _of_countdown(name: str) -> Graded:
    def graded(completion: Completion, example: Example) -> Any:
        return GRADERS[name](completion.text, example.answer["target"], example.answer["numbers"])

    return graded


def _of_coati(name: str) -> Graded:
    """ColossalChat pays nothing for a completion that reached the limit of its length."""

    def graded(completion: Completion, example: Example) -> Any:
        return GRADERS[name](
            completion.text, str(example.answer), length=int(completion.truncated), max_new_tokens=1
        )

    return graded


def _megatron_math(completion: Completion, example: Example) -> Any:
    reason = "length" if completion.truncated else "stop"
    return GRADERS["megatron_math"](completion.text, str(example.answer), finish_reason=reason)


def _torchrl_math(completion: Completion, example: Example) -> Any:
    """TorchRL takes the gold out of the box of a solution."""
    return GRADERS["torchrl_math"](completion.text, GRADERS["torchrl_boxed"](str(example.answer)))


def _trl_think_format(completion: Completion, example: Example) -> Any:
    """It asks for a form and for no gold."""
    return GRADERS["trl_think_format"](completion.text)


_TEXT = (
    *(
        "math_verify",
        "nanochat_gsm8k",
        "openai_gsm8k",
        "torchrl_gsm8k",
        "trl_accuracy",
        "trl_reasoning_accuracy",
    ),
    *("verl_dapo", "verl_gsm8k", "verl_math", "verl_math_verify"),
)
REWARDS: Mapping[str, Graded] = {
    **{name: _of_text(name) for name in _TEXT},
    **{name: _of_countdown(name) for name in ("megatron_countdown", "torchrl_countdown")},
    **{name: _of_coati(name) for name in ("coati_boxed", "coati_think_answer_tags")},
    "megatron_math": _megatron_math,
    "torchrl_math": _torchrl_math,
    "trl_think_format": _trl_think_format,
}
LEAST = {"verl_dapo": -1.0}


def _register(name: str, graded: Graded) -> None:
    @reward(f"compat_{name}", min_score=LEAST.get(name))
    def judge(completion: Completion, example: Example, env: EnvConfig) -> Reward:
        return _as_reward(graded(completion, example))


for _name, _graded in REWARDS.items():
    _register(_name, _graded)
