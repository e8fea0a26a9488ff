"""Tests of tasks that wait outside the engine, on a virtual clock."""

import asyncio
from collections.abc import Iterator

import pytest

from envs.group import Sampling
from envs.task import Completion, Example
from tests.rollout.scripted_engine import ScriptedEngine, ScriptedRewardService
from tests.rollout.virtual_clock import VirtualClock, VirtualEngine, VirtualEpisodes
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request

REQUEST = Request(0, (), 1, Sampling(), seed=0)


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    """Clock of all loops that the test makes."""
    clock = VirtualClock()
    with clock.loops():
        yield clock


def open_loop(engine: object) -> EngineLoop:
    return EngineLoop(engine, timeout=1e9, wait_timeout=1e9)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_remote", [False, True], ids=["process", "pool"])
@pytest.mark.parametrize("step_s", [0.005, 0.02])
def test_episodes_take_little_longer_than_their_waits_and_turns(is_remote: bool, step_s: float) -> None:
    episodes = VirtualEpisodes(512, step_s, is_remote=is_remote, rounds=2)
    episodes.run()
    assert len(episodes.shares) == 1024
    assert 0.95 <= episodes.mean_share <= max(episodes.shares) <= 1 + 1e-6


async def sleep_alone(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def sleep_in_a_task(seconds: float) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(sleep_alone(seconds))


@pytest.mark.parametrize("sleep", [sleep_alone, sleep_in_a_task])
def test_a_due_timer_continues_its_task_before_the_next_step(clock: VirtualClock, sleep: object) -> None:
    """A step takes 5 ms: a sleep of 12 ms ends with the third."""
    engine = VirtualEngine(clock, step_s=0.005, tokens=20, is_remote=False)
    loop, steps_at_end = open_loop(engine), []

    async def sleep_beside_the_engine() -> None:
        sampling = asyncio.ensure_future(loop.generate(REQUEST))
        with loop.outside_engine():
            await sleep(0.012)  # type: ignore[operator]
        steps_at_end.append(engine.steps)
        await sampling

    loop.run(sleep_beside_the_engine())
    loop.close()
    assert steps_at_end == [3]
    assert engine.steps == 20


def test_a_step_of_a_pool_waits_two_milliseconds_only_while_a_task_waits_outside(clock: VirtualClock) -> None:
    engine = VirtualEngine(clock, step_s=0.01, tokens=100, is_remote=True)
    loop, counts = open_loop(engine), []

    async def count_steps() -> None:
        sampling = asyncio.ensure_future(loop.generate(REQUEST))
        with loop.outside_engine():
            await asyncio.sleep(0.5)
        counts.append(engine.steps)
        await sampling
        counts.append(engine.steps)

    loop.run(count_steps())
    loop.close()
    assert clock.seconds == pytest.approx(1.0)
    assert counts == [pytest.approx(250, abs=1), pytest.approx(260, abs=2)]


def test_a_poll_of_the_rewards_is_short_while_a_task_waits_outside() -> None:
    grader = ScriptedRewardService(withheld=True)
    loop = open_loop(ScriptedEngine())

    async def wait_beside_the_rewards() -> None:
        scoring = asyncio.ensure_future(loop.make_scorer(grader)([Completion("")], [Example((), "", 0)]))
        with loop.outside_engine():
            while len(grader.timeouts) < 3:
                await asyncio.sleep(0)
        short, longer = len(grader.timeouts), len(grader.timeouts) + 3
        while len(grader.timeouts) < longer:
            await asyncio.sleep(0)
        grader.release()
        await scoring
        assert set(grader.timeouts[:short]) == {0.002}
        assert set(grader.timeouts[short:longer]) == {0.05}

    loop.run(wait_beside_the_rewards())
    loop.close()


def test_nothing_runs_while_all_tasks_wait_outside(clock: VirtualClock) -> None:
    engine = VirtualEngine(clock, step_s=0.005, tokens=4, is_remote=True)
    loop, turns = open_loop(engine), []
    loop.before_step = lambda: turns.append(clock.seconds)

    async def wait_between_turns() -> None:
        await loop.generate(REQUEST)
        turns.clear()
        with loop.outside_engine():
            await asyncio.sleep(1000.0)
        assert len(turns) <= 1
        await loop.generate(REQUEST)

    loop.run(wait_between_turns())
    loop.close()
    assert clock.seconds == pytest.approx(1000.04, abs=0.005)
