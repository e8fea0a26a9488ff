"""What is given goes on at once, and nothing else does."""

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from rollout.asyncio_loop import GivingLoop

WHOSE: ContextVar[str] = ContextVar("WHOSE", default="nobody's")


@pytest.fixture
def loop() -> Iterator[GivingLoop]:
    made = GivingLoop()
    yield made
    made.close()


def passes(loop: GivingLoop, count: int = 1) -> None:
    for _ in range(count):
        loop.call_soon(loop.stop)
        loop.run_forever()


def in_loop(loop: GivingLoop, *functions: object) -> None:
    """Call them one after the other where no task runs."""
    for function in functions:
        loop.call_soon(function)  # type: ignore[arg-type]
    passes(loop)


def test_the_task_goes_on_up_to_its_next_await_before_give_returns(loop: GivingLoop) -> None:
    told: list[object] = []
    first, second = loop.create_future(), loop.create_future()

    async def wait_for_both() -> None:
        WHOSE.set("its own")
        told.append(await first)
        told.append((await second, WHOSE.get()))

    task = loop.create_task(wait_for_both())
    passes(loop)
    in_loop(loop, lambda: (loop.give(first, 1), told.append("given")))
    in_loop(loop, lambda: (loop.give(second, 2), told.append("given")))
    assert told == [1, "given", (2, "its own"), "given"]
    assert task.done()
    assert WHOSE.get() == "nobody's"


def test_what_a_task_begins_meanwhile_waits_for_the_next_pass(loop: GivingLoop) -> None:
    told: list[str] = []
    future = loop.create_future()

    async def child() -> None:
        told.append("child")

    async def parent() -> None:
        await future
        begun = asyncio.ensure_future(child())
        told.append("parent")
        await begun
        told.append("parent again")

    loop.create_task(parent())
    passes(loop)
    in_loop(loop, lambda: (loop.give(future, None), told.append("given")))
    assert told == ["parent", "given"]
    passes(loop, 3)
    assert told == ["parent", "given", "child", "parent again"]


def test_of_two_tasks_that_await_it_one_goes_on_at_once_and_none_is_forgotten(loop: GivingLoop) -> None:
    future, told = loop.create_future(), []

    async def wait(name: str) -> None:
        told.append((name, await future))

    for name in "ab":
        loop.create_task(wait(name))
    passes(loop)
    in_loop(loop, lambda: (loop.give(future, 3), told.append("given")))
    passes(loop)
    assert told == [("a", 3), "given", ("b", 3)]


def test_a_result_that_nobody_awaits_yet_is_kept_and_the_next_call_is_not_taken_for_its_task(
    loop: GivingLoop,
) -> None:
    future, told = loop.create_future(), []
    in_loop(loop, lambda: (loop.give(future, 4), loop.call_soon(told.append, "soon"), told.append("given")))
    passes(loop)
    assert told == ["given", "soon"]

    async def wait() -> int:
        return await future  # type: ignore[no-any-return]

    assert loop.run_until_complete(wait()) == 4


def test_a_task_that_was_cancelled_gets_nothing(loop: GivingLoop) -> None:
    future, told = loop.create_future(), []

    async def wait() -> None:
        try:
            await future
        finally:
            told.append("ended")

    task = loop.create_task(wait())
    passes(loop)
    in_loop(loop, task.cancel, lambda: loop.give(future, 5))
    passes(loop)
    assert told == ["ended"]
    assert task.cancelled()


def test_what_ends_a_process_leaves_give_and_the_loop_stays_as_it_is(loop: GivingLoop) -> None:
    future = loop.create_future()

    async def interrupted() -> None:
        await future
        raise KeyboardInterrupt

    task = loop.create_task(interrupted())
    passes(loop)
    loop.call_soon(loop.give, future, None)
    with pytest.raises(KeyboardInterrupt):
        passes(loop)
    assert isinstance(task.exception(), KeyboardInterrupt)
    told: list[str] = []
    in_loop(loop, lambda: loop.call_soon(told.append, "soon"), lambda: told.append("first"))
    passes(loop)
    assert told == ["first", "soon"]


def test_it_tells_of_what_comes_into_its_queue(loop: GivingLoop) -> None:
    future = loop.create_future()

    async def wait() -> None:
        await future

    task = loop.create_task(wait())
    passes(loop, 2)
    loop.due = False
    loop.call_later(60, lambda: None)
    assert not loop.due, "a timer is no entry of the queue"
    loop.call_soon_threadsafe(lambda: None)
    assert loop.due
    passes(loop, 2)

    found: list[bool] = []
    loop.due = False
    future.add_done_callback(lambda future: None)
    loop.call_soon(lambda: (setattr(loop, "due", False), loop.give(future, None), found.append(loop.due)))
    passes(loop, 2)
    assert found == [True], "its second callback is in the queue"
    assert task.done()
