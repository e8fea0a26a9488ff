"""What a reward may return, several rewards with weights, and what of the row reaches them."""

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
from envs.judging.judge import judges_in_process, least_score, make_judge
from envs.judging.outcome import judged as judged_here
from envs.judging.service import RewardService
from envs.judging.worker import pack
from envs.rewards import find_rewards
from envs.task import Completion, Example, Outcome, Reward, make_task
from envs.user_code import load_own
from tests.scripts import configured

HERE = "tests.envs.several_rewards"
EXAMPLE = Example(({"role": "user", "content": "1+1="},), "2", 7)


def outcome(result: Callable[[], Any]) -> tuple[float, dict[str, float], str, str]:
    def judge(completion: Completion, example: Example) -> Reward:
        returned = result()
        assert isinstance(returned, Reward)
        return returned

    judged = judged_here(judge, Completion(""), EXAMPLE)
    return judged.score, judged.parts, judged.outcome, judged.message


@pytest.mark.parametrize(("value", "expected"), [
    (numpy.float32(0.5), 0.5), (numpy.int64(2), 2.0), (numpy.bool_(True), 1.0), (numpy.array(0.25), 0.25),
    (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0), (True, 1.0), (3.4e38, 3.4e38),
])  # fmt: skip
def test_numbers_of_numpy_and_torch_are_numbers(value: Any, expected: float) -> None:
    assert outcome(lambda: Reward(value, {"part": value}))[:3] == (expected, {"part": expected}, "scored")


@pytest.mark.parametrize(("reward", "message"), [
    (Reward(1e300), r"the reward's score is 1e\+300; a number that is finite in float32"),
    (Reward(-math.inf), "the reward's score is -inf"),
    (Reward(1.0, {"accuracy": math.nan}), "the part accuracy is nan"),
    (Reward(1.0, {"accuracy": 1e39}), r"the part accuracy is 1e\+39"),
    (Reward(1.0, {"accuracy": "high"}), "the part accuracy is 'high'; a number is needed"),
    (Reward("1.0"), "the reward's score is '1.0'"),
    (Reward(numpy.str_("1.0")), "a number is needed"),
    (Reward(1j), "a number is needed"),
    (Reward(torch.ones(2)), "ValueError|RuntimeError|TypeError"),
    (Reward(1.0, {}, "banana"), "outcome is 'banana'; known: scored, invalid, error"),
    (Reward(1.0, {}, "error"), "the reward itself gave the outcome 'error'"),
    (Reward(1.0, [1.0]), r"parts are \[1\.0\]"),
    (Reward(1.0, {3: 1.0}), "a part called 3"),
    (Reward(1.0, {"mean": 1.0}), "reward/mean is a metric; rename the part"),
])  # fmt: skip
def test_what_is_no_finite_number_is_an_error_and_never_a_score(reward: Reward, message: str) -> None:
    score, parts, said, why = outcome(lambda: reward)
    assert (score, parts, said) == (0.0, {}, "error")
    assert re.search(message, why), why


def test_such_a_reward_stops_the_run_with_its_row() -> None:
    env = EnvConfig(dataset="arithmetic", reward=f"{HERE}:nan_part", reward_workers=1)
    message = r"\d+ of the last \d+ verifications failed.*The last: row 7: ValueError"
    with closing(RewardService(make_task(env), env)) as service, pytest.raises(ConfigError, match=message):
        service.score([Completion("2")] * 20, [EXAMPLE] * 20)


def several(*names: str, weights: list[float] | None = None) -> EnvConfig:
    return EnvConfig(dataset="arithmetic", reward=list(names), reward_weights=weights)


def judged(env: EnvConfig, text: str, num_tokens: int = 0) -> Reward:
    return make_judge(make_task(env))(Completion(text, num_tokens), EXAMPLE)


def test_several_rewards_are_parts_by_name_and_a_weighted_sum() -> None:
    verdict = judged(several("exact", f"{HERE}:brief", weights=[1.0, 0.2]), "2", num_tokens=5)
    assert verdict == Reward(pytest.approx(1.1), {"exact": 1.0, "brief": 0.5, "accuracy": 1.0})
    assert judged(several("exact", f"{HERE}:brief"), "3", num_tokens=5).score == 0.5


def test_accuracy_is_that_of_the_first_or_of_the_one_called_so() -> None:
    assert judged(several(f"{HERE}:brief", "exact"), "2", 5).parts["accuracy"] == 0.0  # 0.5 is below 1
    assert judged(several("gsm8k", f"{HERE}:brief"), "#### 3", 0).parts == {
        "gsm8k": pytest.approx(0.1),
        "brief": 1.0,
        "accuracy": 0.0,
    }
    assert judged(several(f"{HERE}:brief", f"{HERE}:accuracy"), "2", 5).parts["accuracy"] == 1.0


