"""Tests of worker processes of environments, with workers that hang, die, fork and flood."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from config.schema.errors import ConfigError
from envs.environments.interface import Environment, EpisodeError
from envs.environments.make import EnvironmentFactory
from envs.environments.worker_pool import SERVE, EnvironmentWorkers, WorkerConnection, WorkerEnvironment
from envs.reward_workers.fork_server_process import ForkServerProcess
from tests.envs.environment_helpers import MODULE, env_config, example, play, reply_text, run_with_factory, turn
from tests.processes import is_alive, wait_for_exit
from tests.script_runner import ROOT

STEP = f"{MODULE}:Naughty.step"


def pool_of(factory: EnvironmentFactory) -> EnvironmentWorkers:
    assert factory._workers is not None
    return factory._workers


def worker_of(environment: Environment) -> WorkerConnection:
    assert isinstance(environment, WorkerEnvironment) and environment.worker is not None
    return environment.worker


def use_workers(use: Callable[[EnvironmentFactory], Awaitable[Any]], kind: str = "Naughty", **fields: Any) -> Any:
    return run_with_factory(env_config(kind, **{"environment_workers": 2, "step_timeout_s": 120.0} | fields), use)


def test_an_instance_stays_in_its_worker() -> None:
    async def use(factory: EnvironmentFactory) -> None:
        episodes = [play(factory.make(), example(), *["pid"] * 5) for _ in range(6)]
        pids = [{reply_text(step) for step in steps} for steps in await asyncio.gather(*episodes)]
        assert all(len(each) == 1 for each in pids)
        workers = [str(worker.pid) for worker in pool_of(factory).workers]
        assert sorted(set.union(*pids)) == sorted(workers) and len(workers) == 2
        assert [worker.num_episodes for worker in pool_of(factory).workers] == [0, 0]
        assert os.getpid() not in map(int, workers)

    use_workers(use)


def test_a_killed_worker_is_replaced_and_the_other_goes_on() -> None:
    async def use(factory: EnvironmentFactory) -> None:
        first, second = factory.make(), factory.make()
        for environment in (first, second):
            await environment.reset(example())
        hanging_step = asyncio.ensure_future(first.step(turn("hang")))
        pid = worker_of(first).pid
        assert pid != worker_of(second).pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EpisodeError, match=rf"{STEP}: its worker process died"):
            await hanging_step
        with pytest.raises(EpisodeError, match=rf"{STEP}: its worker process died"):
            await first.step(turn("again"))
        assert reply_text(await second.step(turn("pid"))) == str(worker_of(second).pid)
        (step,) = await play(factory.make(), example(), "pid")
        assert reply_text(step) not in (str(pid), str(worker_of(second).pid))
        for environment in (first, second):
            await environment.close()

    use_workers(use)


def test_a_step_that_hangs_costs_its_worker_only() -> None:
    async def use(factory: EnvironmentFactory) -> list[Any]:
        late, neighbour, other = (factory.make() for _ in range(3))
        for environment in (late, other, neighbour):
            await environment.reset(example())
        assert worker_of(late) is worker_of(neighbour)
        pid = worker_of(late).pid
        steps = [late.step(turn("hang")), neighbour.step(turn("a")), other.step(turn("b"))]
        results = await asyncio.gather(*steps, return_exceptions=True)
        wait_for_exit(pid)
        return results

    late, neighbour, other = use_workers(use, step_timeout_s=2.0)
    assert str(late) == f"{STEP} did not return within env.step_timeout_s=2"
    assert "its worker process was killed, because a call of another episode exceeded env.step_timeout_s=2" in str(
        neighbour
    )
    assert reply_text(other) == "b"


def test_an_async_step_that_waits_too_long_costs_its_episode_only() -> None:
    async def use(factory: EnvironmentFactory) -> None:
        late, neighbour = factory.make(), factory.make()
        for environment in (late, neighbour):
            await environment.reset(example())
        with pytest.raises(EpisodeError, match=r"AsyncNaughty\.step did not return within env\.step_timeout_s=2"):
            await late.step(turn("hang"))
        assert worker_of(late) is worker_of(neighbour)
        assert reply_text(await neighbour.step(turn("a"))) == "a"

    use_workers(use, "AsyncNaughty", environment_workers=1, step_timeout_s=2.0)


def test_a_left_task_that_blocks_the_worker_costs_its_worker_only(tmp_path: Path) -> None:
    path = tmp_path / "block"

    async def use(factory: EnvironmentFactory) -> list[Any]:
        environment, pool = factory.make(), pool_of(factory)
        await environment.reset(example())
        command = f"leave_blocking_task {path}"
        assert reply_text(await environment.step(turn(command))) == command
        worker = worker_of(environment)
        path.touch()
        pool.seconds = 0.5  # only now, since the other calls have to return
        await asyncio.to_thread(wait_for_exit, worker.pid)
        pool.seconds = 120.0
        with pytest.raises(EpisodeError, match=r"its event loop was blocked longer than env\.step_timeout_s=120$"):
            await environment.step(turn("a"))
        await environment.close()
        return await play(factory.make(), example(), "a")

    (step,) = use_workers(use, "AsyncNaughty", environment_workers=1, step_timeout_s=120.0)
    assert reply_text(step) == "a"


def test_a_worker_that_kills_itself_is_replaced() -> None:
    async def use(factory: EnvironmentFactory) -> list[Any]:
        return [
            await play(factory.make(), example(), "a", command) for command in ("die", "b", "kill_fork_server", "c")
        ]

    died, second, killed, last = use_workers(use, environment_workers=1)
    for steps in (died, killed):
        assert "its worker process died" in steps[1]
    assert [reply_text(steps[1]) for steps in (second, last)] == ["b", "c"]


def test_output_and_memory_of_a_step_are_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(factory: EnvironmentFactory) -> list[Any]:
        return [await play(factory.make(), example(), command, "a") for command in ("print", "grow")]

    printed, grown = use_workers(use, reward_memory_gib=1.0)
    assert [reply_text(step) for step in printed] == ["print", "a"]
    assert grown[0].startswith(f"{STEP}: MemoryError (user_environments.py:") and len(grown) == 1
    output, errors = capfd.readouterr()
    assert output == "" and errors.count("flood") == 20_000


def test_a_forked_child_answers_nothing_and_is_no_worker() -> None:
    async def use(factory: EnvironmentFactory) -> None:
        environment = factory.make()
        await environment.reset(example())
        child = int(reply_text(await environment.step(turn("fork"))))
        wait_for_exit(child)
        assert reply_text(await environment.step(turn("pid"))) == str(worker_of(environment).pid)

    use_workers(use, environment_workers=1)


def test_no_process_is_left_of_a_worker_or_of_the_run() -> None:
    async def use(factory: EnvironmentFactory) -> list[int]:
        environment, other = factory.make(), factory.make()
        for each in (environment, other):
            await each.reset(example())
        children = [int(reply_text(await each.step(turn("child")))) for each in (environment, other)]
        assert all(map(is_alive, children))
        with pytest.raises(EpisodeError, match="did not return"):
            await environment.step(turn("hang"))
        wait_for_exit(children[0])
        assert is_alive(children[1])
        return [children[1], worker_of(other).pid, pool_of(factory)._fork_server.process.pid]

    for pid in use_workers(use, step_timeout_s=2.0):
        wait_for_exit(pid)


def test_a_fork_server_that_nobody_asks_ends_without_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServerProcess(SERVE, env_config("Naughty"))
    assert server._handshake.poll(120)
    server.close()
    assert server.process.returncode == 0 and capfd.readouterr().err == ""


def test_no_process_survives_a_killed_run() -> None:
    command = [sys.executable, "-m", "tests.envs.killed_environments"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3 and all(map(is_alive, pids))
        process.kill()
    for pid in pids:
        wait_for_exit(pid)


def test_an_environment_that_only_loads_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.envs.user_environments as module

    monkeypatch.setattr(module, "Local", module.Counter, raising=False)
    with pytest.raises(ConfigError, match=r"Local: the environment cannot be loaded in a worker process: .*no 'Local'"):
        use_workers(lambda factory: factory.make().reset(example()), "Local")


def test_an_example_that_cannot_be_sent_is_an_error_of_its_episode() -> None:
    async def use(factory: EnvironmentFactory) -> None:
        with pytest.raises(EpisodeError, match=r"Naughty\.reset: the example cannot be sent to a worker process"):
            await factory.make().reset(example(lambda: None))
        (step,) = await play(factory.make(), example(), "a")
        assert reply_text(step) == "a"

    use_workers(use, environment_workers=1)


def test_calls_in_flight_end_with_the_run() -> None:
    async def use(factory: EnvironmentFactory) -> "asyncio.Task[Any]":
        environment = factory.make()
        await environment.reset(example())
        step = asyncio.ensure_future(environment.step(turn("hang")))
        await asyncio.sleep(0.1)
        await factory.close()
        with pytest.raises(EpisodeError, match="the run has ended"):
            await step
        return step

    use_workers(use, environment_workers=1)
