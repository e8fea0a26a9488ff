"""What docs/rewards.md says, done: its rows are read, its task and its reward judge."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from config.env import EnvConfig
from envs import task as registry
from envs.reward_service import RewardService
from envs.rewards import known_rewards
from envs.task import Completion, known_tasks, make_task

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def block(kind: str, having: str) -> str:
    (found,) = [body for body in re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL) if having in body]
    return found


def test_the_rows_of_the_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(block("json", '"gt_answer"'), encoding="utf-8")
    task = make_task(EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl")))
    examples = task.examples("train")
    assert len(examples) == 3
    for example in examples:
        assert task.reward(Completion("#### 4"), example).score == 1.0
        assert task.reward(Completion("#### 5"), example).score == 0.0


def test_the_task_of_the_text_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block("python", '@register("spelling")')
    assert len(source.strip().splitlines()) <= 16
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    exec(compile(source, "spelling.py", "exec"), vars(ModuleType("spelling")))
    (tmp_path / "words.jsonl").write_text(json.dumps({"word": "river"}), encoding="utf-8")
    task = make_task(EnvConfig(dataset="spelling", data_files=str(tmp_path / "words.jsonl")))
    (example,) = task.examples("train")
    assert [message["role"] for message in example.messages] == ["system", "user"]
    scores = [task.reward(Completion(text), example).score for text in ("r-i-v-e-r\n", "river")]
    assert scores == [1.0, 0.0]


def test_the_reward_of_the_text_judges_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(block("python", "def brief"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    env = EnvConfig(dataset="arithmetic", reward="my_rewards:brief", reward_workers=1)
    task = make_task(env)
    example = task.examples("train")[0]
    service = RewardService(task, env)
    try:
        long, short, wrong = service.score(
            [Completion(example.answer, 100), Completion(example.answer, 0), Completion("?", 0)],
            [example] * 3,
        )
    finally:
        service.close()
    assert (long.score, short.score, wrong.score) == (0.5, 1.0, 0.0)
    assert short.parts == {"accuracy": 1.0, "short": 1.0}


def test_the_test_cases_of_the_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(block("json", '"test_cases"'), encoding="utf-8")
    task = make_task(EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl")))
    (example,) = task.examples("train")
    assert example.answer["outputs"] == ["4\n"]
    assert task.reward(Completion("no program"), example).score == 0.0


@pytest.mark.parametrize("known", [known_tasks, known_rewards])
def test_every_task_and_reward_is_in_the_text(known: object) -> None:
    assert callable(known)
    for name in known():
        assert f"`{name}`" in TEXT, name
