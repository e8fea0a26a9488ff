"""Tests of reward values: valid types, several rewards with weights, columns of a row."""

import math
import pickle
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.reward_workers.scoring import score_completion
from envs.reward_workers.service import RewardService
from envs.reward_workers.task_scorer import can_score_in_process, make_scorer, minimum_score
from envs.reward_workers.worker import pack_batch
from envs.rewards import find_rewards
from envs.task import Completion, Example, Outcome, Reward, make_task
from envs.user_code import load_user_object
from tests.script_runner import compose_run_config

REWARDS_MODULE = "tests.envs.simple_rewards"
EXAMPLE = Example(({"role": "user", "content": "1+1="},), "2", 7)


def outcome(make_result: Callable[[], Any]) -> tuple[float, dict[str, float], str, str]:
    def judge(completion: Completion, example: Example) -> Reward:
        returned = make_result()
        assert isinstance(returned, Reward)
        return returned

    result = score_completion(judge, Completion(""), EXAMPLE)
    return result.score, result.components, result.outcome, result.message


@pytest.mark.parametrize(("value", "expected"), [
    (numpy.float32(0.5), 0.5), (numpy.int64(2), 2.0), (numpy.bool_(True), 1.0), (numpy.array(0.25), 0.25),
    (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0), (True, 1.0), (3.4e38, 3.4e38),
])  # fmt: skip
def test_numbers_of_numpy_and_torch_are_numbers(value: Any, expected: float) -> None:
    assert outcome(lambda: Reward(value, {"part": value}))[:3] == (expected, {"part": expected}, "scored")


@pytest.mark.parametrize(("reward", "message"), [
    (Reward(1e300), r"the reward's score is 1e\+300; a number that is finite in float32"),
    (Reward(-math.inf), "the reward's score is -inf"),
    (Reward(1.0, {"accuracy": math.nan}), "the component accuracy is nan"),
    (Reward(1.0, {"accuracy": 1e39}), r"the component accuracy is 1e\+39"),
    (Reward(1.0, {"accuracy": "high"}), "the component accuracy is 'high'; a number is needed"),
    (Reward("1.0"), "the reward's score is '1.0'"),
    (Reward(numpy.str_("1.0")), "a number is needed"),
    (Reward(1j), "a number is needed"),
    (Reward(torch.ones(2)), "ValueError|RuntimeError|TypeError"),
    (Reward(1.0, {}, "banana"), "outcome is 'banana'; known: scored, invalid, error"),
    (Reward(1.0, {}, "error"), "the reward itself returned the outcome 'error'"),
    (Reward(1.0, [1.0]), r"components are \[1\.0\]"),
    (Reward(1.0, {3: 1.0}), "a component called 3"),
    (Reward(1.0, {"mean": 1.0}), "reward/mean is a metric; rename the component"),
])  # fmt: skip
def test_what_is_no_finite_number_is_an_error_and_never_a_score(reward: Reward, message: str) -> None:
    score, components, said, why = outcome(lambda: reward)
    assert (score, components, said) == (0.0, {}, "error")
    assert re.search(message, why), why


def test_such_a_reward_stops_the_run_with_its_row() -> None:
    env = EnvConfig(dataset="arithmetic", reward=f"{REWARDS_MODULE}:nan_part", reward_workers=1)
    message = r"\d+ of the last \d+ verifications failed.*the last failure: row 7: ValueError"
    with closing(RewardService(make_task(env), env)) as service, pytest.raises(ConfigError, match=message):
        service.score([Completion("2")] * 20, [EXAMPLE] * 20)


def make_env(*names: str, weights: list[float] | None = None) -> EnvConfig:
    return EnvConfig(dataset="arithmetic", reward=list(names), reward_weights=weights)


def score_text(env: EnvConfig, text: str, num_tokens: int = 0) -> Reward:
    return make_scorer(make_task(env))(Completion(text, num_tokens), EXAMPLE)


def test_several_rewards_are_parts_by_name_and_a_weighted_sum() -> None:
    verdict = score_text(make_env("exact", f"{REWARDS_MODULE}:brief", weights=[1.0, 0.2]), "2", num_tokens=5)
    assert verdict == Reward(pytest.approx(1.1), {"exact": 1.0, "brief": 0.5, "accuracy": 1.0})
    assert score_text(make_env("exact", f"{REWARDS_MODULE}:brief"), "3", num_tokens=5).score == 0.5


def test_accuracy_is_that_of_the_first_or_of_the_one_called_so() -> None:
    assert (
        score_text(make_env(f"{REWARDS_MODULE}:brief", "exact"), "2", 5).components["accuracy"] == 0.0
    )  # 0.5 is below 1
    assert score_text(make_env("gsm8k", f"{REWARDS_MODULE}:brief"), "#### 3", 0).components == {
        "gsm8k": pytest.approx(0.1),
        "brief": 1.0,
        "accuracy": 0.0,
    }
    assert (
        score_text(make_env(f"{REWARDS_MODULE}:brief", f"{REWARDS_MODULE}:accuracy"), "2", 5).components["accuracy"]
        == 1.0
    )


