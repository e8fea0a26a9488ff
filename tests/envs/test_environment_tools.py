"""Tests of environments of tools: native calls, tags, and the request to think again."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.environments.interface import EpisodeError, Observation, Step
from envs.environments.make import EnvironmentFactory
from envs.environments.tool_environment import ReflectionEnvironment, TagsEnvironment, ToolEnvironment
from envs.tool_calls import Tool, make_tools
from tests.envs.environment_helpers import env_config, example, play, run_with_factory, turn

SCHEMA = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}


@dataclass
class Answer:
    """Result of a tool call."""

    text: str
    outcome: str


@dataclass
class WaitingTools:
    """Tool set whose calls wait until all calls of a turn are there."""

    num_calls: int
    schemas: tuple[dict[str, Any], ...] = (SCHEMA,)
    calls: list[str] = field(default_factory=list)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.all_there = asyncio.Event()

    async def call(self, name: str, arguments: dict[str, Any]) -> Answer:
        self.calls.append(name)
        if len(self.calls) == self.num_calls:
            self.all_there.set()
        await self.all_there.wait()
        return Answer(f"{name} {2 * arguments['n']}", "ok" if name == "double" else "unknown")

    async def close(self) -> None:
        self.is_closed = True


def test_the_calls_of_a_turn_run_together_and_are_answered_in_order() -> None:
    async def run() -> tuple[WaitingTools, Observation, list[Step]]:
        tools = WaitingTools(2)
        environment = ToolEnvironment(tools)
        observation = await environment.reset(example())
        turns = [
            turn("", ("double", {"n": 1}), ("half", {"n": 2}), malformed_calls=("no JSON: {",)),
            turn("The answer is 2."),
        ]
        steps = [await environment.step(each) for each in turns]
        await environment.close()
        return tools, observation, steps

    tools, observation, (called, ended) = asyncio.run(run())
    assert observation == Observation((), (SCHEMA,))
    assert called.messages == (
        {"role": "tool", "name": "double", "content": "double 2", "tool_call_id": "call_0"},
        {"role": "tool", "name": "half", "content": "half 4", "tool_call_id": "call_1"},
        {"role": "tool", "content": "error: no JSON: {"},
    )
    assert called.tool_outcomes == ("ok", "unknown", "malformed") and called.reward is None
    assert ended == Step() and ended.ends_episode and tools.is_closed


def test_a_malformed_call_alone_is_answered() -> None:
    step = asyncio.run(ToolEnvironment(WaitingTools(1)).step(turn("<tool_call>{", malformed_calls=("no JSON",))))
    assert step.messages == ({"role": "tool", "content": "error: no JSON"},)


def test_turns_without_calls_go_to_the_inner_environment() -> None:
    async def run() -> list[Step | str]:
        inner = ReflectionEnvironment("Sure?", 1)
        return await play(ToolEnvironment(WaitingTools(1), inner), example(), turn("", ("double", {"n": 1})), "2")

    called, reflection = asyncio.run(run())
    assert called.messages[0]["content"] == "double 2"
    assert reflection.messages == ({"role": "user", "content": "Sure?"},)


def test_tools_of_the_environment_exclude_other_tools() -> None:
    async def use(factory: EnvironmentFactory) -> None:
        with pytest.raises(EpisodeError, match=r"tools of its own \(look\): leave env.tools empty"):
            await ToolEnvironment(WaitingTools(1), factory.make()).reset(example())

    run_with_factory(env_config("AsyncCounter"), use)


@pytest.mark.parametrize(("text", "reply"), [
    ("I need <calculator>2*3</calculator>", "calculator: 6"),
    ("<calculator>1/0</calculator> \n", "calculator: error: division by zero"),
    ("<calculator>1</calculator> is one", None), ("<shout>ab</shout>", "shout: AB"), ("no call", None),
])  # fmt: skip
@pytest.mark.parametrize("reasoning", [False, True])
def test_tags_are_answered_by_their_tool(text: str, reply: str | None, reasoning: bool) -> None:
    env = EnvConfig(dataset="x", max_steps=3, tools=["calculator"], tool_format="tags")
    shout = Tool("shout", str.upper, is_slow=True, close=lambda: None)
    inner = ReflectionEnvironment("Sure?", 2) if reasoning else None
    (step,) = asyncio.run(play(TagsEnvironment([shout, *make_tools(env)], inner), example(), text))
    expected = reply or ("Sure?" if reasoning else None)
    assert step == (Step() if expected is None else Step(({"role": "user", "content": expected},)))
