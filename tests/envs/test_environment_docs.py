"""Tests of the environments that docs/environments.md shows, each played as it stands."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import ENVIRONMENTS, EnvConfig
from envs.environments.interface import Step
from envs.environments.make import EnvironmentFactory
from envs.environments.replies import first_messages
from envs.task import Completion, load_examples, make_task
from tests.envs.environment_helpers import example, play_once, reply_text, run_with_factory, turn
from tests.script_runner import ROOT

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
ADAPTER_LINES = 15
"""Largest number of lines of a class that adapts another library, without its imports."""


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a folder of a run, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def page_block(having: str) -> str:
    (block,) = [body for body in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if having in body]
    return block


def page_environment(run_folder: Path, having: str, name: str, **fields: Any) -> EnvConfig:
    """Writes a block of the page as a module, and returns settings with its environment."""
    module = f"page_{name}"
    (run_folder / f"{module}.py").write_text(page_block(having), encoding="utf-8")
    return EnvConfig(**{"dataset": "environment", "environment": f"{module}:{name}"} | fields)


def test_the_function_of_the_page(run_folder: Path) -> None:
    env = page_environment(run_folder, "def check_sum", "check_sum", dataset="arithmetic")
    wrong, right = play_once(env, example("42"), "41", "42")
    assert (reply_text(wrong), wrong.reward) == ("41 is wrong. Try again.", 0.0)
    assert right == Step(reward=0.5)


@pytest.mark.parametrize("workers", [None, 1])
def test_the_class_of_the_page(run_folder: Path, workers: int | None) -> None:
    fields = {"environment_options": {"largest": 50}, "environment_workers": workers}
    env = page_environment(run_folder, "class HigherLower", "HigherLower", **fields)
    examples = load_examples(make_task(env), "train")
    assert len(examples) == 500 and examples[0].messages[0]["content"] == "Guess a number from 1 to 50."
    assert len({each.answer for each in examples}) > 20
    assert [each.answer for each in load_examples(make_task(env), "test")] != [each.answer for each in examples]
    steps = play_once(env, example(7), "5", "eight", "8", "7")
    assert [reply_text(step) for step in steps[:3]] == ["higher", "Reply with a number.", "lower"]
    assert steps[3] == Step(reward=0.25)


def test_components_of_the_page(run_folder: Path) -> None:
    env = page_environment(run_folder, "def graded", "graded", dataset="arithmetic")
    first, second = play_once(env, example("42"), "I think 42", "42")
    assert (reply_text(first), first.reward, first.components) == ("Check your sum.", 0.0, {})
    assert second == Step(reward=1.0, components={"accuracy": 1.0, "brief": 1.0})


def test_tools_of_the_page(run_folder: Path) -> None:
    env = page_environment(run_folder, "class Products", "Products")
    first = load_examples(make_task(env), "train")[0]
    a, b = map(int, first.messages[0]["content"].removesuffix("=").split("*"))
    call, wrong_call = ("mul", {"a": a, "b": b}), ("mul", {"a": a})
    answered, ended = play_once(env, first, turn("", call, wrong_call), str(a * b))
    results = [message["content"] for message in answered.messages]
    assert results[0] == first.answer == str(a * b) and results[1].startswith("error: ")
    assert ended == Step(reward=1.0)
    assert play_once(env, first, str(a * b))[-1] == Step(reward=0.0)


def test_the_group_reward_of_the_page(run_folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(page_block("def shorter_is_better"), names)
    completions = [Completion(text, 1) for text in ("long text", "text", "text")]
    assert names["shorter_is_better"](completions, example(), [1.0, 0.5, 0.0]) == pytest.approx([0.8, 0.5, 0.0])


def test_the_search_of_the_page(run_folder: Path) -> None:
    env = page_environment(
        run_folder, "def search", "search", dataset="arithmetic", turn_ends=["</search>", "</answer>"]
    )
    steps = play_once(env, example(), "I look. <search>Peru</search>", "Lima", "<answer>Lima</answer>")
    assert [reply_text(step) for step in steps[:2]] == [
        "<information>The capital of Peru is Lima.</information>",
        "Write <search>words</search> or <answer>text</answer>.",
    ]
    assert steps[2] == Step()


def test_gymnasium_of_the_page(run_folder: Path) -> None:
    pytest.importorskip("gymnasium")
    env = page_environment(run_folder, "class FrozenLake", "FrozenLake")
    block = page_block("class FrozenLake").partition("class")[2]
    assert len(block.strip().splitlines()) <= ADAPTER_LINES
    first, other = load_examples(make_task(env), "train")[0], load_examples(make_task(env), "test")[0]
    steps = play_once(env, first, "jump", "up", *["down", "right"] * 60)
    assert reply_text(steps[0]) == "Reply left, down, right or up."
    assert "(Up)" in reply_text(steps[1]) and steps[-1].ends_episode
    assert steps == play_once(env, first, "jump", "up", *["down", "right"] * 60)
    assert steps != play_once(env, other, "jump", "up", *["down", "right"] * 60)


def test_textarena_of_the_page(run_folder: Path) -> None:
    pytest.importorskip("textarena")
    env = page_environment(run_folder, "class GuessTheNumber", "GuessTheNumber")
    assert len(page_block("class GuessTheNumber").partition("class")[2].strip().splitlines()) <= ADAPTER_LINES
    first = load_examples(make_task(env), "train")[0]

    async def use(factory: EnvironmentFactory) -> tuple[Any, list[Step]]:
        environment = factory.make()
        observation = await environment.reset(first)
        steps = [await environment.step(turn(f"[{number}]")) for number in (1, 20)]
        await environment.close()
        return first_messages(first.messages, observation), steps

    (message,), steps = run_with_factory(env, use)
    assert message["content"].startswith("Play this game.\n\n") and "Guess" in message["content"]
    assert any(word in reply_text(steps[0]) for word in ("higher", "lower")) or steps[0].ends_episode


def test_the_page_names_every_built_in_environment() -> None:
    for name in ENVIRONMENTS.names:
        assert f"| `{name}` |" in PAGE and f"--config-name grpo_{name}`" in PAGE
