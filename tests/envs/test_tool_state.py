"""Tests of tools that are classes: state, order of calls, threads, and their end."""

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.tools import tool_sources
from envs.tools.tool_set import ToolResult, ToolSetFactory
from envs.tools.tool_sources import OpenTools, open_methods
from envs.user_calls import DaemonThread
from tests.envs import user_tools
from tests.envs.native_tools import call_tools, function_of, tool_env, with_tools
from tests.log_capture import LogCapture


@pytest.fixture(autouse=True)
def _release_calls() -> Iterator[None]:
    user_tools.release.clear()
    yield
    user_tools.release.set()


NOTEBOOK_TOOLS = ["add_note", "read_notes", "process_id", "shout"]


def test_a_class_has_state_for_each_episode_in_the_thread_of_its_constructor() -> None:
    user_tools.Notebook.closed_notes.clear()

    async def use(factory: ToolSetFactory) -> list[str]:
        assert [schema["function"]["name"] for schema in factory.schemas] == NOTEBOOK_TOOLS
        first, second = await factory.make(), await factory.make()
        await first.call("add_note", {"text": "a"})
        await second.call("add_note", {"text": "b"})
        await first.call("add_note", {"text": "c"})
        results = [await tools.call("read_notes", {}) for tools in (first, second)]
        results += [await first.call("process_id", {}), await first.call("shout", {"text": "d"})]
        for tools in (first, second):
            await tools.close()
        return [each.text for each in results]

    assert with_tools(tool_env("Notebook"), use) == ['["a", "c"]', '["b"]', str(os.getpid()), "D"]
    assert user_tools.Notebook.closed_notes == [[], ["a", "c"], ["b"]]  # the first one is the check at the start


def test_calls_of_one_instance_run_in_their_order() -> None:
    async def use(factory: ToolSetFactory) -> list[str]:
        tools = await factory.make()
        results = await asyncio.gather(*(tools.call("add_note", {"text": str(n)}) for n in range(20)))
        assert [each.text for each in results] == [str(n + 1) for n in range(20)]
        notes = await tools.call("read_notes", {})
        await tools.close()
        return [notes.text]

    assert with_tools(tool_env("BiggerNotebook"), use) == [str([str(n) for n in range(20)]).replace("'", '"')]


def test_a_call_behind_one_that_hangs_is_late_too_and_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_with_short_timeout(instance: Any, methods: Mapping[str, str], env: EnvConfig, *rest: Any) -> OpenTools:
        return open_methods(instance, methods, replace(env, tool_timeout_s=0.2), *rest)

    # Short for the methods only, since the constructors have to return in time.
    monkeypatch.setattr(tool_sources, "open_methods", open_with_short_timeout)

    async def use(factory: ToolSetFactory) -> list[str]:
        tools = await factory.make()
        results = [await tools.call("wait_for_release", {}), await tools.call("record", {"text": "late"})]
        user_tools.release.set()
        await tools.close()
        return [each.outcome for each in results]

    assert with_tools(tool_env("Recorder"), use) == ["timeout", "timeout"]
    for thread in threading.enumerate():
        if thread.name.startswith("tool"):
            thread.join(300)
    assert user_tools.Recorder.recorded_texts == []


def test_inherited_methods_are_tools() -> None:
    env = tool_env("BiggerNotebook")
    schemas = with_tools(env, lambda factory: asyncio.sleep(0, factory.schemas))
    assert [schema["function"]["name"] for schema in schemas] == [*NOTEBOOK_TOOLS, "first_note"]


def test_a_class_with_run_alone_is_one_tool() -> None:
    env = tool_env("Echo")
    assert function_of(env, "Echo")["description"] == "You have an echo."
    assert call_tools(env, ("Echo", {"request": "a"})) == [ToolResult("a", "ok")]


def test_a_failure_at_close_is_logged_and_not_raised(log_capture: LogCapture) -> None:
    assert call_tools(tool_env("FailingAtClose"), ("look", {})) == [ToolResult("seen", "ok")]
    (message,) = log_capture.messages
    assert "FailingAtClose.close failed" in message and "cannot close" in message


def test_threads_of_tools_end_with_their_episode() -> None:
    async def use(factory: ToolSetFactory) -> None:
        tools = await factory.make()
        await tools.call("read_notes", {})
        await tools.call("capital", {"country": "Peru"})
        await tools.close()

    with_tools(tool_env("Notebook", "capital"), use)
    for thread in threading.enumerate():
        if thread.name.startswith("tool"):
            thread.join(300)
            assert not thread.is_alive()


def test_a_value_that_comes_after_the_loop_is_closed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    thread = DaemonThread("late value")

    async def submit() -> None:
        thread.submit(user_tools.hang)

    asyncio.run(submit())
    (worker,) = [each for each in threading.enumerate() if each.name == "late value"]
    user_tools.release.set()
    thread.stop()
    worker.join(300)
    assert not worker.is_alive() and not uncaught
