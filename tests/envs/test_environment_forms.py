"""Tests of the forms of environments, of their replies, and of the checks of `env.environment`."""

import asyncio
import re
import threading
from dataclasses import replace
from typing import Any

import pytest

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.inference import InferenceModelConfig
from config.schema.models import ModelConfig
from envs.environments.definition import find_environment
from envs.environments.episode_environments import EpisodeEnvironments
from envs.environments.interface import EpisodeError, Observation, Step
from envs.environments.make import EnvironmentFactory
from envs.environments.replies import first_messages, read_observation
from envs.example import Message
from envs.option_checks import option_problems
from envs.row_files import format_value
from envs.task import load_examples, make_task
from tests.envs.environment_helpers import (
    MODULE,
    env_config,
    example,
    play,
    play_once,
    reply_text,
    run_with_factory,
    turn,
)
from tests.envs.user_environments import Counter
from tests.log_capture import LogCapture

WORKERS = [None, 1]
"""Values of `env.environment_workers`: the forms are the same in both kinds of processes."""


@pytest.mark.parametrize("workers", WORKERS)
def test_a_sync_class_is_made_for_each_episode(workers: int | None) -> None:
    env = env_config("Counter", environment_workers=workers, environment_options={"limit": 3})

    async def use(factory: EnvironmentFactory) -> list[list[Step | str]]:
        first, second = factory.make(), factory.make()
        assert await first.reset(example(row=7)) == Observation(({"role": "user", "content": "row 7"},))
        return await asyncio.gather(play(first, example(), "a", "b"), play(second, example(), "a", "b", "c"))

    first, second = run_with_factory(env, use)
    assert first == [Step(({"role": "user", "content": text},), 0.5) for text in "12"]
    assert second == [*first, Step(reward=0.5)] and second[-1].ends_episode and not first[-1].ends_episode


def test_the_calls_of_an_instance_share_a_thread_beside_the_loop() -> None:
    Counter.threads.clear()
    Counter.closed_instances.clear()
    model_turn = turn("mine")
    play_once(env_config("Counter"), example(), model_turn, model_turn)
    assert len(Counter.threads) == 1 and threading.get_ident() not in Counter.threads
    assert len(Counter.closed_instances) == 1
    assert model_turn["content"] == "mine"


@pytest.mark.parametrize("workers", WORKERS)
def test_an_async_class_may_declare_tools_itself(workers: int | None) -> None:
    async def use(factory: EnvironmentFactory) -> tuple[Observation, list[Step | str]]:
        environment = factory.make()
        observation = await environment.reset(example())
        calls = turn("", ("look", {}), ("look", {}))
        return observation, [await environment.step(each) for each in (calls, turn("b"), turn("c"))]

    observation, steps = run_with_factory(env_config("AsyncCounter", environment_workers=workers), use)
    assert [schema["function"]["name"] for schema in observation.tools] == ["look"]
    assert [(m["role"], m["content"], m.get("tool_call_id")) for m in steps[0].messages] == [
        ("tool", "1", "call_0"),
        ("tool", "error: only the first call of a turn is answered", "call_1"),
    ]
    assert steps[1].messages == ({"role": "user", "content": "2"},) and steps[2].ends_episode


@pytest.mark.parametrize("workers", WORKERS)
def test_a_function_gets_all_turns(workers: int | None) -> None:
    steps = play_once(env_config("countdown", environment_workers=workers), example(2), "a", "b")
    assert reply_text(steps[0]) == "1 of 2: a" and steps[1] == Step()
    env = env_config("async_countdown", environment_options={"unit": "tries"})
    assert play_once(env, example(), "a", "b") == [
        Step(({"role": "user", "content": f"{count} tries"},), 0.25) for count in (1, 2)
    ]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_class_of_trl_has_tools_and_a_reward(workers: int | None) -> None:
    async def use(factory: EnvironmentFactory) -> tuple[Observation, list[Step]]:
        environment = factory.make()
        observation = await environment.reset(example("Oslo", kind="a city"))
        turns = [
            turn("", ("look", {"page": "Rome"}), ("look", {"page": "Oslo"}), ("look", {"title": "?"})),
            turn("", ("fail", {}), ("_helper", {}), malformed_calls=("no JSON",)),
            turn("Oslo."),
        ]
        steps = [await environment.step(each) for each in turns]
        await environment.close()
        return observation, steps

    observation, steps = run_with_factory(env_config("Wiki", environment_workers=workers), use)
    assert observation.messages == ({"role": "user", "content": "Find a city."},)
    look, fail = (schema["function"] for schema in observation.tools)
    assert look["parameters"]["properties"]["page"] == {"type": "string", "description": "its title"}
    assert look["parameters"]["required"] == ["page"] and fail["name"] == "fail"
    texts = [message["content"] for message in steps[0].messages]
    assert texts[:2] == ['{"page": "Rome", "number": 1}', '{"page": "Oslo", "number": 2}']
    assert texts[2] == "error: 'page' is a required property"
    assert [m.get("tool_call_id") for m in steps[0].messages] == ["call_0", "call_1", "call_2"]
    assert [message["content"] for message in steps[1].messages] == [
        "error: ValueError: Game over.",
        "error: there is no tool '_helper'; the tools are: look, fail",
        "error: no JSON",
    ]
    assert steps[0].tool_outcomes == ("ok", "ok", "malformed")
    assert steps[1].tool_outcomes == ("error", "unknown", "malformed")
    assert [step.reward for step in steps] == [0.5, 0.0, 0.0]
    assert [step.ends_episode for step in steps] == [False, False, True]


