"""Tests of agents that fail, flood, fork, hang and hide; nothing of them stays."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from config.schema.errors import ConfigError
from envs.agents.fork_server import can_use_namespaces
from envs.agents.results import AgentResult
from envs.agents.runner import AgentRunner
from envs.environments.interface import EpisodeError
from tests.envs.agents.agent_helpers import (
    KEY,
    MARK,
    MODULE,
    URL,
    make_example,
    marked_pids,
    run_agent,
    shell,
    trick,
    use_agent,
    wait_for,
    wait_in_loop,
)
from tests.log_capture import LogCapture
from tests.script_runner import ROOT

ISOLATION_KINDS = [
    pytest.param(True, id="namespaces", marks=pytest.mark.skipif(not can_use_namespaces(), reason="needs namespaces")),
    pytest.param(False, id="subreaper"),
]


def fault_of(agent: str, folder: Path, namespaces: bool = True) -> str:
    with pytest.raises(EpisodeError) as error:
        run_agent(agent, folder, namespaces)
    text = str(error.value)
    assert text.startswith(f"env.agent={agent}: ")
    return text.removeprefix(f"env.agent={agent}: ")


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
def test_exit_code_and_signal(namespaces: bool, tmp_path: Path) -> None:
    assert fault_of(shell("exit 3"), tmp_path, namespaces) == "exit code 3"
    assert fault_of(shell("kill -9 $$"), tmp_path, namespaces) == "killed by SIGKILL"
    assert fault_of(shell("kill -TERM $$"), tmp_path, namespaces) == "killed by SIGTERM"


def test_end_of_standard_error_is_bounded_and_printable(tmp_path: Path) -> None:
    script = (
        r"""i=0; while [ $i -lt 50 ]; do echo "line $i" >&2; i=$((i+1)); done; printf '\033[31mred\n' >&2; exit 1"""
    )
    lines = fault_of(shell(script), tmp_path).splitlines()
    assert lines[0] == "exit code 1; the end of its standard error:"
    assert lines[1:] == [*(f"line {index}" for index in range(31, 50)), "\N{REPLACEMENT CHARACTER}[31mred"]
    long = fault_of(shell("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1"), tmp_path)
    assert len(long) < 2100


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("row", [0, 1])
def test_a_forged_report_is_a_fault(row: int, tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"the report of its result is|maximum recursion|recursion"):
        run_agent(f"{MODULE}:forges_report", tmp_path, example=make_example(row))


def test_missing_programs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.agent=no-such-program --x: there is no program 'no-such-program'"):
        run_agent("no-such-program --x", tmp_path)
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    assert fault_of(str(program), tmp_path) == f"'{program}' cannot be started: No such file or directory"


def test_functions_that_cannot_be_imported(tmp_path: Path) -> None:
    for path, message in {
        f"{MODULE}:absent": "has no 'absent'",
        "no_such_module_of_agents:run": "importing 'no_such_module_of_agents' failed",
        f"{MODULE}:OWN_FILE": "is no function",
    }.items():
        with pytest.raises(ConfigError, match=rf"env\.agent={path}.*{message}"):
            run_agent(path, tmp_path)


def test_malformed_reward(tmp_path: Path) -> None:
    assert "its last line of output is no valid JSON" in fault_of(shell("""echo '{"reward": '"""), tmp_path)


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
@pytest.mark.parametrize("stream", ["1", "2"])
def test_floods(stream: str, namespaces: bool, tmp_path: Path) -> None:
    assert fault_of(trick("flood", stream), tmp_path, namespaces).startswith(
        "it wrote more than 16 MiB of output, and was killed"
    )


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
@pytest.mark.parametrize("kind", ["bomb", "tree"])
def test_fork_bombs(kind: str, namespaces: bool, tmp_path: Path) -> None:
    assert fault_of(trick(kind), tmp_path, namespaces).startswith("it started more than 256 processes")


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
@pytest.mark.parametrize("kind", ["daemon", "children"])
def test_children_that_outlive_their_agent(kind: str, namespaces: bool, tmp_path: Path) -> None:
    result = run_agent(trick(kind), tmp_path, namespaces)
    assert result.reward == (1.0 if kind == "daemon" else 0.5)


def test_deep_folders_are_removed(tmp_path: Path) -> None:
    assert run_agent(trick("files"), tmp_path) == AgentResult(None)


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
@pytest.mark.parametrize("agent", [trick("hang"), trick("closed_streams"), trick("daemon", "x"), f"{MODULE}:sleeps"])
def test_cancellation(agent: str, namespaces: bool, tmp_path: Path) -> None:
    async def use(runner: AgentRunner) -> None:
        task = asyncio.create_task(runner.run(make_example(), URL, KEY))
        await wait_in_loop((tmp_path / "ready").exists, "the agent")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    use_agent(agent, tmp_path, use, namespaces)


def test_cancellation_before_the_agent_starts(tmp_path: Path) -> None:
    async def use(runner: AgentRunner) -> None:
        for turns in range(12):
            task = asyncio.create_task(runner.run(make_example(), URL, KEY))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    use_agent(trick("hang"), tmp_path, use)


def test_many_at_once(tmp_path: Path) -> None:
    async def use(runner: AgentRunner) -> list[AgentResult]:
        return await asyncio.gather(*(runner.run(make_example(row), URL, KEY) for row in range(32)))

    results = use_agent(f"{MODULE}:returns_components", tmp_path, use)
    assert [result.components["row"] for result in results] == list(range(32))
    results = use_agent(shell("""sleep 0.2; echo '{"reward": 1}'"""), tmp_path, use)
    assert results == [AgentResult(1.0)] * 32


def test_one_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    agent = shell("""grep -q '"row": 0' $GRPO_EXAMPLE && touch $READY && sleep 3600; echo '{"reward": 1}'""")

    async def use(runner: AgentRunner) -> None:
        late = asyncio.create_task(runner.run(make_example(0), URL, KEY))
        await wait_in_loop((tmp_path / "ready").exists, "the agent")
        assert await runner.run(make_example(1), URL, KEY) == AgentResult(1.0)
        late.cancel()
        await asyncio.wait({late})

    use_agent(agent, tmp_path, use)


@pytest.mark.skipif(not can_use_namespaces(), reason="needs namespaces")
def test_a_namespace_hides_the_run(tmp_path: Path) -> None:
    output = tmp_path / "seen.json"
    run_agent(trick("proc"), tmp_path, variables={"OUTPUT": str(output)})
    seen = json.loads(output.read_text())
    assert set(seen["names"]) <= {"1", "2", "3"} and seen["umount"] != 0


@pytest.mark.skipif(not can_use_namespaces(), reason="needs namespaces")
def test_process_1_cannot_be_killed_from_inside(tmp_path: Path) -> None:
    assert run_agent(trick("kill_parent"), tmp_path) == AgentResult(0.5)


def test_killed_helpers_end_their_agent(tmp_path: Path) -> None:
    fault = fault_of(trick("kill_parent"), tmp_path, namespaces=False)
    assert fault == "the helper process that started it was killed or failed"


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
def test_killed_guards_and_cancellations_leave_nothing(namespaces: bool, tmp_path: Path) -> None:
    agent = shell("""(setsid sleep 1000 &); sleep 0.1; echo '{"reward": 1}'""")
    choices = random.Random(0)

    async def kill_any(runner: AgentRunner, mark: str) -> None:
        while True:
            await asyncio.sleep(0.1)
            pids = [pid for pid in marked_pids(mark) if pid != runner._fork_server.process.pid]
            with suppress(IndexError, ProcessLookupError):
                os.kill(choices.choice(pids), signal.SIGKILL)

    async def play(runner: AgentRunner, row: int, places: asyncio.Semaphore) -> str:
        async with places:
            task = asyncio.create_task(runner.run(make_example(row), URL, KEY))
            if row % 3 == 0:
                await asyncio.wait({task}, timeout=choices.random() * 0.1)
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            return type(result).__name__

    async def use(runner: AgentRunner) -> set[str]:
        killer = asyncio.create_task(kill_any(runner, runner.variables[MARK]))
        places = asyncio.Semaphore(16)
        results = await asyncio.gather(*(play(runner, row, places) for row in range(120)))
        killer.cancel()
        return set(results)

    kinds = use_agent(agent, tmp_path, use, namespaces)
    assert {"AgentResult", "CancelledError"} <= kinds <= {"AgentResult", "CancelledError", "EpisodeError"}


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
def test_killed_fork_server_is_replaced(namespaces: bool, tmp_path: Path) -> None:
    async def use(runner: AgentRunner) -> None:
        task = asyncio.create_task(runner.run(make_example(), URL, KEY))
        await wait_in_loop((tmp_path / "ready").exists, "the agent")
        process = runner._fork_server.process
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EpisodeError, match="the process that guards it was killed"):
            await task
        assert all(not list(root.iterdir()) for root in (tmp_path / "tmp").iterdir())
        (tmp_path / "ready").unlink()
        again = asyncio.create_task(runner.run(make_example(), URL, KEY))
        await wait_in_loop((tmp_path / "ready").exists, "the second agent")
        again.cancel()
        await asyncio.wait({again})

    use_agent(trick("hang"), tmp_path, use, namespaces)


@pytest.mark.parametrize("namespaces", ISOLATION_KINDS)
@pytest.mark.parametrize("agent", [trick("daemon", "x"), f"{MODULE}:sleeps"])
def test_sigkill_of_the_run_leaves_nothing(agent: str, namespaces: bool, tmp_path: Path) -> None:
    mark, ready, temporary = uuid.uuid4().hex, tmp_path / "ready", tmp_path / "tmp"
    temporary.mkdir()
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.envs.agents.killed_run", str(namespaces), agent, mark, str(ready)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        wait_for(lambda: ready.exists() and len(ready.read_text()) == 2, "two agents")
        assert len(marked_pids(mark)) > 2
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not marked_pids(mark), "the end of all processes")
    wait_for(lambda: not list(temporary.iterdir()), "the removal of all files")


def test_the_warning_without_namespaces_comes_once(tmp_path: Path, log_capture: LogCapture) -> None:
    async def use(runner: AgentRunner) -> None:
        for _ in range(2):
            await runner.run(make_example(), URL, KEY)

    use_agent(shell("true"), tmp_path, use, namespaces=False)
    assert log_capture.text.count("this machine allows no process namespaces") == 1
