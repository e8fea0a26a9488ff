"""Group reward: a user function that scores all completions of a prompt together (`env.group_reward`).

    verdicts of the group ─▶ one verification in a reward worker ─▶ new scores, one for each completion

The function runs under the deadline and memory limit of rewards. A ranker or a pairwise judge is such a function.
This module does not import torch.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Completion, Example, Reward
from envs.group import Verdict
from envs.reward_workers.scoring import finite_float
from envs.task import Task
from envs.user_code import load_user_object

GroupFunction = Callable[[list[Completion], Example, list[float]], Sequence[float]]
CompletionScorer = Callable[[Sequence[Completion], Sequence[Example]], Awaitable[Sequence[Verdict]]]
"""Async function that scores completions, each against the example at the same index; returns verdicts in order."""


def load_group_function(env: EnvConfig) -> GroupFunction:
    """Loads the function of `env.group_reward`.

    Raises:
        ConfigError: the function does not exist, or does not take three arguments.
    """
    place = f"env.group_reward={env.group_reward}"
    function: Any = load_user_object("env.group_reward", str(env.group_reward))
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{place}: {function!r} is not a function; define group_reward(completions, example, scores)")
    try:
        inspect.signature(function).bind([], None, [])
    except TypeError as error:
        raise ConfigError(
            f"{place}: {error}; define the function with the parameters (completions, example, scores)"
        ) from error
    loaded: GroupFunction = function
    return loaded


class GroupRewardTask(Task):
    """Task whose reward scores a whole group, as one verification of a reward worker.

    The example's `row_data` holds the group. The components of the reward are the new scores by position.
    """

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(replace(env, reward=None, reward_weights=None, fallback_reward=None))
        self.function = load_group_function(env)

    def examples(self, split: str) -> Sequence[Example]:
        """Returns no examples: the groups are the examples."""
        return []

    def reward(self, completion: Completion, example: Example) -> Reward:
        """Returns the new scores of the group in `example.row_data`."""
        group = example.row_data
        completions = [Completion(**fields) for fields in group["completions"]]
        scores = self.function(completions, replace(example, row_data=group["row_data"]), list(group["scores"]))
        if isinstance(scores, str | Mapping) or len(scores) != len(completions):
            raise ValueError(
                f"env.group_reward returned {scores!r} for {len(completions)} completions; return a list of one "
                "number for each completion"
            )
        return Reward(0.0, {str(index): finite_float(score, "a score") for index, score in enumerate(scores)})


class GroupReward:
    """Replaces the scores of a group by those of `env.group_reward`.

    Args:
        score: async scorer over the reward service of a `GroupRewardTask`.
    """

    def __init__(self, score: CompletionScorer) -> None:
        self._score = score

    async def rescore(
        self, completions: Sequence[Completion], example: Example, verdicts: Sequence[Verdict]
    ) -> list[Verdict]:
        """Returns verdicts with new scores, in order.

        Invalid completions and failed verifications keep their verdicts, and the function does not see them. If the
        function fails, the other verdicts become errors.
        """
        scored = [index for index, verdict in enumerate(verdicts) if verdict.outcome == "scored"]
        if not scored:
            return list(verdicts)
        group = {
            "completions": [{name: vars(completions[index])[name] for name in _FIELDS} for index in scored],
            "scores": [verdicts[index].score for index in scored],
            "row_data": example.row_data,
        }
        (result,) = await self._score([Completion("")], [replace(example, row_data=group)])
        new_verdicts = list(verdicts)
        for position, index in enumerate(scored):
            old = verdicts[index]
            if result.outcome == "scored":
                new_verdicts[index] = replace(old, score=result.components[str(position)])
            else:
                new_verdicts[index] = replace(old, outcome="error")
        return new_verdicts


_FIELDS = tuple(Completion.__dataclass_fields__)
