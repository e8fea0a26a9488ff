"""Helpers of the tests of agents: runs of agents, and what they leave behind."""

import asyncio
import os
import shlex
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from config.schema.env import EnvConfig
from envs.agents.results import AgentResult
from envs.agents.runner import AgentRunner
from envs.example import Example
from tests.envs.agents import user_agents

MODULE = "tests.envs.agents.user_agents"
MARK = "GRPO_TEST_MARK"
URL, KEY = "http://127.0.0.1:9/v1", "key-of-the-episode"
ANSWER = "answer-4711"
Result = TypeVar("Result")


def make_example(row: int = 0, **columns: Any) -> Example:
    return Example(({"role": "user", "content": "?"},), ANSWER, row, row_data=columns)


def trick(*words: str) -> str:
    """Returns the command line of a trick of `user_agents`."""
    return shlex.join([sys.executable, user_agents.OWN_FILE, *words])


def shell(script: str) -> str:
    return shlex.join(["sh", "-c", script])


def marked_pids(mark: str) -> list[int]:
    """Returns the processes that started with the mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                has_mark = mark.encode() in Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            found += [int(name)] if has_mark else []
    return found


def wait_for(condition: Callable[[], bool], condition_name: str) -> None:
    deadline = time.monotonic() + 300.0
    while not condition():
        assert time.monotonic() < deadline, f"waited 300 s for {condition_name}"
        time.sleep(0.01)


async def wait_in_loop(condition: Callable[[], bool], condition_name: str) -> None:
    await asyncio.to_thread(wait_for, condition, condition_name)


def use_agent(
    agent: str,
    folder: Path,
    use: Callable[[AgentRunner], Awaitable[Result]],
    namespaces: bool = True,
    variables: dict[str, Any] | None = None,
    **fields: Any,
) -> Result:
    """Uses a runner, and checks that no process and no file is left.

    folder: holds the temporary files, and the file READY of agents.
    """
    mark = uuid.uuid4().hex
    marks = {MARK: mark, "READY": str(folder / "ready"), **(variables or {})}
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)

    async def run() -> Result:
        env = EnvConfig(dataset="arithmetic", agent=agent, agent_env=marks, **fields)
        runner = AgentRunner(env, namespaces)
        try:
            result = await use(runner)
            assert marked_pids(mark) == [runner._fork_server.process.pid]
            assert all(list(root.iterdir()) == [] for root in temporary.iterdir())
        finally:
            await runner.close()
        return result

    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(temporary)
    try:
        result = asyncio.run(run())
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
    assert marked_pids(mark) == [] and list(temporary.iterdir()) == []
    return result


def run_agent(agent: str, folder: Path, namespaces: bool = True, **options: Any) -> AgentResult:
    """Runs an agent for one example."""
    example = options.pop("example", make_example())
    return use_agent(agent, folder, lambda runner: runner.run(example, URL, KEY), namespaces, **options)
