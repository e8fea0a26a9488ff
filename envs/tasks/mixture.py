"""A mixture: several data sets, each with its own rows, prompt and reward, drawn by weight.

env.dataset=mixture env.mixture='{gsm8k: 3, algebra: {dataset: math, weight: 1, options: {...}}}'
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.values import section_of
from envs.duplicates import distinct_examples
from envs.example import Mixed
from envs.judging.judge import make_judge
from envs.judging.outcome import Judge
from envs.task import Completion, Example, Reward, Task, make_task, register

OWN_FIELDS = (
    *("dataset", "data_files", "data_revision", "holdout", "duplicates", "system_prompt", "prefill"),
    *("options", "reward", "reward_weights", "reward_second_opinion"),
)
"""Fields of a member's own. Unset, `prefill` and `system_prompt` are the mixture's, the others have their defaults."""


@register("mixture")
class Mixture(Task):
    """`env.mixture` maps NAME to WEIGHT, or to {weight, dataset (unset: NAME), data_files, options, reward, ...}."""

    reads_files = False
    reads_hub = False

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        if not env.mixture:
            raise ConfigError(
                "env.dataset=mixture needs env.mixture, such as env.mixture='{gsm8k: 3, math: 1}'"
            )
        if env.reward is not None or env.reward_weights:
            raise ConfigError(
                "env.reward of a mixture: every member has its own; set env.mixture.NAME.reward"
            )
        if env.reward_second_opinion is not None:
            raise ConfigError(
                "env.reward_second_opinion of a mixture: every member has its own; set "
                "env.mixture.NAME.reward_second_opinion"
            )
        self.mixing: dict[str, float] = {}
        for name, given in env.mixture.items():
            weight, member = _member(name, given, env)
            self.mixing[name] = weight
            try:
                self.members[name] = make_task(member)
            except ConfigError as error:  # it speaks of `env`, which is that of this member
                raise ConfigError(f"env.mixture.{name}: {error}") from error
        self.judges: dict[str, Judge] = {name: make_judge(task) for name, task in self.members.items()}

    def examples(self, split: str) -> Sequence[Example]:
        members = {name: distinct_examples(task, split) for name, task in self.members.items()}
        return Mixed(members, self.mixing)

    def reward(self, completion: Completion, example: Example) -> Reward:
        return self.judges[example.source](completion, example)


def _member(name: str, given: Any, env: EnvConfig) -> tuple[float, EnvConfig]:
    """Weight and `env` section of one member."""
    settings: dict[str, Any] = dict(given) if isinstance(given, dict) else {"weight": given}
    weight = settings.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ConfigError(f"env.mixture.{name}: weight {weight!r} must be a number above 0, and finite")
    unknown = sorted(set(settings) - set(OWN_FIELDS))
    if unknown:
        raise ConfigError(f"env.mixture.{name}.{unknown[0]}: a member knows weight, {', '.join(OWN_FIELDS)}")
    own = section_of(EnvConfig, {"dataset": name} | settings, f"env.mixture.{name}")
    if own.dataset == "mixture":
        raise ConfigError(f"env.mixture.{name}: a mixture cannot be a member of a mixture")
    fields = {field: vars(own)[field] for field in OWN_FIELDS}
    fields |= {key: settings.get(key, vars(env)[key]) for key in ("prefill", "system_prompt")}
    return float(weight), replace(env, mixture={}, curriculum=env.curriculum.of_member(name), **fields)
