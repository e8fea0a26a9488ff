"""Tests of user rewards with every accepted signature."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import CompletionInRun
from envs.reward_workers.scoring import ScoringResult, score_completion
from envs.reward_workers.service import RewardService
from envs.reward_workers.task_scorer import make_scorer, minimum_score
from envs.rewards import find_reward
from envs.task import Completion, load_examples, make_task
from tests.envs import user_rewards

REWARDS_MODULE = "tests.envs.user_rewards"
ROW = {"prompt": "1+1=", "answer": "2", "level": 3, "data_source": "sums", "extra_info": {"index": 7}}
CHAT = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2", "level": 3}


def make_env(tmp_path: Path, reward: Any, row: dict[str, Any] | None = None, **more: Any) -> EnvConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW if row is None else row), encoding="utf-8")
    reward_path = (
        [f"{REWARDS_MODULE}:{name}" for name in reward] if isinstance(reward, list) else f"{REWARDS_MODULE}:{reward}"
    )
    return EnvConfig(
        dataset="jsonl", data_files=str(path), reward=reward_path, reward_workers=1, max_error_rate=1.0, **more
    )


def score_first_row(env: EnvConfig, completion: Completion) -> ScoringResult:
    """Scores a completion to the first row in this process."""
    task = make_task(env)
    return score_completion(make_scorer(task), completion, load_examples(task, "train")[0])


@pytest.mark.parametrize(("name", "score", "components"), [
    ("compute_score", 2.0, {"accuracy": 1.0, "index": 7.0}), ("verl_subset", 1.0, {}), ("verl_rest", 0.0, {}),
    ("trl_column", 1.0, {"level": 3.0}), ("trl_ids", 9.0, {}), ("trl_async", 1.0, {}),
    ("openrlhf", 3.0, {"accuracy": 1.0, "form": 1.0}), ("progress", 5.02, {}), ("global_step", 5.0, {}),
    ("swapped_parameters", 1.0, {}), ("ignores", 1.0, {}), ("by_position", 1.0, {}), ("all_positions", 1.0, {}),
    ("column_of_one", 1.0, {}), ("wrapped_reward", 1.0, {}), ("partial", 2.0, {"accuracy": 1.0, "index": 7.0}),
    ("partial_by_name", 2.0, {"accuracy": 1.0, "index": 7.0}), ("judge", 1.0, {}), ("method", 1.0, {}),
    ("partial_judge", 1.0, {}),
])  # fmt: skip
def test_parameters_get_what_they_name(name: str, score: float, components: dict[str, float], tmp_path: Path) -> None:
    verdict = score_first_row(make_env(tmp_path, name), CompletionInRun("2", token_ids=(4, 5), step=5, total_steps=20))
    assert (verdict.outcome, verdict.message) == ("scored", "")
    assert (verdict.score, verdict.components) == (pytest.approx(score), components)


BARE = {"prompt": "1+1=", "answer": "2"}
NESTED_ROW = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "other": {"reference": "3"}}
TALK = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(("name", "row", "options", "score"), [
    ("verl_rest", BARE, {}, 1.0),  # only the arguments of verl
    ("verl_subset", ROW | {"reward_model": {"style": "rule", "ground_truth": "2"}, "answer": "3"}, {}, 1.0),
    ("lists_step", ROW, {}, 5.2),  # progress is no list in any form
    ("lists_step_default", ROW, {}, 5.2), ("state_of_one", ROW, {}, 5.0),
    ("of_extra", NESTED_ROW, {}, 0.0), ("of_truth", NESTED_ROW, {}, 2.0),
    ("of_truth", NESTED_ROW, {"answer": "other.reference"}, 3.0),
    ("is_chat", {"question": "1+1=", "messages": TALK, "answer": "2"}, {"prompt": "question"}, 0.0),
    ("is_chat", {"conversation": TALK, "answer": "2"}, {"prompt": "conversation"}, 1.0),
    ("adapter", ROW, {}, 1.0),  # a decorator that names parameters
])  # fmt: skip
def test_rows_of_other_systems_pass_their_values(
    name: str, row: dict[str, Any], options: dict[str, str], score: float, tmp_path: Path
) -> None:
    completion = CompletionInRun("2", step=5, total_steps=20)
    assert score_first_row(make_env(tmp_path, name, row, options=options), completion).score == score


def test_lists_of_plain_rows_and_of_conversations(tmp_path: Path) -> None:
    def passed_values(row: dict[str, Any]) -> dict[str, Any]:
        completion = CompletionInRun("2", token_ids=(9,), step=3, total_steps=8)
        error = score_first_row(make_env(tmp_path, "trl_shows", row), completion).message
        found: dict[str, Any] = json.loads(re.findall(r"ValueError: (.*) \(user_rewards", error)[0])
        return found

    rest = {"completion_ids": [[9]], "state": [3, 8], "answer": ["2"], "level": [3]}
    plain = passed_values({"prompt": "1+1=", "answer": "2", "level": 3})
    assert plain == {"prompts": ["1+1="], "completions": ["2"], **rest}
    chat = passed_values(CHAT)
    assert chat.pop("messages") == [CHAT["messages"]]
    completions = [[{"role": "assistant", "content": "2"}]]
    assert chat == {"prompts": [CHAT["messages"]], "completions": completions, **rest}


def test_several_forms_in_one_list(tmp_path: Path) -> None:
    env = make_env(tmp_path, ["compute_score", "trl_sometimes", "openrlhf", "judge"])
    verdict = score_first_row(env, Completion("2"))
    names = ("compute_score", "trl_sometimes", "openrlhf", "judge")
    assert verdict.components == dict(zip(names, (2.0, 0.5, 3.0, 1.0), strict=True)) | {"accuracy": 1.0}
    assert verdict.score == 6.5


def test_none_counts_nothing_beside_others_and_is_an_error_alone(tmp_path: Path) -> None:
    verdict = score_first_row(make_env(tmp_path, ["trl_sometimes", "judge"]), Completion("pass"))
    assert (verdict.score, verdict.components) == (0.0, {"judge": 0.0, "accuracy": 0.0})
    verdict = score_first_row(make_env(tmp_path, "trl_sometimes"), Completion("pass"))
    assert verdict.outcome == "error"
    assert "returned None: no reward scores this row" in verdict.message


@pytest.mark.parametrize(("name", "message"), [
    ("two", r"two returned \[1\.0, 2\.0\]; a number or a Reward is needed"),
    ("text", "text returned 'good'; a number or a Reward is needed"),
    ("no_score", r"no_score returned \{'score': 'high'\}, whose score is not a number"),
])  # fmt: skip
def test_a_result_that_is_no_reward_is_an_error(name: str, message: str, tmp_path: Path) -> None:
    verdict = score_first_row(make_env(tmp_path, name), Completion("2"))
    assert verdict.outcome == "error" and re.search(message, verdict.message), verdict.message


@pytest.mark.parametrize(("name", "message"), [
    ("unknown", r"\(c: Any, e: Any\) takes no completion by a known name; rename the parameters; accepted"),
    ("nothing", "takes no completion by a known name"),
    ("mixed_forms", "takes both completions, a list, and example, a value of one completion"),
    ("unnamed_wrapped", r"\(\*args, \*\*kwargs\) has no named parameters; name the parameters, or use functools"),
    ("positional_wrapped", r"\(\*args\) has no named parameters; name the parameters, or use functools"),
    ("Judge", r"is a class; create an instance in its module \(judge = Judge\(\)\) and name the instance"),
    ("HERE", "has no 'HERE'"),
    ("no_least", "min_score is 'low'; set min_score to the lowest score of the reward, a finite number"),
])  # fmt: skip
def test_unknown_signatures_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.reward={REWARDS_MODULE}:{name}: .*{message}") as raised:
        find_reward(f"{REWARDS_MODULE}:{name}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "column"), [("compute_score", "data_source"), ("trl_column", "level")])
def test_columns_that_rows_lack_are_named(name: str, column: str, tmp_path: Path) -> None:
    env = make_env(tmp_path, name, {"prompt": "1+1=", "answer": "2", "kind": "sum"})
    message = (
        rf"the function takes {column}, but the rows of env.dataset=jsonl have no such column \(columns: prompt, "
        r"answer, kind\); accepted forms are"
    )
    with pytest.raises(ConfigError, match=message):
        load_examples(make_task(env), "train")


def test_a_row_without_a_column_that_others_have_gives_none(tmp_path: Path) -> None:
    env = make_env(tmp_path, "trl_shows_level", {"prompt": "1+1=", "answer": "2"})
    with Path(env.data_files).open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(ROW))
    task = make_task(env)
    scores = [score_completion(make_scorer(task), Completion("2"), each).score for each in load_examples(task, "train")]
    assert scores == [-1.0, 3.0]


def test_the_minimum_score_is_that_of_the_reward(tmp_path: Path) -> None:
    for name, minimum in (("least", -2.5), ("judge", -4.0), ("partial_judge", -4.0), ("verl_subset", 0.0)):
        assert minimum_score(make_task(make_env(tmp_path, name))) == minimum
    env = make_env(tmp_path, ["least", "judge", "verl_subset"], reward_weights=[2.0, 0.5, 1.0])
    assert minimum_score(make_task(env)) == -7.0


def test_warm_up_runs_before_the_fork(tmp_path: Path) -> None:
    env = make_env(tmp_path, "loaded_before")
    task = make_task(env)
    with closing(RewardService(task, env)) as service:
        (verdict,) = service.score([Completion("2")], task.examples("train"))
    assert verdict.score == 1.0
    assert not user_rewards.LOADED_IN, "nothing is loaded here"
