"""Tests of `env.group_reward` in real reward workers."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.group import Verdict
from envs.reward_workers.group_reward import GroupReward, GroupRewardTask
from envs.reward_workers.service import RewardService
from envs.task import Completion, Example

EXAMPLE = Example(({"role": "user", "content": "1+1="},), "2", 7, row_data={"hint": "two"})
TEXTS = ["2", "two", "I think 2", ""]


def make_env(function: str, **options: Any) -> EnvConfig:
    path = f"tests.envs.group_rewards:{function}"
    return EnvConfig(dataset="arithmetic", group_reward=path, reward_workers=1, max_error_rate=1.0, **options)


def rescore(env: EnvConfig, verdicts: Sequence[Verdict], completions: Sequence[Completion] = ()) -> list[Verdict]:
    completions = completions or [Completion(text) for text in TEXTS]
    with closing(RewardService(GroupRewardTask(env), env)) as service:

        async def score(inputs: Sequence[Completion], examples: Sequence[Example]) -> Sequence[Verdict]:
            return service.score(inputs, examples)

        return asyncio.run(GroupReward(score).rescore(completions, EXAMPLE, verdicts))


def test_the_function_sees_all_scored_completions_and_replaces_their_scores() -> None:
    outcomes = ("scored", "scored", "error", "scored")
    verdicts = [Verdict(float(index), {"accuracy": 0.0}, outcome) for index, outcome in enumerate(outcomes)]  # type: ignore[arg-type]
    new = rescore(make_env("rank_by_length"), verdicts)
    assert [verdict.score for verdict in new] == [0 + 1 / 3, 1 + 0.0, 2.0, 3 + 2 / 3]
    assert [verdict.outcome for verdict in new] == list(outcomes)
    assert all(verdict.components == {"accuracy": 0.0} for verdict in new)


def test_the_function_sees_the_turns() -> None:
    completions = [Completion("a", turns=({"role": "assistant", "content": "a"},) * count) for count in (1, 3)]
    verdicts = [Verdict(0.0, {}, "scored")] * 2
    assert [one.score for one in rescore(make_env("count_turns"), verdicts, completions)] == [1.0, 3.0]


@pytest.mark.parametrize("function", ["hang", "too_few", "not_finite"])
def test_a_failing_function_makes_its_group_an_error(function: str) -> None:
    verdicts = [Verdict(1.0, {}, "scored"), Verdict(0.0, {}, "invalid")]
    new = rescore(make_env(function, reward_timeout_s=1.0), verdicts, [Completion("a"), Completion("b")])
    assert [verdict.outcome for verdict in new] == ["error", "invalid"]


def test_a_group_without_a_scored_completion_is_not_passed() -> None:
    verdicts = [Verdict(0.0, {}, "error")] * 4
    assert rescore(make_env("hang"), verdicts) == verdicts


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("of_one_argument", "define the function with the parameters (completions, example, scores)"),
        ("EXAMPLE", "has no 'EXAMPLE'"),
    ],
)
def test_another_form_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.group_reward=") as refused:
        GroupRewardTask(make_env(path))
    assert message in str(refused.value)


def test_a_built_in_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a function of your own as module:function"):
        EnvConfig(dataset="arithmetic", group_reward="math")
