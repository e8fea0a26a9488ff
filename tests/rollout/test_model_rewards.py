"""Tests of model rewards together with the rewards of workers."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.model_rewards import JudgeConfig
from envs.example import Completion, Example
from envs.group import Verdict
from envs.reward_workers.service import RewardService
from envs.reward_workers.task_scorer import minimum_score
from envs.rewards import model_reward_names
from envs.task import Task, load_examples, make_task
from tests.rollout.judge_server import MODEL, JudgeRequest, Reply, completion, grade, judge_server
from torchgrpo.rollout.model_rewards.interface import ModelRewardError
from torchgrpo.rollout.model_rewards.model_rewards import ModelRewards, make_model_rewards

RIGHT, WRONG = Completion("right"), Completion("wrong")


def make_env(reward: Any, **fields: Any) -> EnvConfig:
    return EnvConfig(dataset="arithmetic", reward=reward, reward_timeout_s=60.0, **fields)


def score(env: EnvConfig, completions: Sequence[Completion], model_rewards: ModelRewards) -> list[Verdict]:
    """Scores completions of the first example with workers and model rewards."""
    task = make_task(env)
    examples = [load_examples(task, "train")[0]] * len(completions)
    shown = [with_answer(one, examples[0]) for one in completions]
    with closing(RewardService(task, env)) as service:
        verdicts = service.score(shown, examples)

    async def add() -> list[Verdict]:
        try:
            return await model_rewards.add_scores(task, shown, examples, verdicts)
        finally:
            await model_rewards.close()

    return asyncio.run(add())


def with_answer(completion: Completion, example: Example) -> Completion:
    """Replaces the text `right` by the reference answer."""
    text = str(example.answer) if completion.text == "right" else completion.text
    return Completion(text, control_tokens=completion.control_tokens)


def score_with_judge(env: EnvConfig, completions: Sequence[Completion]) -> tuple[list[Verdict], int]:
    """Returns verdicts with a judge's grade of 7, and the number of its requests."""
    with judge_server(grade(7)) as server:
        env.judge = JudgeConfig(server.url, MODEL)
        verdicts = score(env, completions, make_model_rewards(env, {*model_reward_names(env)}))
        return verdicts, len(server.requests)


def test_a_judge_alone_is_the_score() -> None:
    (verdict,), _ = score_with_judge(make_env("judge"), [RIGHT])
    assert (verdict.score, verdict.components, verdict.outcome) == (0.7, {"judge": 0.7}, "scored")
    assert verdict.success == 0.0 and verdict.seconds > 0


@pytest.mark.parametrize("reward", [["exact", "judge"], ["judge", "exact"]])
def test_a_list_weights_the_judge_beside_other_rewards(reward: list[str]) -> None:
    weights = [2.0 if name == "exact" else 0.5 for name in reward]
    verdicts, _ = score_with_judge(make_env(reward, reward_weights=weights), [RIGHT, WRONG])
    assert [one.score for one in verdicts] == pytest.approx([2.35, 0.35])
    assert verdicts[0].components == {"exact": 1.0, "accuracy": 1.0, "judge": 0.7}
    assert [one.success for one in verdicts] == [1.0, 0.0]


def test_the_accuracy_of_model_rewards_alone_is_a_full_score() -> None:
    (verdict,), _ = score_with_judge(make_env(["judge"]), [RIGHT])
    assert verdict.components == {"judge": 0.7, "accuracy": 0.0}


def test_a_user_reward_called_judge_keeps_its_own_component() -> None:
    (verdict,), _ = score_with_judge(make_env(["judge", "tests.rollout.test_model_rewards:judge"]), [RIGHT])
    assert verdict.components["judge"] == 0.7
    assert verdict.components["tests.rollout.test_model_rewards:judge"] == 0.25


def judge(completion: Completion, example: Example) -> float:
    """Returns a constant, as a reward with the name of the judge."""
    return 0.25


def inapplicable(completions: list[str], **columns: object) -> list[None]:
    """Returns None as a reward in TRL's form that does not apply to the row."""
    return [None]


def test_the_judge_counts_where_the_other_reward_does_not_apply() -> None:
    (verdict,), _ = score_with_judge(make_env(["tests.rollout.test_model_rewards:inapplicable", "judge"]), [RIGHT])
    assert verdict.outcome == "scored" and verdict.score == 0.7


