"""The loop that engines, graders and groups share: who gets what, who waits for whom, and how it ends."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from config.schema.errors import DeadlineError
from envs.group import SampledCompletion, Sampling
from envs.task import Completion, Example
from tests.rollout.scripted import ScriptedEngine, ScriptedGrader
from tests.tiny import EOS, tiny_llama
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

EXAMPLE = Example((), "", 0)


def request(seed: int, n: int = 2, max_tokens: int = 12) -> Request:
    return Request(0, (5, 6, 7), n, Sampling(max_tokens=max_tokens), seed)


@contextmanager
def looped(engine: Any, timeout: float = 60.0, wait_timeout: float = 60.0) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, timeout, wait_timeout)
    yield loop
    loop.close()


def tokens(completions: list[SampledCompletion]) -> list[list[int]]:
    return [one.token_ids for one in completions]


def test_each_request_gets_its_own_completions_and_those_it_would_have_got_alone() -> None:
    """All of one id, which two users of the engine may give: the loop gives them others."""
    asked = [request(1), request(2, max_tokens=4), request(11, n=3), request(12)]
    with looped(TransformersEngine(tiny_llama(), [EOS])) as loop:
        found = loop.run_all([loop.generate(one) for one in asked])
    for one, completions in zip(asked, found, strict=True):
        (alone,) = generate(TransformersEngine(tiny_llama(), [EOS]), [one])
        assert tokens(completions) == tokens(alone.completions)


def test_what_is_given_up_is_dropped() -> None:
    engine = TransformersEngine(tiny_llama(), [EOS])

    async def give_up_the_second(loop: EngineLoop) -> list[SampledCompletion]:
        ours, theirs = (asyncio.ensure_future(loop.generate(request(seed))) for seed in (1, 2))
        await asyncio.sleep(0)
        assert engine.in_flight == 2
        theirs.cancel()
        return await ours

    with looped(engine) as loop:
        found = loop.run(give_up_the_second(loop))
        (alone,) = generate(TransformersEngine(tiny_llama(), [EOS]), [request(1)])
        assert tokens(found) == tokens(alone.completions)
        again = loop.run(loop.generate(request(2)))  # the engine may still hold the one of this seed
        (alone,) = generate(TransformersEngine(tiny_llama(), [EOS]), [request(2)])
        assert tokens(again) == tokens(alone.completions)
    assert engine.in_flight == 0


def test_an_answer_to_what_is_given_up_in_the_same_moment_is_dropped() -> None:
    engine = ScriptedEngine()

    async def give_up(loop: EngineLoop) -> None:
        ours, theirs = (asyncio.ensure_future(loop.generate(request(seed))) for seed in (1, 2))
        while not engine.timeouts:
            await asyncio.sleep(0)
        engine.answer(1)
        engine.answer(2)
        theirs.cancel()  # it learns of that after the next step
        await ours

    with looped(engine) as loop:
        loop.run(give_up(loop))
    assert engine.in_flight == 0


def test_it_waits_for_the_engine_and_only_without_one_for_the_graders() -> None:
    engine, grader = ScriptedEngine(), ScriptedGrader(withheld=True)

    async def judged_beside(loop: EngineLoop) -> None:
        judging = asyncio.ensure_future(loop.judge(grader)([Completion("")], [EXAMPLE]))
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

    with looped(engine) as loop:
        loop.run(judged_beside(loop))


def test_with_nothing_pending_others_have_the_loop() -> None:
    """An HTTP engine or a tool is awaited as anything is; nobody steps or polls meanwhile."""
    engine, grader = ScriptedEngine(), ScriptedGrader()

    async def wait() -> str:
        await asyncio.sleep(0.05)
        return "there"

    with looped(engine) as loop:
        assert loop.run(wait()) == "there"
    assert engine.timeouts == grader.timeouts == []


def test_a_silent_engine_is_named() -> None:
    with (
        looped(ScriptedEngine(), timeout=0.05) as loop,
        pytest.raises(
            TimeoutError, match=r"the rollout waited 0 s \(inference_model\.request_timeout_s\) .* 2 req"
        ),
    ):
        loop.run_all([loop.generate(request(1)), loop.generate(request(2))])


def test_the_time_of_a_call_is_not_the_engines() -> None:
    engine = ScriptedEngine()

    async def pushed_to(loop: EngineLoop) -> None:
        drawing = asyncio.ensure_future(loop.generate(request(1)))
        while not engine.timeouts:
            await asyncio.sleep(0)
        loop.call(lambda: time.sleep(0.5))
        stepped = len(engine.timeouts)
        while len(engine.timeouts) < stepped + 3:
            await asyncio.sleep(0)
        engine.answer(1)
        await drawing

    with looped(engine, timeout=0.4) as loop:
        loop.run(pushed_to(loop))


class Broken(ScriptedEngine):
    def step(self, timeout: float) -> list[Response]:
        raise self.error

    error: BaseException = ZeroDivisionError("in the engine")


@pytest.mark.parametrize("error", [ZeroDivisionError("in the engine"), KeyboardInterrupt()])
def test_what_an_engine_raises_reaches_the_caller_with_its_traceback(error: BaseException) -> None:
    engine = Broken()
    engine.error = error
    with looped(engine) as loop:
        with pytest.raises(type(error)) as raised:
            loop.run_all([loop.generate(request(seed)) for seed in range(5)])
        names = [frame.name for frame in raised.traceback]
        assert names.count("step") == 1


class BrokenGrader(ScriptedGrader):
    def poll(self, ticket: Any, timeout: float = 0.0) -> Any:
        raise ZeroDivisionError("in the reward")


@pytest.mark.parametrize("threaded", [False, True])
def test_what_a_grader_raises_ends_all_that_runs(threaded: bool) -> None:
    with looped(ScriptedEngine()) as loop:
        told: list[BaseException] = []
        loop.on_failure = told.append
        judge = loop.judge(BrokenGrader(withheld=True))

        def fail() -> None:
            with pytest.raises(ZeroDivisionError, match="in the reward"):
                loop.run_all([loop.generate(request(1)), judge([Completion("")], [EXAMPLE])])  # type: ignore[list-item, arg-type]

        if not threaded:
            fail()
            return
        with loop.thread():
            fail()
            with pytest.raises(ZeroDivisionError):
                loop.call(lambda: None)
        assert len(told) == 1


def test_a_thread_drives_it_and_ends() -> None:
    engine = TransformersEngine(tiny_llama(), [EOS])
    with looped(engine) as loop:
        with loop.thread():
            assert loop.call(lambda: threading.current_thread().name) == "rollouts"
            found = loop.run(loop.generate(request(1)))
            with pytest.raises(KeyError):
                loop.call(lambda: {}["nothing"])
            with pytest.raises(DeadlineError, match="the coroutine's own"):
                loop.run(late())
        assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
        assert loop.call(lambda: threading.current_thread().name) != "rollouts"
        assert tokens(loop.run(loop.generate(request(1)))) == tokens(found)


async def late() -> None:
    raise DeadlineError("the coroutine's own")


class Hanging(ScriptedEngine):
    """Its steps last until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(version=0)
        self.hangs, self.go = threading.Event(), threading.Event()

    def step(self, timeout: float) -> list[Response]:
        self.hangs.set()
        self.go.wait(600)
        return super().step(timeout)