def test_the_reward_of_a_method_is_its_increase() -> None:
    steps = play_once(env_config("ScoredByMethod"), example(), "a", turn("", ("earn", {})), turn("", ("earn", {})), "b")
    assert [step.reward for step in steps] == [None, 1.0, 1.0, 0.0]


def test_a_reset_may_lack_a_column() -> None:
    (message,) = play_once(env_config("Wiki"), example(), "a")
    assert message.startswith(f"{MODULE}:Wiki.reset: KeyError: 'kind' (user_environments.py:")


@pytest.mark.parametrize("workers", WORKERS)
def test_marked_methods_are_tools_beside_step(workers: int | None) -> None:
    env = env_config("Dealer", environment_workers=workers, environment_options={"card": "ten"})

    async def use(factory: EnvironmentFactory) -> tuple[Observation, list[Step | str]]:
        environment = factory.make()
        observation = await environment.reset(example())
        return observation, [await environment.step(each) for each in (turn("", ("deal", {})), turn("done"))]

    observation, (dealt, ended) = run_with_factory(env, use)
    assert [schema["function"]["name"] for schema in observation.tools] == ["deal"]
    assert reply_text(dealt) == "ten" and dealt.messages[0]["name"] == "deal"
    assert ended == Step(reward=1.0)


@pytest.mark.parametrize(("name", "expected"), [
    ("none", Step()), ("text", Step(({"role": "user", "content": "more"},))),
    ("message", Step(({"role": "user", "content": "more"},))),
    ("messages", Step(({"role": "tool", "content": "4"}, {"role": "user", "content": "more"}))),
    ("rewarded", Step(({"role": "user", "content": "more"},), 0.5)), ("ended", Step(reward=1.0)),
    ("done", Step(({"role": "user", "content": "bye"},), 1.0, done=True)), ("step", Step(reward=1.0)),
    ("surrogate", Step(({"role": "user", "content": "?"},))),
])  # fmt: skip
def test_short_replies_are_steps(name: str, expected: Step) -> None:
    assert play_once(env_config("Returns"), example(), name) == [expected]


@pytest.mark.parametrize(("name", "expected"), [
    ("assistant", r"the role 'assistant'; choose one of user, tool, system"),
    ("number", r"the reply is 5; return None"), ("nan", r"the reward is nan"),
    ("no content", r"the message is \{'role': 'user'\}; return"),
    ("unknown field", r"the field 'images'"), ("info", r"done is \{\}; return True or False"),
    ("text reward", r"the reward is '1'"), ("four", r"the reply is \('a', 0.0, False, \{\}\)"),
    ("reserved", r"a component is called 'mean'"), ("flood", r"the reply has 2,000,000 characters"),
])  # fmt: skip
@pytest.mark.parametrize("workers", WORKERS)
def test_nonsense_is_an_error_of_the_episode(name: str, expected: str, workers: int | None) -> None:
    (message,) = play_once(env_config("Returns", environment_workers=workers), example(), name)
    assert message.startswith(f"{MODULE}:Returns.step: ") and re.search(expected, message), message


@pytest.mark.parametrize("value", [("go", {}), ("go", 1.0, True), 5, {"role": "user"}, ["go"]])
def test_other_results_of_a_reset_are_refused(value: Any) -> None:
    expected = f"Game.reset: the result is {format_value(value)}; return None, a text, a message or a list of messages"
    with pytest.raises(EpisodeError, match=re.escape(expected)):
        read_observation(value, "Game.reset")


def test_a_first_user_message_continues_the_prompt() -> None:
    prompt: tuple[Message, ...] = ({"role": "system", "content": "s"}, {"role": "user", "content": "a"})
    assert first_messages(prompt, read_observation("b", "f")) == (prompt[0], {"role": "user", "content": "a\n\nb"})
    assert first_messages(prompt, read_observation(None, "f")) == prompt
    tool_first = read_observation([{"role": "tool", "content": "b"}, {"role": "user", "content": "c"}], "f")
    assert first_messages(prompt, tool_first) == (*prompt, *tool_first.messages)


def test_errors_of_close_are_logged(log_capture: LogCapture) -> None:
    assert len(play_once(env_config("FailsInClose"), example(), "a")) == 1
    assert "FailsInClose.close: OSError: cannot be closed" in log_capture.text