@pytest.mark.parametrize("reward", ["judge", ["exact", "judge"]])
def test_invalid_completions_and_errors_are_not_sent(reward: Any) -> None:
    verdicts, requests = score_with_judge(make_env(reward), [Completion("", control_tokens=True), RIGHT])
    assert [one.outcome for one in verdicts] == ["invalid", "scored"] and requests == 1
    failing = ["tests.rewards:never_a_number", "judge"]
    (verdict,), requests = score_with_judge(make_env(failing), [RIGHT])
    assert verdict.outcome == "error" and requests == 0


def test_a_judge_without_a_grade_is_an_error_that_counts() -> None:
    def grade_some(request: JudgeRequest) -> Reply:
        return grade(10)(request) if request.data["answer"] == "fine" else completion("no idea")

    with judge_server(grade_some) as server:
        env = make_env(["exact", "judge"], max_error_rate=0.01)
        env.judge = JudgeConfig(server.url, MODEL, retries=0)
        model_rewards = make_model_rewards(env, {"judge"})
        (fine, failed) = score(env, [Completion("fine"), WRONG], model_rewards)
        assert (fine.outcome, failed.outcome, failed.components) == ("scored", "error", {})
        assert model_rewards.counts.totals()["reward/errors_total"] == 1
        last_error = model_rewards.counts.last_error
        assert last_error.startswith("row ")
        assert f": {server.url}/chat/completions: HTTP status 200, but no grade" in last_error
        with pytest.raises(ConfigError, match=r"env.max_error_rate=0.01: 2 of the last 3 completions have no score"):
            score(env, [Completion("wrong too")], make_shared(env, model_rewards))


def make_shared(env: EnvConfig, model_rewards: ModelRewards) -> ModelRewards:
    """Returns new model rewards with the counts of others."""
    return ModelRewards(make_model_rewards(env, {"judge"}).rewards, model_rewards.counts)


class FixedReward:
    """Model reward that returns one value, or fails."""

    def __init__(self, value: float | ModelRewardError) -> None:
        self.value = value

    async def score(self, completion: Completion, example: Example) -> float:
        if isinstance(self.value, ModelRewardError):
            raise self.value
        return self.value

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass


def test_judge_and_reward_model_are_added() -> None:
    env = make_env(["reward_model", "judge"], reward_weights=[0.5, 1.0])
    empty = make_model_rewards(env, set())
    both = ModelRewards({"judge": FixedReward(0.7), "reward_model": FixedReward(3.0)}, empty.counts)
    (verdict,) = score(env, [RIGHT], both)
    assert verdict.score == pytest.approx(2.2)
    assert verdict.components == {"reward_model": 3.0, "judge": 0.7, "accuracy": 1.0}
    failing = ModelRewards(
        {"judge": FixedReward(0.7), "reward_model": FixedReward(ModelRewardError("x"))}, empty.counts
    )
    (verdict,) = score(env, [RIGHT], failing)
    assert verdict.outcome == "error"


def test_members_of_a_mixture_have_their_own_rewards() -> None:
    with judge_server(grade(7)) as server:
        env = EnvConfig(
            dataset="mixture",
            mixture={"arithmetic": {"reward": "judge"}, "countdown": 1},
            judge=JudgeConfig(server.url, MODEL),
        )
        task: Task = make_task(env)
        examples = [next(one for one in load_examples(task, "train") if one.source == name) for name in env.mixture]
        model_rewards = make_model_rewards(env, {"judge"})

        async def add() -> list[Verdict]:
            verdicts = [Verdict(0.0, {}, "scored"), Verdict(0.25, {"accuracy": 0.0}, "scored")]
            try:
                return await model_rewards.add_scores(task, [RIGHT, RIGHT], examples, verdicts)
            finally:
                await model_rewards.close()

        verdicts = asyncio.run(add())
    assert [one.score for one in verdicts] == [0.7, 0.25] and len(server.requests) == 1


def test_the_declared_minimum_is_that_of_the_other_rewards() -> None:
    assert minimum_score(make_task(make_env("judge"))) == 0.0
    weighted = make_env(["judge", "compat_verl_dapo"], reward_weights=[5.0, 2.0])
    assert minimum_score(make_task(weighted)) == -2.0


def test_the_state_of_a_checkpoint_has_the_number_of_requests() -> None:
    env = make_env("judge", judge=JudgeConfig("http://127.0.0.1:1/v1", MODEL, budget=3))
    first, resumed = (make_model_rewards(env, {"judge"}) for _ in range(2))
    first.load({"judge_requests": 3})
    resumed.load(first.state())
    assert resumed.metrics()["judge/requests"] == 3
    resumed.load({})
    assert resumed.metrics()["judge/requests"] == 0
