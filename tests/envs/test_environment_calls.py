"""Tests of calls of user functions: deadlines, exceptions of every kind, and blocked event loops."""

import asyncio
import os
import re
import threading
import time
from typing import Any

import pytest

from envs.environments.calls import CallRunner
from envs.environments.interface import Environment, EpisodeError
from envs.environments.make import EnvironmentFactory
from envs.environments.user_environment import ClassEnvironment
from envs.user_calls import BlockingCalls, DaemonThread, wait_for_future
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
from tests.log_capture import LogCapture

KINDS = ["Naughty", "AsyncNaughty"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [
    "ValueError", "SystemExit", "KeyboardInterrupt", "CancelledError", "StopIteration", "GeneratorExit", "Unprintable",
])  # fmt: skip
@pytest.mark.parametrize("workers", [None, 1])
def test_every_exception_ends_only_its_episode(kind: str, error: str, workers: int | None) -> None:
    if kind == "AsyncNaughty" and error == "KeyboardInterrupt":
        pytest.skip("in the loop's thread it may be the user's own interrupt")

    async def use(factory: EnvironmentFactory) -> Any:
        return await asyncio.gather(
            play(factory.make(), example(), "hello", f"raise {error}"), play(factory.make(), example(), "a", "b")
        )

    failed, other = run_with_factory(env_config(kind, environment_workers=workers), use)
    assert len(failed) == 2 and failed[1].startswith(f"{MODULE}:{kind}.step: ") and error in failed[1]
    assert [reply_text(step) for step in other] == ["a", "b"]


@pytest.mark.parametrize("workers", [None, 1])
def test_a_result_that_fails_when_it_is_read_ends_only_its_episode(workers: int | None) -> None:
    async def use(factory: EnvironmentFactory) -> Any:
        return [await play(factory.make(), example(), command) for command in ("number", "key", "a")]

    number, key, other = run_with_factory(env_config("Naughty", environment_workers=workers), use)
    assert re.search(r"Naughty\.step: .*SystemExit", number[0])
    assert "Naughty.step: tool_call_id of the message is {" in key[0]
    assert reply_text(other[0]) == "a"


@pytest.mark.parametrize("workers", [None, 1])
def test_a_step_that_cancels_its_own_task_ends_only_its_episode(workers: int | None) -> None:
    (message,) = play_once(env_config("AsyncNaughty", environment_workers=workers), example(), "cancel")
    assert message == f"{MODULE}:AsyncNaughty.step cancelled its own task"


def test_an_error_in_reset_names_its_place() -> None:
    (message,) = play_once(env_config("Naughty"), example("fail in reset"))
    assert message.startswith(f"{MODULE}:Naughty.reset: KeyError: 'no such level' (user_environments.py:")


@pytest.mark.parametrize(
    ("kind", "command"), [("Naughty", "hang"), ("AsyncNaughty", "hang"), ("AsyncNaughty", "refuse")]
)
def test_a_call_beyond_its_deadline_ends_its_episode(kind: str, command: str) -> None:
    async def step_late(environment: Environment) -> str:
        await environment.reset(example())
        assert isinstance(environment, ClassEnvironment) and environment.runner.seconds == 600.0
        environment.runner.seconds = 0.3  # only now, since the reset and the neighbour may be slow
        with pytest.raises(EpisodeError) as raised:
            await environment.step(turn(command))
        await environment.close()
        return str(raised.value)

    async def use(factory: EnvironmentFactory) -> Any:
        return await asyncio.gather(step_late(factory.make()), play(factory.make(), example(), *["a"] * 20))

    message, others = run_with_factory(env_config(kind, step_timeout_s=600.0), use)
    assert message == f"{MODULE}:{kind}.step did not return within env.step_timeout_s=0.3"
    assert len(others) == 20


def test_a_cancelled_call_is_cancelled() -> None:
    cancelled = []

    async def function() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def use() -> None:
        runner = CallRunner(600.0, BlockingCalls(), None)
        task = asyncio.ensure_future(runner.call("f", function, read=str))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(use())
    assert cancelled == [True]


def test_a_pause_of_the_loop_does_not_count() -> None:
    async def use() -> bool:
        task = asyncio.ensure_future(asyncio.sleep(1.5))
        waiting = asyncio.ensure_future(wait_for_future(task, 0.2))
        await asyncio.sleep(0)
        time.sleep(2.5)  # as between two collections of a run
        return await waiting

    assert asyncio.run(use())


@pytest.mark.parametrize("never_returns", [False, True])
def test_a_function_that_blocks_the_loop_is_named_once(never_returns: bool, log_capture: LogCapture) -> None:
    observer, has_named = BlockingCalls(seconds=0.05), threading.Event()

    async def blocks() -> None:
        deadline = time.monotonic() + 300
        while "blocks the event loop" not in log_capture.text and time.monotonic() < deadline:
            time.sleep(0.01)
        has_named.set()

    async def use() -> None:
        runner = CallRunner(600.0, observer, None)
        for _ in range(2):
            await runner.call("game:Chess.step", blocks, read=str)

    if not never_returns:
        observer.thread = threading.Thread()  # only the look at the end of a call remains

        async def blocks() -> None:
            time.sleep(0.2)

    asyncio.run(use())
    observer.close()
    assert has_named.is_set() == never_returns
    assert log_capture.text.count("game:Chess.step blocks the event loop for more than 0.05 s") == 1
    assert "write def instead of async def" in log_capture.text


def test_a_forked_child_does_not_continue_the_run() -> None:
    for kind in KINDS:
        (step,) = play_once(env_config(kind), example(), "fork")
        pid, status = os.waitpid(int(reply_text(step)), 0)
        assert pid and os.waitstatus_to_exitcode(status) == 0


def test_a_thread_ends_with_its_environment() -> None:
    before = threading.active_count()
    thread = DaemonThread("environment")

    async def use() -> int:
        results = [await thread.submit(threading.get_ident) for _ in range(3)]
        _, error = await thread.submit(lambda: 1 / 0)
        assert isinstance(error, ZeroDivisionError)
        return len(set(results))

    assert asyncio.run(use()) == 1
    assert threading.active_count() == before + 1
    thread.stop()
    assert thread.thread is not None
    thread.thread.join(300)
    assert threading.active_count() == before


def test_an_error_of_the_deadline_is_an_error_of_the_episode() -> None:
    async def use() -> None:
        await CallRunner(0.01, BlockingCalls(), None).call("f", asyncio.sleep, 600, read=str)

    with pytest.raises(EpisodeError, match=r"f did not return within env\.step_timeout_s=0\.01"):
        asyncio.run(use())
