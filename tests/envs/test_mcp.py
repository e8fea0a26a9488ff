"""Tests of tools in MCP servers, with real servers over stdio and HTTP."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from envs.tools import mcp_address
from envs.tools.tool_set import ToolSet, ToolSetFactory, check_tools
from tests.envs.native_tools import call_tools, tool_env, with_tools
from tests.log_capture import LogCapture
from tests.processes import is_alive, wait_for_exit
from tests.script_runner import ENVIRONMENT, ROOT
from torchgrpo.run.build_rollout import make_environments
from torchgrpo.training.model_loading import load_tokenizer

pytest.importorskip("mcp", reason="pip install -e '.[mcp]' in the project's folder")

SERVER = Path(__file__).with_name("mcp_test_server.py")
NAMES = ["spell", "count_calls", "table", "fail", "wait", "die", "leave_child", "process_id"]


def server(*words: str, prefix: str = "mcp:") -> str:
    return prefix + shlex.join([sys.executable, str(SERVER), *words])


def server_processes() -> list[int]:
    """Returns the process ids of servers and their guards below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if str(SERVER) in process.cmdline():
                found.append(process.pid)
        except psutil.NoSuchProcess:  # ended meanwhile; also raised for a zombie
            continue
    return found


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert server_processes() == []


async def value(tools: ToolSet, name: str, **arguments: Any) -> int:
    result = await tools.call(name, arguments)
    assert result.outcome == "ok", result
    return int(result.text)


def test_tools_of_a_server_answer_like_others(log_capture: LogCapture) -> None:
    """The server also prints a line that is no message."""
    env = tool_env("calculator", server())
    schemas = with_tools(env, lambda factory: asyncio.sleep(0, factory.schemas))
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", *NAMES]
    assert schemas[1]["function"]["description"] == "Spells a word backwards."
    assert schemas[1]["function"]["parameters"]["required"] == ["word"]
    results = call_tools(
        tool_env(server(), tool_result_characters=200),
        ("spell", {"word": "été"}), ("spell", {"word": 3}), ("fail", {"word": "a"}), ("table", {"rows": 90}),
        ("nothing", {}),
    )  # fmt: skip
    assert [each.outcome for each in results] == ["ok", "malformed", "error", "ok", "unknown"]
    assert [each.text for each in results[:3]] == [
        "été", "error: argument word: 3 is not of type 'string'", "error: Error executing tool fail",
    ]  # fmt: skip
    assert len(results[3].text) <= 200 and "characters cut" in results[3].text
    (message,) = log_capture.messages
    assert "tool fail failed" in message


def test_every_episode_has_its_own_server() -> None:
    async def use(factory: ToolSetFactory) -> None:
        first, second = await asyncio.gather(factory.make(), factory.make())
        counts = [await value(tools, "count_calls") for tools in (first, first, second)]
        assert counts == [1, 2, 1]
        pids = [await value(tools, "process_id") for tools in (first, second)]
        assert len({*pids, os.getpid()}) == 3
        await first.close()
        assert [is_alive(pid) for pid in pids] == [False, True]
        await second.close()
        assert not is_alive(pids[1])
        assert [each.outcome for each in [await first.call("count_calls", {})]] == ["error"]

    with_tools(tool_env(server()), use)


def test_episodes_share_a_shared_server_and_get_a_new_one_after_its_end() -> None:
    async def use(factory: ToolSetFactory) -> list[int]:
        first, second = await factory.make(), await factory.make()
        counts = [await value(first, "count_calls"), await value(second, "count_calls")]
        await first.close()
        counts.append(await value(second, "count_calls"))
        assert (await second.call("die", {})).outcome == "error"
        third = await factory.make()
        return [*counts, await value(third, "count_calls")]

    assert with_tools(tool_env(server(prefix="mcp:shared:")), use) == [1, 2, 3, 1]