def test_two_functions_of_one_name_keep_apart() -> None:
    found = score_text(make_env(f"{REWARDS_MODULE}:brief", "tests.envs.same_name_reward:brief"), "2", 5)
    assert set(found.components) == {f"{REWARDS_MODULE}:brief", "tests.envs.same_name_reward:brief", "accuracy"}


@pytest.mark.parametrize(("second", "expected", "message"), [
    ("gives_up", "invalid", ""), ("nan_part", "error", "the component accuracy is nan"),
    ("huge", "error", "the reward huge's score is 1e\\+300"),
])  # fmt: skip
def test_the_worst_of_the_outcomes_is_that_of_the_whole(second: str, expected: Outcome, message: str) -> None:
    judge = make_scorer(make_task(make_env("exact", f"{REWARDS_MODULE}:{second}")))
    result = score_completion(judge, Completion("2"), EXAMPLE)
    assert result.outcome == expected
    assert re.search(message, result.message)


def test_several_are_judged_here_only_where_each_is_safe() -> None:
    assert can_score_in_process(make_task(make_env("exact", "gsm8k")))
    assert not can_score_in_process(make_task(make_env("exact", "math")))
    assert not can_score_in_process(make_task(make_env("exact", f"{REWARDS_MODULE}:brief")))
    assert minimum_score(make_task(make_env("exact", "math", weights=[1.0, 2.0]))) == 0.0


def test_the_first_reward_that_asks_for_a_form_gives_the_system_prompt() -> None:
    (one, *_) = make_task(make_env(f"{REWARDS_MODULE}:brief", "boxed", "gsm8k")).examples("train")
    assert "boxed" in one.messages[0]["content"]


def test_lists_of_rewards_are_written_on_the_command_line() -> None:
    config = compose_run_config(f"env.reward=[exact,{REWARDS_MODULE}:brief]", "env.reward_weights=[1.0,0.2]")
    assert [each.name for each in find_rewards(config.env)] == ["exact", f"{REWARDS_MODULE}:brief"]
    assert config.env.reward_weights == [1.0, 0.2]
    sets = compose_run_config(
        "eval.sets={held: {dataset: arithmetic, split: test, reward: [exact, math], reward_weights: [1, 2]}}"
    )
    assert sets.eval.sets["held"].env("eval.sets.held", sets.env).reward_weights == [1, 2]
    assert compose_run_config("env.reward_weights={accuracy: 2}").env.reward_weights == {"accuracy": 2}


@pytest.mark.parametrize(("fields", "message"), [
    ({"reward": []}, r"env\.reward=\[\]: give the name"),
    ({"reward": 3}, r"env\.reward=3: give the name"),
    ({"reward": ["exact", None]}, r"env\.reward=\['exact', None\]: give the name"),
    ({"reward": ["exact", "exact"]}, "exact is listed twice"),
    ({"reward": ["exact"], "reward_weights": [1, 2]}, "has 2 weights for"),
    ({"reward": "exact", "reward_weights": [1]}, "set one weight for each reward"),
    ({"reward": ["exact"], "reward_weights": {"exact": 1}}, r"such as env\.reward_weights=\[1\.0\]"),
    ({"reward": ["exact"], "reward_weights": ["1"]}, "finite numbers"),
    ({"reward_weights": {"accuracy": math.nan}}, "finite numbers"),
    ({"reward_weights": {"accuracy": True}}, "finite numbers"),
    ({"reward_weights": 3}, "finite numbers"),
])  # fmt: skip
def test_lists_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(dataset="arithmetic", **fields)


ROW = '{"prompt": "1+1=", "question": "1+1=", "problem": "1+1=", "answer": "#### 2", "rubric": "be kind"}'


def test_other_columns_of_a_row_reach_a_reward_in_its_worker(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    rewards = ["exact", f"{REWARDS_MODULE}:rubric"]
    for dataset in ("jsonl", "gsm8k", "math"):
        env = EnvConfig(dataset=dataset, data_files=str(tmp_path / "rows.jsonl"), reward=rewards, reward_workers=1)
        task = make_task(env)
        (example,) = task.examples("train")
        assert example.row_data["rubric"] == "be kind"
    with closing(RewardService(task, env)) as service:
        (scored,) = service.score([Completion("be kind")], [example])
    assert scored.components["rubric"] == 1.0


def test_columns_that_nobody_reads_are_neither_kept_nor_sent(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    env = EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl"))
    (example,) = make_task(env).examples("train")
    assert example.row_data == {}
    env.reward = f"{REWARDS_MODULE}:rubric"
    (example,) = make_task(env).examples("train")
    assert example.row_data["prompt"] is example.messages[0]["content"]
    batch = [(index, Completion("a"), example) for index in range(64)]
    alone = len(pickle.dumps(pack_batch(batch[:1])))
    assert len(pickle.dumps(pack_batch(batch))) < alone + 64 * 20


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_here.py").write_text("def reward(completion, example):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_user_object("env.reward", "found_here:reward")(None, None) == 1
    (tmp_path / "broken_here.py").write_text("x = 1\n1/0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(broken_here\.py:2\)"):
        load_user_object("env.reward", "broken_here:reward")
    (tmp_path / "no_python_here.py").write_text("def (\n")
    with pytest.raises(ConfigError, match=r"importing 'no_python_here' failed: SyntaxError"):
        load_user_object("env.reward", "no_python_here:reward")