@pytest.mark.parametrize("what", ["call", "run"])
def test_a_thread_that_hangs_is_named(what: str) -> None:
    engine = Hanging()
    told = r"the learner waited 0 s \(train\.wait_timeout_s\) for the rollout thread.* 1 requests in flight"
    with looped(engine, wait_timeout=0.3) as loop, loop.thread(), closing(asyncio.sleep(0)) as nothing:
        loop.call(lambda: loop.spawn(lambda: loop.generate(request(1))))  # type: ignore[arg-type]
        assert engine.hangs.wait(600)
        with pytest.raises(TimeoutError, match=told):
            loop.call(lambda: None) if what == "call" else loop.run(nothing)
        engine.go.set()


def test_a_spawned_task_that_fails_ends_what_runs_and_those_left_end_with_the_thread() -> None:
    ended: list[str] = []

    async def fail() -> None:
        raise ZeroDivisionError("in a group")

    async def go_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("here")

    with looped(ScriptedEngine()) as loop:
        with loop.thread():
            loop.call(lambda: loop.spawn(go_on))
            loop.call(lambda: loop.spawn(fail))
            with pytest.raises(ZeroDivisionError, match="in a group"):
                loop.run(asyncio.sleep(60))
        assert ended == ["here"]


def test_ended_tasks_are_not_kept() -> None:
    async def end() -> None: ...

    with looped(ScriptedEngine()) as loop:
        for _ in range(3):
            loop.spawn(end)
        loop.run(asyncio.sleep(0.01))
        assert not loop._tasks


def test_of_task_groups_that_fail_the_first_failure_is_raised_itself() -> None:
    """Whoever catches a failure, and the command line, know plain ones."""
    told: list[BaseException] = []

    async def fail(error: BaseException) -> None:
        raise error

    async def inside(error: BaseException) -> None:
        async with asyncio.TaskGroup() as inner:
            for coroutine in (asyncio.sleep(60), fail(error), fail(KeyError())):
                inner.create_task(coroutine)

    async def nested(error: BaseException) -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(inside(error))
            outer.create_task(asyncio.sleep(60))

    with looped(ScriptedEngine()) as loop:
        loop.on_failure = told.append
        for error in (ZeroDivisionError("first"), DeadlineError("first")):
            with pytest.raises(type(error), match="first"):
                loop.run(nested(error))
        loop.spawn(lambda: nested(ZeroDivisionError("spawned")))
        with pytest.raises(ZeroDivisionError, match="spawned"):
            loop.run(asyncio.sleep(60))
    assert [str(error) for error in told] == ["spawned"]


def test_engines_without_anything_to_do_are_idle() -> None:
    engine = ScriptedEngine()
    engine.answer(1)
    with looped(engine) as loop, loop.thread():
        loop.run(loop.generate(request(1)))
        loop.call(lambda: None)
        loop.idle.share()
        time.sleep(0.05)
        assert loop.idle.share() > 0.9
        loop.call(lambda: (loop.idle.share(), time.sleep(0.05)))
        assert loop.idle.share() < 0.9


def test_what_is_awaited_beside_goes_on_while_steps_are_short() -> None:
    """A timer and a socket are looked at about every millisecond, however many steps that are."""
    engine = ScriptedEngine()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    async def ask() -> bytes:
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

    with looped(engine) as loop:
        assert loop.run(ask()) == b"what\n"
    assert len(engine.timeouts) > 3


def test_it_is_stepped_once_a_pass_while_asyncio_has_anything_to_do() -> None:
    """So what comes of a completion by several passes is there after as many steps, whatever the clock says."""
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

    with looped(engine) as loop:
        loop.run(hop())
    assert steps == [1, 5, 20]


def test_a_wake_up_that_comes_when_it_has_looked_and_does_not_sleep_yet_is_not_lost() -> None:
    looks: list[float] = []

    with looped(ScriptedEngine()) as loop:

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