def test_the_end_of_a_server_costs_only_its_episode(log_capture: LogCapture) -> None:
    async def use(factory: ToolSetFactory) -> None:
        first, second = await factory.make(), await factory.make()
        results = [await first.call("die", {}), await first.call("spell", {"word": "a"})]
        assert [each.text for each in results] == ["error: the tool's server has stopped"] * 2
        assert [each.outcome for each in results] == ["error", "error"]
        assert await value(second, "count_calls") == 1
        await first.close()
        third = await factory.make()
        assert await value(third, "count_calls") == 1
        for tools in (second, third):
            await tools.close()

    with_tools(tool_env(server()), use)
    assert "tool die failed" in log_capture.text
    assert "the last line of its error output is: the disk is full" in log_capture.text


def test_a_server_that_is_killed_between_calls_costs_only_its_episode() -> None:
    async def use(factory: ToolSetFactory) -> str:
        tools = await factory.make()
        pid = await value(tools, "process_id")
        os.kill(pid, signal.SIGKILL)
        result = await tools.call("spell", {"word": "a"})
        await tools.close()
        return result.outcome

    assert with_tools(tool_env(server()), use) == "error"


@pytest.mark.long
def test_a_late_call_is_answered_and_the_next_one_works() -> None:
    async def use(factory: ToolSetFactory) -> tuple[str, str]:
        tools = await factory.make()
        late, next_result = await tools.call("wait", {"seconds": 3600}), await tools.call("spell", {"word": "ab"})
        await tools.close()
        return late.text, next_result.text

    assert with_tools(tool_env(server(), seconds=10.0), use) == ("error: took longer than 10 s", "ba")


@pytest.mark.parametrize("kind", ["stubborn", pytest.param("", marks=pytest.mark.long)])
def test_no_process_is_left_of_a_cancelled_episode(kind: str) -> None:
    """The server ignores the end of its input, its child process SIGTERM."""

    async def use(factory: ToolSetFactory) -> list[int]:
        pids: list[int] = []

        async def episode() -> None:
            tools = await factory.make()
            try:
                pids.extend([await value(tools, "process_id"), await value(tools, "leave_child")])
                await tools.call("wait", {"seconds": 3600})
            finally:
                await tools.close()

        task = asyncio.ensure_future(episode())
        while len(pids) < 2 and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [is_alive(pid) for pid in pids] == [False, False]
        return pids

    assert len(with_tools(tool_env(server(*kind.split())), use)) == 2


@pytest.mark.long
def test_an_episode_that_is_cancelled_while_it_closes_leaves_no_process() -> None:
    async def use(factory: ToolSetFactory) -> None:
        tools = await factory.make()
        pid = await value(tools, "process_id")
        closing_task = asyncio.ensure_future(tools.close())
        await asyncio.sleep(0)
        closing_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing_task
        await asyncio.to_thread(wait_for_exit, pid)

    with_tools(tool_env(server("stubborn")), use)


@pytest.mark.parametrize("steps", [100, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 10, 1000))])
def test_an_episode_that_is_cancelled_while_its_server_starts_leaves_no_process(steps: int) -> None:
    async def use(factory: ToolSetFactory) -> None:
        making_task = asyncio.ensure_future(factory.make())
        for _ in range(steps):
            await asyncio.sleep(0.0001)
        making_task.cancel()
        outcome = (await asyncio.gather(making_task, return_exceptions=True))[0]
        if isinstance(outcome, ToolSet):  # it was faster
            await outcome.close()
        for pid in server_processes():
            await asyncio.to_thread(wait_for_exit, pid)

    with_tools(tool_env(server()), use)


@pytest.mark.long
def test_the_factory_closes_servers_of_episodes_that_are_not_closed() -> None:
    async def use(factory: ToolSetFactory) -> list[int]:
        return [await value(await factory.make(), "process_id") for _ in range(2)]

    pids = with_tools(tool_env(server()), use)
    assert not any(map(is_alive, pids))