def test_two_functions_of_one_name_keep_apart() -> None:
    found = judged(several(f"{HERE}:brief", "tests.envs.other_rewards:brief"), "2", 5)
    assert set(found.parts) == {f"{HERE}:brief", "tests.envs.other_rewards:brief", "accuracy"}


@pytest.mark.parametrize(("second", "expected", "message"), [
    ("gives_up", "invalid", ""), ("nan_part", "error", "the part accuracy is nan"),
    ("huge", "error", "the reward huge's score is 1e\\+300"),
])  # fmt: skip
def test_the_worst_of_the_outcomes_is_that_of_the_whole(second: str, expected: Outcome, message: str) -> None:
    judge = make_judge(make_task(several("exact", f"{HERE}:{second}")))
    result = judged_here(judge, Completion("2"), EXAMPLE)
    assert result.outcome == expected
    assert re.search(message, result.message)


def test_several_are_judged_here_only_where_each_is_safe() -> None:
    assert judges_in_process(make_task(several("exact", "gsm8k")))
    assert not judges_in_process(make_task(several("exact", "math")))
    assert not judges_in_process(make_task(several("exact", f"{HERE}:brief")))
    assert least_score(make_task(several("exact", "math", weights=[1.0, 2.0]))) == 0.0


def test_the_first_reward_that_asks_for_a_form_gives_the_system_prompt() -> None:
    (one, *_) = make_task(several(f"{HERE}:brief", "boxed", "gsm8k")).examples("train")
    assert "boxed" in one.messages[0]["content"]


def test_lists_of_rewards_are_written_on_the_command_line() -> None:
    config = configured(f"env.reward=[exact,{HERE}:brief]", "env.reward_weights=[1.0,0.2]")
    assert [each.name for each in find_rewards(config.env)] == ["exact", f"{HERE}:brief"]
    assert config.env.reward_weights == [1.0, 0.2]
    sets = configured(
        "eval.sets={held: {dataset: arithmetic, split: test, reward: [exact, math], reward_weights: [1, 2]}}"
    )
    assert sets.eval.sets["held"].env("eval.sets.held", sets.env).reward_weights == [1, 2]
    assert configured("env.reward_weights={accuracy: 2}").env.reward_weights == {"accuracy": 2}


@pytest.mark.parametrize(("fields", "message"), [
    ({"reward": []}, r"env\.reward=\[\]: give the name"),
    ({"reward": 3}, r"env\.reward=3: give the name"),
    ({"reward": ["exact", None]}, r"env\.reward=\['exact', None\]: give the name"),
    ({"reward": ["exact", "exact"]}, "exact is there twice"),
    ({"reward": ["exact"], "reward_weights": [1, 2]}, "has 2 weights for"),
    ({"reward": "exact", "reward_weights": [1]}, "a list of weights goes with a list of as many rewards"),
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
    rewards = ["exact", f"{HERE}:rubric"]
    for dataset in ("jsonl", "gsm8k", "math"):
        env = EnvConfig(
            dataset=dataset, data_files=str(tmp_path / "rows.jsonl"), reward=rewards, reward_workers=1
        )
        task = make_task(env)
        (example,) = task.examples("train")
        assert example.row_data["rubric"] == "be kind"
    with closing(RewardService(task, env)) as service:
        (scored,) = service.score([Completion("be kind")], [example])
    assert scored.parts["rubric"] == 1.0


def test_columns_that_nobody_reads_are_neither_kept_nor_sent(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    env = EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl"))
    (example,) = make_task(env).examples("train")
    assert example.row_data == {}
    env.reward = f"{HERE}:rubric"
    (example,) = make_task(env).examples("train")
    assert example.row_data["prompt"] is example.messages[0]["content"]
    batch = [(index, Completion("a"), example) for index in range(64)]
    alone = len(pickle.dumps(pack(batch[:1])))
    assert len(pickle.dumps(pack(batch))) < alone + 64 * 20


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_here.py").write_text("def reward(completion, example):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_own("env.reward", "found_here:reward")(None, None) == 1
    (tmp_path / "broken_here.py").write_text("x = 1\n1/0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(broken_here\.py:2\)"):
        load_own("env.reward", "broken_here:reward")
    (tmp_path / "no_python_here.py").write_text("def (\n")
    with pytest.raises(ConfigError, match=r"importing 'no_python_here' failed: SyntaxError"):
        load_own("env.reward", "no_python_here:reward")