def test_prompts_of_the_environment() -> None:
    env = env_config("Prompts", dataset="environment", environment_options={"limit": 5}, system_prompt="Be kind.")
    first, second = load_examples(make_task(env), "test")
    assert first.messages == ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "test 5"})
    assert (first.answer, first.row, first.row_data["level"]) == (3, 0, 1)
    assert [m["content"] for m in second.messages] == ["Be kind.", "Four?"] and second.answer == [4]


@pytest.mark.parametrize(("limit", "expected"), [
    (0, r"row 0 of examples\(\) is \{'question': '\?'\}; return dictionaries with a `prompt`"),
    (1, r"examples\('train'\) failed: ZeroDivisionError.*user_environments\.py"), (2, r"row 0 of examples\(\)"),
])  # fmt: skip
def test_bad_prompts_are_named(limit: int, expected: str) -> None:
    env = env_config("BadPrompts", dataset="environment", environment_options={"limit": limit})
    with pytest.raises(ConfigError, match=expected):
        load_examples(make_task(env), "train")


@pytest.mark.parametrize(("name", "fields", "expected"), [
    ("NoStep", {}, r"no method step and no public method that is a tool; accepted forms"),
    ("NoReset", {}, r"no method reset; define reset\(self, example\)"),
    ("WrongStep", {}, r"the parameters of step are \(self, turn: .*change them to \(self, turn\)"),
    ("NoDocstring", {}, r"no method step and no public method that is a tool"),
    ("NoAnnotation", {}, r"the parameter page of look has no annotation"),
    ("no_parameters", {}, r"the parameters are \(\) -> None; change them to \(turns, example\)"),
    ("not_callable", {}, r"5 is neither a class nor a function"), 
    ("Nobody", {}, r"has no 'Nobody'; it has .*Counter, AsyncCounter, "),
    ("Counter", {"environment_options": {"turns": 2}}, r"environment_options\.turns: .*parameters: limit$"),
    ("countdown", {"environment_options": {"turns": 2}}, r"environment_options\.turns: .*parameters: none$"),
])  # fmt: skip
def test_wrong_forms_are_refused(name: str, fields: dict[str, Any], expected: str) -> None:
    env = EnvConfig(dataset="arithmetic", environment=f"{MODULE}:{name}", **fields)
    with pytest.raises(ConfigError, match=expected):
        find_environment(env)
    config = Config(env=env, model=ModelConfig(name="x"))
    assert any(re.search(expected, problem) for problem in option_problems(config))


@pytest.mark.parametrize(("fields", "expected"), [
    ({"environment": "chess"}, r"env\.environment='chess': no such environment; choose one of debugging, .*own as"),
    ({"environment_options": {"a": 1}}, r"there is no environment; set env\.environment"),
    ({"dataset": "environment"}, r"these are the prompts of env\.environment, which is unset"),
    ({"environment": "debugging", "reasoning": True}, r"both reply to the model; set env\.reasoning=false"),
    ({"environment": "debugging", "environment_workers": 0}, r"env\.environment_workers=0: must be at least 1"),
    ({"environment": "debugging", "step_timeout_s": 0}, r"env\.step_timeout_s=0: must be above 0"),
    ({"turn_ends": [""]}, r"an empty text ends every turn"),
    ({"history": "forget"}, r"env\.history='forget': choose one of template, append"),
    ({"turn_tokens": 9, "max_episode_tokens": 8}, r"env\.turn_tokens=9 is above env\.max_episode_tokens=8"),
])  # fmt: skip
def test_inconsistent_settings_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EnvConfig(**{"dataset": "arithmetic"} | fields)


def test_the_number_of_turns() -> None:
    assert EnvConfig(dataset="arithmetic").turn_limit == 1
    assert EnvConfig(dataset="arithmetic", environment="debugging").turn_limit == 16
    assert EnvConfig(dataset="arithmetic", environment="debugging", max_steps=1).turn_limit == 1


def test_an_environment_without_prompts_needs_a_data_set() -> None:
    with pytest.raises(ConfigError, match=r"needs its method examples\(split\)"):
        make_task(env_config("Counter", dataset="environment"))


def test_an_environment_with_tools_of_its_own_takes_no_others() -> None:
    env = env_config("Wiki", tools=["calculator"])
    expected = r"env\.tools=\['calculator'\] with env\.environment=.*, which has tools of its own \(.+\); leave"
    with pytest.raises(ConfigError, match=expected):
        EpisodeEnvironments(env)


def test_the_limit_of_an_episode_needs_episodes() -> None:
    model = ModelConfig(name="x")
    one_turn = EnvConfig(dataset="arithmetic", max_episode_tokens=900)
    assert Config(env=one_turn, model=model).response_tokens == InferenceModelConfig().max_tokens != 900
    assert Config(env=replace(one_turn, environment="debugging"), model=model).response_tokens == 900


@pytest.mark.parametrize("workers", WORKERS)
def test_a_tool_result_that_is_no_text_is_an_error_that_the_model_reads(workers: int | None) -> None:
    steps = play_once(env_config("Ledgers", environment_workers=workers), example(), turn("", ("read", {})), "a")
    assert steps[0].messages[0]["content"].startswith("error: TypeError: keys must be str")
    assert steps[1].ends_episode