KILLED_RUN = """
import asyncio, sys
from envs.tools.tool_set import ToolSetFactory
from tests.envs.native_tools import tool_env

async def main():
    factory = ToolSetFactory(tool_env(*sys.argv[1:]))
    sets = [await factory.make() for _ in range(2)]
    for tools in sets:
        for name in ("process_id", "leave_child"):
            print((await tools.call(name, {})).text, flush=True)
    print("ready", flush=True)
    await sets[0].call("wait", {"seconds": 3600})

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_no_process_is_left_of_a_killed_run(number: int, tmp_path: Path) -> None:
    (tmp_path / "killed_run.py").write_text(KILLED_RUN)
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "killed_run.py"), server("stubborn")],
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    pids = [int(line) for line in iter(run.stdout.readline, "ready\n")]
    assert len(pids) == 4 and all(map(is_alive, pids))
    guards = [process.pid for process in psutil.Process(run.pid).children()]
    run.send_signal(number)
    run.wait(300)
    run.stdout.close()
    assert len(guards) == 2
    for pid in (*pids, *guards):
        wait_for_exit(pid)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def http_address() -> Iterator[str]:
    port = free_port()
    environment = {**ENVIRONMENT, "MCP_TEST_PORT": str(port)}
    command = [sys.executable, str(SERVER), "http"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "running on" in line:
            break
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()
    process.stderr.close()


def test_a_server_over_http_answers_and_its_end_is_an_outcome(http_address: str) -> None:
    async def use(factory: ToolSetFactory) -> None:
        first, second = await factory.make(), await factory.make()
        assert (await first.call("spell", {"word": "ab"})).text == "ba"
        assert [await value(tools, "count_calls") for tools in (first, second)] == [1, 2]
        assert (await second.call("fail", {"word": "a"})).outcome == "error"
        await second.close()
        assert await value(first, "count_calls") == 3
        os.kill(await value(first, "process_id"), signal.SIGKILL)
        results = [await first.call("spell", {"word": "ab"}) for _ in range(2)]
        assert [each.outcome for each in results] == ["error", "error"], results
        await first.close()

    with_tools(tool_env(f"mcp:{http_address}", seconds=120.0), use)


def test_a_server_that_does_not_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the MCP server failed at its start: .*is: no such index: words\.db$"):
        ToolSetFactory(tool_env(server("fails")))
    with pytest.raises(ConfigError, match=r"the MCP server was not ready after 0\.6 s$"):
        ToolSetFactory(tool_env(server("hangs"), seconds=0.1))
    with pytest.raises(ConfigError, match=r"env\.tools=mcp:http://127.*the MCP server failed at its start: \w+Error"):
        ToolSetFactory(tool_env(f"mcp:http://127.0.0.1:{free_port()}/mcp"))


@pytest.mark.long
def test_a_failed_start_of_one_server_ends_the_others() -> None:
    with pytest.raises(ConfigError, match="failed at its start"):
        ToolSetFactory(tool_env(server(prefix="mcp:shared:"), server("fails")))


@pytest.mark.long
def test_a_refused_chat_template_ends_the_servers() -> None:
    env = replace(tool_env(server(prefix="mcp:shared:")), max_steps=2)
    model = ModelConfig(name=str(ROOT / "torchgrpo" / "models" / "quickstart"))
    with pytest.raises(ConfigError, match="the chat template does not write tools into the prompt"):
        make_environments(Config(env=env, model=model), load_tokenizer(model))


@pytest.mark.parametrize(("path", "message"), [
    ("mcp:", "there is no command; write mcp:COMMAND ARGS, or mcp:http://HOST:PORT/mcp"),
    ("mcp:shared: ", "there is no command"),
    ("mcp:no-such-command --flag", "the command 'no-such-command' does not exist; install it, or give its full path"),
    ("mcp:python 'server.py", "the command cannot be read: No closing quotation; check its quotes"),
    ("mcp:http:///mcp", "the address has no host; write mcp:http://HOST:PORT/mcp"),
    ("mcp:http://[::1/mcp", "the address has no host"),
])  # fmt: skip
def test_an_invalid_address_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env\.tools={path.replace('[', '.')}: {message}"):
        check_tools(tool_env(path))


def test_a_check_starts_no_server() -> None:
    check_tools(tool_env(server("fails"), server("hangs")))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_address, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the MCP package: pip install -e '\.\[mcp\]' in the project's folder"):
        check_tools(tool_env(server()))


def test_tags_have_no_servers() -> None:
    from envs.tool_calls import find_tools

    with pytest.raises(ConfigError, match=r"an MCP server has no tags; set env\.tool_format=native"):
        find_tools(tool_env(server(), tool_format="tags"))
