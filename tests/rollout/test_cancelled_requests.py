"""Tests that cancelled requests leave their engine and change no other request."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from envs.group import SampledCompletion, Sampling
from tests.rollout.conftest import OpenPool, StartEngine, drain
from tests.rollout.gated_engine import GatedEngine
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.test_prefill import windows
from tests.tiny_models import EOS, tiny_llama
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.continuous_batching_decoder import ContinuousBatchingDecoder
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.generate_decoder import GenerateDecoder
from torchgrpo.rollout.engines.interface import Engine, Request, Response, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

DEADLINE_S = 300.0


def make_requests(count: int) -> list[Request]:
    """Makes requests of different lengths and numbers of completions."""
    return [
        Request(i, tuple(range(5, 8 + i % 5)), 1 + i % 3, Sampling(max_tokens=8 + 3 * i), seed=100 + i)
        for i in range(count)
    ]


def token_ids(responses: list[Response]) -> dict[int, list[list[int]]]:
    return {response.request_id: [one.token_ids for one in response.completions] for response in responses}


def run_with_cancellations(engine: Engine, requests: list[Request], cancel_steps: dict[int, int]) -> list[Response]:
    """Runs requests and cancels some.

    cancel_steps: by request id, the number of steps before its cancellation.
    """
    for request in requests:
        engine.submit(request)
    responses: list[Response] = []
    steps = 0
    while engine.in_flight or max(cancel_steps.values()) >= steps:
        for request_id, step in cancel_steps.items():
            if step == steps:
                before = engine.in_flight
                engine.cancel(request_id)
                engine.cancel(request_id)  # has no further effect
                assert engine.in_flight == before - 1
        responses += engine.step(timeout=1.0)
        steps += 1
    return responses


# --- in the loop -------------------------------------------------------------------------------------------


def make_loop(engine: object) -> EngineLoop:
    return EngineLoop(engine, timeout=DEADLINE_S, wait_timeout=DEADLINE_S)  # type: ignore[arg-type]


def test_a_cancelled_generate_removes_its_request_from_the_engine() -> None:
    engine = TransformersEngine(tiny_llama(), [])
    first, second = make_requests(2)
    loop = make_loop(engine)

    async def cancel_the_second() -> list[SampledCompletion]:
        ours, theirs = (asyncio.ensure_future(loop.generate(one)) for one in (first, second))
        while not (isinstance(engine.decoder, ContinuousBatchingDecoder) and len(engine.decoder._rows) == 3):
            await asyncio.sleep(0)
        theirs.cancel()
        await asyncio.wait([theirs])
        assert theirs.cancelled()
        assert engine.in_flight == 1
        assert len(engine.decoder._rows) == first.n
        return await ours

    completions = loop.run(cancel_the_second())
    (alone,) = generate(TransformersEngine(tiny_llama(), []), [first])
    assert [one.token_ids for one in completions] == [one.token_ids for one in alone.completions]
    loop.close()


def test_an_engine_whose_requests_are_all_cancelled_is_idle() -> None:
    engine = ScriptedEngine()
    loop = make_loop(engine)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await loop.generate(make_requests(1)[0])
        assert engine.in_flight == 0
        assert len(engine.cancelled_ids) == 1
        steps = len(engine.timeouts)
        await asyncio.sleep(0.01)
        assert len(engine.timeouts) == steps
        loop.idle_clock.share()
        await asyncio.sleep(0.01)
        assert loop.idle_clock.share() > 0.99

    loop.run(give_up())
    loop.close()


def test_a_failed_engine_is_not_called_again() -> None:
    class FailingEngine(ScriptedEngine):
        def step(self, timeout: float) -> list[Response]:
            raise ZeroDivisionError("in the engine")

    engine = FailingEngine()
    loop = make_loop(engine)
    with pytest.raises(ZeroDivisionError):
        loop.run_all([loop.generate(one) for one in make_requests(3)])
    loop.close()
    assert engine.cancelled_ids == []


def test_the_end_of_the_thread_cancels_requests_of_its_tasks() -> None:
    engine = ScriptedEngine()
    loop = make_loop(engine)

    async def sample() -> None:
        await loop.generate(make_requests(1)[0])

    with loop.thread():
        loop.call(lambda: loop.spawn(sample))
        while not engine.timeouts:
            time.sleep(0.001)
    assert engine.in_flight == 0
    loop.close()


# --- transformers ------------------------------------------------------------------------------------------


def test_rows_of_other_requests_continue_unchanged() -> None:
    """Requests are cancelled while they wait, run, and after others have ended."""
    requests = make_requests(9)
    cancel_steps = {8: 0, 1: 3, 4: 3, 5: 14, 7: 20}
    engine = TransformersEngine(tiny_llama(), [EOS], max_num_seqs=12)
    responses = run_with_cancellations(engine, requests, cancel_steps)
    expected = token_ids(generate(TransformersEngine(tiny_llama(), [EOS], max_num_seqs=12), requests))
    assert token_ids(responses) == {one: ids for one, ids in expected.items() if one not in cancel_steps}
    assert isinstance(engine.decoder, ContinuousBatchingDecoder)
    assert engine.decoder._cache.cohorts == []


@pytest.mark.parametrize("update", ["keep", "wait"])
def test_requests_that_a_push_interrupted_or_finished_are_cancelled(update: str) -> None:
    engine = TransformersEngine(tiny_llama(), [], update=update)
    requests = make_requests(3)
    for request in requests:
        engine.submit(request)
    for _ in range(2):
        engine.step()
    engine.load(tiny_llama().state_dict().items(), version=1)
    engine.cancel(1)
    assert engine.in_flight == 2
    assert sorted(token_ids(drain(engine))) == [0, 2]


def test_a_request_that_waits_for_generate_is_cancelled() -> None:
    """`generate` finishes the requests of a step; only waiting requests can be cancelled."""
    engine = TransformersEngine(windows(), [EOS], max_num_seqs=4)
    assert isinstance(engine.decoder, GenerateDecoder)
    requests = [replace(one, prompt=(5, 6, 7)) for one in make_requests(5)]
    responses = run_with_cancellations(engine, requests, {4: 0, 2: 1})  # one without a step, one after it
    expected = token_ids(generate(TransformersEngine(windows(), [EOS], max_num_seqs=4), requests))
    assert token_ids(responses) == {one: expected[one] for one in (0, 1, 3)}


# --- vLLM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["keep", "abort"])
def test_vllm_aborts_a_cancelled_request(start_engine: StartEngine, update: str) -> None:
    engine = start_engine(update=update)
    requests = make_requests(6)
    expected = token_ids(generate(engine, requests))
    responses = run_with_cancellations(engine, requests, {1: 0, 2: 3, 5: 9})
    assert token_ids(responses) == {one: expected[one] for one in (0, 3, 4)}
    assert not engine._running
    scheduler = engine._core.engine_core.scheduler
    assert scheduler.get_num_unfinished_requests() == 0


# --- pools -------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the pool does not get there"
        time.sleep(0.005)


def held_requests(pool: RayEnginePool) -> list[int]:
    """Returns the ids of the requests that the live engines hold."""
    return sorted(one for ids in pool.supervisor.call_each("request_ids", [{}] * len(pool.engine_pids)) for one in ids)


def submit_and_dispatch(pool: RayEnginePool, requests: list[Request]) -> None:
    for request in requests:
        pool.submit(request)
    assert pool.step(timeout=0.0) == []


def test_a_pool_forwards_to_the_engine_and_forgets(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool(partial(GatedEngine, tmp_path), engines=2, window=4)
    requests = [replace(one, n=2) for one in make_requests(5)]  # the last one waits in the pool
    submit_and_dispatch(pool, requests)
    assert held_requests(pool) == [0, 1, 2, 3]
    for request_id in (1, 4):
        pool.cancel(request_id)
        pool.cancel(request_id)
    assert held_requests(pool) == [0, 2, 3]
    assert pool.in_flight == 3
    submit_and_dispatch(pool, [replace(requests[4], request_id=5)])  # takes the free room
    assert held_requests(pool) == [0, 2, 3, 5]
    for request_id in range(6):
        (tmp_path / f"answer_{request_id}").touch()
    assert sorted(token_ids(drain(pool))) == [0, 2, 3, 5]
    assert not (tmp_path / "received_4").exists()


def test_a_response_after_the_cancellation_is_dropped(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool(partial(GatedEngine, tmp_path))
    submit_and_dispatch(pool, make_requests(2))
    (tmp_path / "answer_0").touch()
    wait_for(lambda: held_requests(pool) == [1])  # the response is under way
    pool.cancel(0)
    assert pool.in_flight == 1
    (tmp_path / "answer_1").touch()
    assert sorted(token_ids(drain(pool))) == [1]


def test_a_request_of_a_killed_engine_is_cancelled(open_pool: OpenPool, tmp_path: Path) -> None:
    """The other requests return to the queue and reach the next engine."""
    pool = open_pool(partial(GatedEngine, tmp_path))
    submit_and_dispatch(pool, make_requests(3))
    assert held_requests(pool) == [0, 1, 2]
    os.kill(pool.engine_pids[0], signal.SIGKILL)
    pool.cancel(0)  # before the pool knows of the loss
    wait_for(lambda: pool.step(timeout=0.1) == [] and len(pool._dispatcher.waiting_requests) == 2)
    pool.cancel(1)
    assert pool.in_flight == 1
    for request_id in (0, 1):
        (tmp_path / f"received_{request_id}").unlink()
    (tmp_path / "answer_2").touch()
    assert sorted(token_ids(drain(pool))) == [2]
    assert not list(tmp_path.glob("received_[01]"))


def test_a_cancelled_generate_leaves_the_engines_of_a_pool(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool(partial(GatedEngine, tmp_path), engines=2)
    loop = make_loop(pool)

    async def cancel_one() -> list[SampledCompletion]:
        ours, theirs = (asyncio.ensure_future(loop.generate(one)) for one in make_requests(2))
        while len(list(tmp_path.glob("received_*"))) < 2:
            await asyncio.sleep(0.001)
        theirs.cancel()
        await asyncio.wait([theirs])
        assert pool.in_flight == 1
        assert held_requests(pool) == [0]
        (tmp_path / "answer_0").touch()
        return await ours

    assert [one.token_ids for one in loop.run(cancel_one())] == [[100]]
    loop.close()
    assert pool.in_flight == 0
