"""Task `mixture`: several tasks sampled by weight, each with its own rows, prompts and reward.

env.dataset=mixture env.mixture='{gsm8k: 3, algebra: {dataset: math, weight: 1, options: {...}}}'
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.former_names import MEMBER_KEYS
from config.schema.values import build_section
from envs.duplicates import distinct_examples
from envs.example import MixedExamples
from envs.reward_workers.scoring import Scorer
from envs.reward_workers.task_scorer import make_scorer
from envs.task import Completion, Example, Reward, Task, make_task, register

MEMBER_FIELDS = (
    *("dataset", "data_files", "data_revision", "holdout", "duplicates", "system_prompt", "prefill"),
    *("options", "reward", "reward_weights", "fallback_reward"),
)
"""Config fields of a member. If unset, `prefill` and `system_prompt` are the mixture's; others have their defaults."""


@register("mixture")
class Mixture(Task):
    """Task that combines the tasks in `env.mixture`, its members.

    `env.mixture` maps NAME to WEIGHT, or to {weight, dataset (unset: NAME), data_files, options, reward, ...}.
    """

    reads_files = False
    reads_hub = False

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        if not env.mixture:
            raise ConfigError(
                "env.dataset=mixture: there are no members; set env.mixture, such as env.mixture='{gsm8k: 3, math: 1}'"
            )
        if env.reward is not None or env.reward_weights:
            raise ConfigError("env.reward: a mixture has one reward per member; set env.mixture.NAME.reward")
        if env.fallback_reward is not None:
            raise ConfigError(
                "env.fallback_reward: a mixture has one fallback reward per member; set "
                "env.mixture.NAME.fallback_reward"
            )
        self.mixture_weights: dict[str, float] = {}
        for name, settings_or_weight in env.mixture.items():
            weight, member = _member(name, settings_or_weight, env)
            self.mixture_weights[name] = weight
            try:
                self.members[name] = make_task(member)
            except ConfigError as error:  # the message names `env`, which is this member's section
                raise ConfigError(f"env.mixture.{name}: {error}") from error
        self.scorers: dict[str, Scorer] = {name: make_scorer(task) for name, task in self.members.items()}

    def examples(self, split: str) -> Sequence[Example]:
        members = {name: distinct_examples(task, split) for name, task in self.members.items()}
        return MixedExamples(members, self.mixture_weights)

    def reward(self, completion: Completion, example: Example) -> Reward:
        return self.scorers[example.source](completion, example)


def _member(name: str, settings_or_weight: Any, env: EnvConfig) -> tuple[float, EnvConfig]:
    """Returns weight and `env` section of one member. Raises ConfigError for wrong settings."""
    settings: dict[str, Any] = (
        dict(settings_or_weight) if isinstance(settings_or_weight, dict) else {"weight": settings_or_weight}
    )
    weight = settings.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ConfigError(f"env.mixture.{name}: weight {weight!r} must be a number above 0, and finite")
    unknown = sorted(set(settings) - set(MEMBER_FIELDS))
    if unknown and (new := MEMBER_KEYS.get(unknown[0])):
        raise ConfigError(f"env.mixture.{name}.{unknown[0]}: the key is now called {new}; set env.mixture.{name}.{new}")
    if unknown:
        raise ConfigError(
            f"env.mixture.{name}.{unknown[0]}: no such key of a member; choose one of weight, "
            f"{', '.join(MEMBER_FIELDS)}"
        )
    own = build_section(EnvConfig, {"dataset": name} | settings, f"env.mixture.{name}")
    if own.dataset == "mixture":
        raise ConfigError(f"env.mixture.{name}: a mixture cannot be a member of a mixture")
    fields = {field: vars(own)[field] for field in MEMBER_FIELDS}
    fields |= {key: settings.get(key, vars(env)[key]) for key in ("prefill", "system_prompt")}
    return float(weight), replace(env, mixture={}, curriculum=env.curriculum.member_config(name), **fields)
