"""Tests of the built-in environments, each played with right and wrong answers."""

import json
from typing import Any

import pytest

from config.schema.env import ENVIRONMENTS, EnvConfig
from envs.environments.builtin.debugging import PROGRAMS, assertion, run_tests
from envs.environments.interface import Step
from envs.example import Example, Message
from envs.sandbox.sandbox import Sandbox
from envs.task import load_examples, make_task
from envs.verifiers.code import extract_code
from tests.config.test_schema import make_config
from tests.envs.environment_helpers import play_once, reply_text, turn


def env_of(name: str, **fields: Any) -> EnvConfig:
    return EnvConfig(dataset="environment", environment=name, **fields)


def examples_of(name: str, split: str = "train") -> list[Example]:
    return list(load_examples(make_task(env_of(name)), split))


def play_first(name: str, *turns: Message | str, number: int = 0) -> list[Any]:
    return play_once(env_of(name), examples_of(name)[number], *turns)


@pytest.mark.parametrize("name", ENVIRONMENTS.names)
def test_the_splits_are_disjoint_and_fixed(name: str) -> None:
    train, test = (examples_of(name, split) for split in ("train", "test"))
    assert train == examples_of(name) and len(train) > 3 * len(test) > 0
    prompts = [example.messages[0]["content"] for example in (*train, *test)]
    assert len(set(prompts)) == len(prompts)


def test_a_hint_is_the_sum_of_the_wrong_answer_and_the_missing_part() -> None:
    (example, *_) = examples_of("sums_with_hints")
    total = example.answer
    wrong = [str(total - 10), str(total + 1), str(total)]
    first, second, third = play_first("sums_with_hints", *wrong)
    assert [reply_text(each) for each in (first, second)] == [f"{total - 10}+10=", f"{total + 1}-1="]
    assert third == Step(reward=pytest.approx(0.4), components={"accuracy": 1.0})
    assert first.reward == second.reward == 0.0
    assert play_first("sums_with_hints", str(total))[0].reward == 1.0


def test_a_sum_without_a_right_answer_has_no_reward() -> None:
    steps = play_first("sums_with_hints", "-1", "one", "²")
    assert [reply_text(step) for step in steps[:2]] == ["a number", "a number"]
    assert steps[2] == Step(reward=0.0, components={"accuracy": 0.0})


@pytest.mark.parametrize(("turns", "reward"), [
    (["call", "answer"], 1.0), (["answer"], 0.0), (["call", "call", "answer"], 0.0), (["call", "1"], 0.0),
])  # fmt: skip
def test_a_product_needs_one_call(turns: list[str], reward: float) -> None:
    (example, *_) = examples_of("products_by_tool")
    a, b = map(int, example.messages[0]["content"].rstrip("=").split("*"))
    messages = {"call": turn("", ("mul", {"a": a, "b": b})), "answer": str(a * b)}
    *calls, last = play_first("products_by_tool", *[messages.get(each, each) for each in turns])
    assert [reply_text(step) for step in calls] == [str(a * b)] * len(calls)
    assert last == Step(reward=reward, components={"accuracy": reward})


def test_every_bug_fails_its_first_test_and_every_program_passes(auto_sandbox: Sandbox) -> None:
    num_bugs = 0
    for task in json.loads(PROGRAMS.read_text()):
        name, program, tests = task["name"], task["program"], task["tests"]
        assert run_tests(auto_sandbox, program, name, tests) == ("", 1.0), name
        for right, wrong in task["bugs"]:
            assert program.count(right) == 1, (name, right)
            failure, share = run_tests(auto_sandbox, program.replace(right, wrong), name, tests)
            assert failure.startswith(assertion(name, *tests[0])) and share < 1, (name, wrong)
            num_bugs += 1
    assert num_bugs >= 24


def test_the_reply_to_a_wrong_correction_is_the_failing_test() -> None:
    (example, *_) = examples_of("debugging")
    program = extract_code(example.messages[0]["content"])
    assert program == "def add(a, b):\n    return a - b\n"
    assert "assert add(1, 3) == 4" in example.messages[0]["content"]
    broken, looping = "```python\ndef add(a, b):\n  return c\n```", "```python\ndef add(a, b):\n  while True: pass\n```"
    replies = play_first(
        "debugging", "I do not know.", f"```python\n{program}```", f"```python\n{program.replace('-', '+')}```"
    )
    assert "block that begins with ```python" in reply_text(replies[0])
    assert reply_text(replies[1]) == "assert add(1, 3) == 4\nThe result is -2."
    assert replies[2] == Step(reward=pytest.approx(0.4), components={"accuracy": 1.0})
    (renamed, *_) = play_first("debugging", "```python\ndef plus(a, b):\n  return a + b\n```", "", "")
    assert reply_text(renamed) == "assert add(1, 3) == 4\nNameError: name 'add' is not defined"
    replies = play_first("debugging", broken, looping, "```python\nexit(0)\n```")
    assert reply_text(replies[0]) == "assert add(1, 3) == 4\nNameError: name 'c' is not defined"
    assert reply_text(replies[1]).startswith("assert add(1, 3) == 4\n") and "time" in reply_text(replies[1])
    assert replies[2] == Step(reward=0.0, components={"accuracy": 0.0, "passed_tests": 0.0})


@pytest.mark.parametrize("name", ENVIRONMENTS.names)
def test_each_has_a_config(name: str) -> None:
    config = make_config(f"grpo_{name}")
    assert (config.env.environment, config.env.dataset) == (name, "environment")
    assert load_examples(make_task(config.env), config.env.split)
