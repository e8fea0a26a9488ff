"""Tests of the engine loop: engine, reward services and groups in one asyncio loop."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from config.schema.errors import DeadlineError
from envs.group import SampledCompletion, Sampling
from envs.task import Completion, Example
from tests.log_capture import LogCapture
from tests.rollout.scripted_engine import ScriptedEngine, ScriptedRewardService
from tests.tiny_models import EOS, tiny_llama
from torchgrpo.rollout import engine_loop
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

EXAMPLE = Example((), "", 0)


def request(seed: int, n: int = 2, max_tokens: int = 12) -> Request:
    return Request(0, (5, 6, 7), n, Sampling(max_tokens=max_tokens), seed)


@contextmanager
def open_loop(engine: Any, timeout: float = 60.0, wait_timeout: float = 60.0) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, timeout, wait_timeout)
    yield loop
    loop.close()


def tokens(completions: list[SampledCompletion]) -> list[list[int]]:
    return [one.token_ids for one in completions]


def test_concurrent_requests_get_the_same_completions_as_alone() -> None:
    """The requests share one id, which the loop replaces by ids of its own."""
    requests = [request(1), request(2, max_tokens=4), request(11, n=3), request(12)]
    with open_loop(TransformersEngine(tiny_llama(), [EOS])) as loop:
        completions_of_requests = loop.run_all([loop.generate(one) for one in requests])
    for one, completions in zip(requests, completions_of_requests, strict=True):
        (alone,) = generate(TransformersEngine(tiny_llama(), [EOS]), [one])
        assert tokens(completions) == tokens(alone.completions)


def test_responses_to_cancelled_requests_are_dropped() -> None:
    engine = TransformersEngine(tiny_llama(), [EOS])

    async def give_up_the_second(loop: EngineLoop) -> list[SampledCompletion]:
        ours, theirs = (asyncio.ensure_future(loop.generate(request(seed))) for seed in (1, 2))
        await asyncio.sleep(0)
        assert engine.in_flight == 2
        theirs.cancel()
        return await ours

    with open_loop(engine) as loop:
        completions_of_requests = loop.run(give_up_the_second(loop))
        (alone,) = generate(TransformersEngine(tiny_llama(), [EOS]), [request(1)])
        assert tokens(completions_of_requests) == tokens(alone.completions)
        again = loop.run(loop.generate(request(2)))  # the engine may still hold the request of this seed
        (alone,) = generate(TransformersEngine(tiny_llama(), [EOS]), [request(2)])
        assert tokens(again) == tokens(alone.completions)
    assert engine.in_flight == 0


def test_a_response_at_the_moment_of_cancellation_is_dropped() -> None:
    engine = ScriptedEngine()

    async def give_up(loop: EngineLoop) -> None:
        ours, theirs = (asyncio.ensure_future(loop.generate(request(seed))) for seed in (1, 2))
        while not engine.timeouts:
            await asyncio.sleep(0)
        engine.answer(1)
        engine.answer(2)
        theirs.cancel()  # the task is cancelled only after the next step
        await ours

    with open_loop(engine) as loop:
        loop.run(give_up(loop))
    assert engine.in_flight == 0


def test_the_loop_waits_for_rewards_only_if_the_engine_is_idle() -> None:
    engine, grader = ScriptedEngine(), ScriptedRewardService(withheld=True)

    async def judged_beside(loop: EngineLoop) -> None:
        judging = asyncio.ensure_future(loop.make_scorer(grader)([Completion("")], [EXAMPLE]))
        drawing = asyncio.ensure_future(loop.generate(request(1)))
        while len(engine.timeouts) < 3:
            await asyncio.sleep(0)
        assert set(engine.timeouts) == {0.05}
        assert set(grader.timeouts) == {0.0}
        engine.answer(1)
        await drawing
        grader.timeouts.clear()
        while len(grader.timeouts) < 3:
            await asyncio.sleep(0)
        assert grader.timeouts[-1] == 0.05
        grader.release()
        await judging

    with open_loop(engine) as loop:
        loop.run(judged_beside(loop))


def test_nothing_is_stepped_or_polled_while_only_other_tasks_wait() -> None:
    """The loop awaits HTTP engines and tools without stepping or polling."""
    engine, grader = ScriptedEngine(), ScriptedRewardService()

    async def wait() -> str:
        await asyncio.sleep(0.05)
        return "there"

    with open_loop(engine) as loop:
        assert loop.run(wait()) == "there"
    assert engine.timeouts == grader.timeouts == []


def test_an_engine_without_progress_is_a_deadline_error() -> None:
    with (
        open_loop(ScriptedEngine(), timeout=0.05) as loop,
        pytest.raises(TimeoutError, match=r"the rollout waited 0 s \(inference_model\.request_timeout_s\) .* 2 req"),
    ):
        loop.run_all([loop.generate(request(1)), loop.generate(request(2))])


def test_the_time_of_a_call_does_not_count_as_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, skipped = ScriptedEngine(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped[0])
    monkeypatch.setattr(engine_loop, "time", clock)

    def skip_past_the_timeout() -> None:
        skipped[0] += 1000.0

    async def pushed_to(loop: EngineLoop) -> None:
        drawing = asyncio.ensure_future(loop.generate(request(1)))
        while not engine.timeouts:
            await asyncio.sleep(0)
        loop.call(skip_past_the_timeout)
        stepped = len(engine.timeouts)
        while len(engine.timeouts) < stepped + 3:
            await asyncio.sleep(0)
        engine.answer(1)
        await drawing

    with open_loop(engine, timeout=600.0) as loop:
        loop.run(pushed_to(loop))


class FailingEngine(ScriptedEngine):
    def step(self, timeout: float) -> list[Response]:
        raise self.error

    error: BaseException = ZeroDivisionError("in the engine")


@pytest.mark.parametrize("error", [ZeroDivisionError("in the engine"), KeyboardInterrupt()])
def test_an_engines_exception_reaches_the_caller_with_its_traceback(error: BaseException) -> None:
    engine = FailingEngine()
    engine.error = error
    with open_loop(engine) as loop:
        with pytest.raises(type(error)) as raised:
            loop.run_all([loop.generate(request(seed)) for seed in range(5)])
        names = [frame.name for frame in raised.traceback]
        assert names.count("step") == 1


class FailingRewardService(ScriptedRewardService):
    def poll(self, ticket: Any, timeout: float = 0.0) -> Any:
        raise ZeroDivisionError("in the reward")


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_reward_exception_ends_all_coroutines(in_thread: bool) -> None:
    with open_loop(ScriptedEngine()) as loop:
        failures: list[BaseException] = []
        loop.on_failure = failures.append
        score_completions = loop.make_scorer(FailingRewardService(withheld=True))

        def fail() -> None:
            with pytest.raises(ZeroDivisionError, match="in the reward"):
                loop.run_all([loop.generate(request(1)), score_completions([Completion("")], [EXAMPLE])])  # type: ignore[list-item, arg-type]

        if not in_thread:
            fail()
            return
        with loop.thread():
            fail()
            with pytest.raises(ZeroDivisionError):
                loop.call(lambda: None)
        assert len(failures) == 1


def test_a_thread_drives_it_and_ends() -> None:
    engine = TransformersEngine(tiny_llama(), [EOS])
    with open_loop(engine) as loop:
        with loop.thread():
            assert loop.call(lambda: threading.current_thread().name) == "rollouts"
            completions = loop.run(loop.generate(request(1)))
            with pytest.raises(KeyError):
                loop.call(lambda: {}["nothing"])
            with pytest.raises(DeadlineError, match="the coroutine's own"):
                loop.run(late())
        assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
        assert loop.call(lambda: threading.current_thread().name) != "rollouts"
        assert tokens(loop.run(loop.generate(request(1)))) == tokens(completions)


async def late() -> None:
    raise DeadlineError("the coroutine's own")


class HangingEngine(ScriptedEngine):
    """Engine whose first step hangs until the test sets `go`."""

    def __init__(self) -> None:
        super().__init__(version=0)
        self.hangs, self.go = threading.Event(), threading.Event()

    def step(self, timeout: float) -> list[Response]:
        self.hangs.set()
        self.go.wait(600)
        return super().step(timeout)


@pytest.mark.parametrize("method", ["call", "run"])
def test_a_hanging_thread_is_a_deadline_error(method: str) -> None:
    engine = HangingEngine()
    message = r"the learner waited 0 s \(train\.wait_timeout_s\) for the rollout thread.* 1 requests in flight"
    with open_loop(engine) as loop, loop.thread(), closing(asyncio.sleep(0)) as nothing:
        loop.call(lambda: loop.spawn(lambda: loop.generate(request(1))))  # type: ignore[arg-type]
        assert engine.hangs.wait(600)
        loop.wait_timeout = 0.3  # only now, since the call above has to succeed
        with pytest.raises(TimeoutError, match=message):
            loop.call(lambda: None) if method == "call" else loop.run(nothing)
        engine.go.set()


def test_a_failed_spawned_task_ends_coroutines_and_others_end_with_the_thread() -> None:
    ended: list[str] = []

    async def fail() -> None:
        raise ZeroDivisionError("in a group")

    async def go_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("here")

    async def spawn_and_wait(loop: EngineLoop) -> None:
        loop.spawn(fail)  # here, since a call that spawned it could end with the failure
        await asyncio.sleep(60)

    with open_loop(ScriptedEngine()) as loop:
        with loop.thread():
            loop.call(lambda: loop.spawn(go_on))
            with pytest.raises(ZeroDivisionError, match="in a group"):
                loop.run(spawn_and_wait(loop))
        assert ended == ["here"]


def test_ended_tasks_are_not_kept() -> None:
    async def end() -> None: ...

    with open_loop(ScriptedEngine()) as loop:
        for _ in range(3):
            loop.spawn(end)
        loop.run(asyncio.sleep(0.01))
        assert not loop._tasks


def test_the_first_failure_of_nested_task_groups_is_raised() -> None:
    """Callers and the command line expect plain exceptions, not exception groups."""
    failures: list[BaseException] = []

    async def fail(error: BaseException) -> None:
        raise error

    async def fail_in_group(error: BaseException) -> None:
        async with asyncio.TaskGroup() as inner:
            for coroutine in (asyncio.sleep(60), fail(error), fail(KeyError())):
                inner.create_task(coroutine)

    async def fail_in_nested_groups(error: BaseException) -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(fail_in_group(error))
            outer.create_task(asyncio.sleep(60))

    with open_loop(ScriptedEngine()) as loop:
        loop.on_failure = failures.append
        for error in (ZeroDivisionError("first"), DeadlineError("first")):
            with pytest.raises(type(error), match="first"):
                loop.run(fail_in_nested_groups(error))
        loop.spawn(lambda: fail_in_nested_groups(ZeroDivisionError("spawned")))
        with pytest.raises(ZeroDivisionError, match="spawned"):
            loop.run(asyncio.sleep(60))
    assert [str(error) for error in failures] == ["spawned"]


def test_other_tasks_progress_between_short_steps() -> None:
    """A timer and a socket are served about every millisecond, whatever the number of steps."""
    engine = ScriptedEngine()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    async def exchange_with_server() -> bytes:
        drawing = asyncio.ensure_future(loop.generate(request(1)))
        async with asyncio.timeout(30), await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await asyncio.sleep(0.01)
            writer.write(b"what\n")
            answer = await reader.readline()
            writer.close()
        engine.answer(1)
        await drawing
        return answer

    with open_loop(engine) as loop:
        assert loop.run(exchange_with_server()) == b"what\n"
    assert len(engine.timeouts) > 3


def test_the_engine_is_stepped_once_per_pass_of_asyncio() -> None:
    """The number of engine steps for a follow-up request is independent of the clock."""
    engine, steps = ScriptedEngine(), []

    async def passing(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def hop() -> None:
        drawing = asyncio.ensure_future(loop.generate(request(1)))
        await passing(3)
        for count in (1, 5, 20):
            before = len(engine.timeouts)
            await passing(count)
            steps.append(len(engine.timeouts) - before)
        engine.answer(1)
        await drawing

    with open_loop(engine) as loop:
        loop.run(hop())
    assert steps == [1, 5, 20]


def test_a_wake_up_just_before_the_sleep_is_not_lost() -> None:
    looks: list[float] = []

    with open_loop(ScriptedEngine()) as loop:

        def look() -> None:
            looks.append(time.monotonic())
            if len(looks) == 1:
                other = threading.Thread(target=loop.wake)
                other.start()
                other.join()

        loop.before_step = look
        loop.run(asyncio.sleep(0.01))
        assert len(looks) == 2
        loop.run(asyncio.sleep(0.01))
        assert len(looks) == 2, "it sleeps"
        loop.wake()
        loop.run(asyncio.sleep(0.01))
        assert len(looks) == 3


def test_a_task_that_refuses_to_end_is_left_behind(monkeypatch: pytest.MonkeyPatch, log_capture: LogCapture) -> None:
    monkeypatch.setattr(engine_loop, "_STOP_TIMEOUT_S", 0.2)
    loop = EngineLoop(ScriptedEngine(), timeout=600.0, wait_timeout=600.0)

    async def refuse() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()

    loop.spawn(refuse)
    loop.run(asyncio.sleep(0))  # starts the task
    loop.close()
    assert any("1 tasks do not end" in message for message in log_capture.messages)


def test_no_pump_starts_in_a_closing_loop(log_capture: LogCapture) -> None:
    EngineLoop(ScriptedEngine(), timeout=600.0, wait_timeout=600.0).close()
    gc.collect()
    assert "EngineLoop._pump" not in log_capture.text
