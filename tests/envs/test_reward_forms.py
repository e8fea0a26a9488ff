"""User rewards are given the values that their parameters name, in every form."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import CompletionInRun
from envs.judging.judge import least_score, make_judge
from envs.judging.outcome import Result
from envs.judging.outcome import judged as judged_here
from envs.judging.service import RewardService
from envs.rewards import find_reward
from envs.task import Completion, checked_examples, make_task
from tests.envs import users_rewards

HERE = "tests.envs.users_rewards"
ROW = {"prompt": "1+1=", "answer": "2", "level": 3, "data_source": "sums", "extra_info": {"index": 7}}
CHAT = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2", "level": 3}


def env_of(tmp_path: Path, reward: Any, row: dict[str, Any] | None = None, **more: Any) -> EnvConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW if row is None else row), encoding="utf-8")
    named = [f"{HERE}:{name}" for name in reward] if isinstance(reward, list) else f"{HERE}:{reward}"
    return EnvConfig(
        dataset="jsonl", data_files=str(path), reward=named, reward_workers=1, max_error_rate=1.0, **more
    )


def judged(env: EnvConfig, completion: Completion) -> Result:
    """Judge a completion to the first row in this process."""
    task = make_task(env)
    return judged_here(make_judge(task), completion, checked_examples(task, "train")[0])


@pytest.mark.parametrize(("name", "score", "parts"), [
    ("compute_score", 2.0, {"accuracy": 1.0, "index": 7.0}), ("verl_subset", 1.0, {}), ("verl_rest", 0.0, {}),
    ("trl_column", 1.0, {"level": 3.0}), ("trl_ids", 9.0, {}), ("trl_async", 1.0, {}),
    ("openrlhf", 3.0, {"accuracy": 1.0, "form": 1.0}), ("progress", 5.02, {}), ("global_step", 5.0, {}),
    ("swapped", 1.0, {}), ("ignores", 1.0, {}), ("by_position", 1.0, {}), ("all_positions", 1.0, {}),
    ("column_of_one", 1.0, {}), ("wrapped", 1.0, {}), ("partial", 2.0, {"accuracy": 1.0, "index": 7.0}),
    ("partial_by_name", 2.0, {"accuracy": 1.0, "index": 7.0}), ("judge", 1.0, {}), ("method", 1.0, {}),
    ("partial_judge", 1.0, {}),
])  # fmt: skip
def test_parameters_get_what_they_name(
    name: str, score: float, parts: dict[str, float], tmp_path: Path
) -> None:
    verdict = judged(env_of(tmp_path, name), CompletionInRun("2", token_ids=(4, 5), step=5, total_steps=20))
    assert (verdict.outcome, verdict.message) == ("scored", "")
    assert (verdict.score, verdict.parts) == (pytest.approx(score), parts)


BARE = {"prompt": "1+1=", "answer": "2"}
NESTED = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "other": {"gold": "3"}}
TALK = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(("name", "row", "options", "score"), [
    ("verl_rest", BARE, {}, 1.0),  # nothing but what verl gives
    ("verl_subset", ROW | {"reward_model": {"style": "rule", "ground_truth": "2"}, "answer": "3"}, {}, 1.0),
    ("lists_step", ROW, {}, 5.2),  # progress is no list in any form
    ("lists_step_default", ROW, {}, 5.2), ("state_of_one", ROW, {}, 5.0),
    ("of_extra", NESTED, {}, 0.0), ("of_truth", NESTED, {}, 2.0), ("of_truth", NESTED, {"answer": "other.gold"}, 3.0),
    ("is_chat", {"question": "1+1=", "messages": TALK, "answer": "2"}, {"prompt": "question"}, 0.0),
    ("is_chat", {"conversation": TALK, "answer": "2"}, {"prompt": "conversation"}, 1.0),
    ("adapter", ROW, {}, 1.0),  # a decorator that names parameters
])  # fmt: skip
def test_rows_of_other_systems_give_what_theirs_do(
    name: str, row: dict[str, Any], options: dict[str, str], score: float, tmp_path: Path
) -> None:
    completion = CompletionInRun("2", step=5, total_steps=20)
    assert judged(env_of(tmp_path, name, row, options=options), completion).score == score


def test_lists_of_plain_rows_and_of_conversations(tmp_path: Path) -> None:
    def shown(row: dict[str, Any]) -> dict[str, Any]:
        completion = CompletionInRun("2", token_ids=(9,), step=3, total_steps=8)
        error = judged(env_of(tmp_path, "trl_shows", row), completion).message
        found: dict[str, Any] = json.loads(re.findall(r"ValueError: (.*) \(users_rewards", error)[0])
        return found

    rest = {"completion_ids": [[9]], "state": [3, 8], "answer": ["2"], "level": [3]}
    plain = shown({"prompt": "1+1=", "answer": "2", "level": 3})
    assert plain == {"prompts": ["1+1="], "completions": ["2"], **rest}
    chat = shown(CHAT)
    assert chat.pop("messages") == [CHAT["messages"]]
    said = [[{"role": "assistant", "content": "2"}]]
    assert chat == {"prompts": [CHAT["messages"]], "completions": said, **rest}


def test_several_forms_in_one_list(tmp_path: Path) -> None:
    env = env_of(tmp_path, ["compute_score", "trl_sometimes", "openrlhf", "judge"])
    verdict = judged(env, Completion("2"))
    names = ("compute_score", "trl_sometimes", "openrlhf", "judge")
    assert verdict.parts == dict(zip(names, (2.0, 0.5, 3.0, 1.0), strict=True)) | {"accuracy": 1.0}
    assert verdict.score == 6.5


def test_none_counts_nothing_beside_others_and_is_an_error_alone(tmp_path: Path) -> None:
    verdict = judged(env_of(tmp_path, ["trl_sometimes", "judge"]), Completion("pass"))
    assert (verdict.score, verdict.parts) == (0.0, {"judge": 0.0, "accuracy": 0.0})
    verdict = judged(env_of(tmp_path, "trl_sometimes"), Completion("pass"))
    assert verdict.outcome == "error"
    assert "returned None: neither it nor another reward judges this row" in verdict.message


@pytest.mark.parametrize(("name", "message"), [
    ("two", r"two returned \[1\.0, 2\.0\]; a number or a Reward is needed"),
    ("text", "text returned 'good'; a number or a Reward is needed"),
    ("no_score", r"no_score returned \{'score': 'high'\}, whose score is no number"),
])  # fmt: skip
def test_what_is_no_reward_is_an_error(name: str, message: str, tmp_path: Path) -> None:
    verdict = judged(env_of(tmp_path, name), Completion("2"))
    assert verdict.outcome == "error" and re.search(message, verdict.message), verdict.message


@pytest.mark.parametrize(("name", "message"), [
    ("unknown", r"\(c: Any, e: Any\) asks for no completion by a known name; rename its parameters; accepted"),
    ("nothing", "asks for no completion by a known name"),
    ("mixed", "asks for completions, a list, and for example, which is of one completion"),
    ("untold_wrapped", r"\(\*args, \*\*kwargs\) does not say what it takes; name its parameters, or put functools"),
    ("positional_wrapped", r"\(\*args\) does not say what it takes; name its parameters, or put functools"),
    ("Judge", r"is a class; make one in its module \(judge = Judge\(\)\) and name that"),
    ("HERE", "has no 'HERE'"),
    ("no_least", "its min_score is 'low'; set the least score that it gives, a number"),
])  # fmt: skip
def test_signatures_that_say_nothing_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.reward={HERE}:{name}: .*{message}") as raised:
        find_reward(f"{HERE}:{name}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "column"), [("compute_score", "data_source"), ("trl_column", "level")])
def test_columns_that_rows_lack_are_named(name: str, column: str, tmp_path: Path) -> None:
    env = env_of(tmp_path, name, {"prompt": "1+1=", "answer": "2", "kind": "sum"})
    message = (
        f"it asks for {column}, and the rows of env.dataset=jsonl have no such column; they have prompt, "
        "answer, kind; accepted are"
    )
    with pytest.raises(ConfigError, match=message):
        checked_examples(make_task(env), "train")


def test_a_row_without_a_column_that_others_have_gives_none(tmp_path: Path) -> None:
    env = env_of(tmp_path, "trl_shows_level", {"prompt": "1+1=", "answer": "2"})
    with Path(env.data_files).open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(ROW))
    task = make_task(env)
    scores = [
        judged_here(make_judge(task), Completion("2"), each).score for each in checked_examples(task, "train")
    ]
    assert scores == [-1.0, 3.0]


def test_a_reward_says_its_least_score(tmp_path: Path) -> None:
    for name, least in (("least", -2.5), ("judge", -4.0), ("partial_judge", -4.0), ("verl_subset", 0.0)):
        assert least_score(make_task(env_of(tmp_path, name))) == least
    env = env_of(tmp_path, ["least", "judge", "verl_subset"], reward_weights=[2.0, 0.5, 1.0])
    assert least_score(make_task(env)) == -7.0


def test_what_a_reward_loads_comes_with_the_fork(tmp_path: Path) -> None:
    env = env_of(tmp_path, "loaded_before")
    task = make_task(env)
    with closing(RewardService(task, env)) as service:
        (verdict,) = service.score([Completion("2")], task.examples("train"))
    assert verdict.score == 1.0
    assert not users_rewards.LOADED_IN, "nothing is loaded here"
