"""Weights into a pool, and engines lost before, in and after a push: each has the last one before it serves."""

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.logged import Logged
from tests.rollout import pool_engines
from tests.rollout.conftest import OpenPool, drain, requests
from tests.rollout.pool_engines import CountingEngine, HandCarried
from torchgrpo.rollout.engines.engine_actor import WeightHandle
from torchgrpo.rollout.engines.interface import generate
from torchgrpo.rollout.engines.pool import RayPool
from torchgrpo.rollout.engines.remote_calls import EngineLost
from torchgrpo.rollout.weights.host_copy import Transport
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory

pytestmark = pytest.mark.long


def test_an_object_store_push_reaches_every_engine(open_pool: OpenPool) -> None:
    pool = open_pool(CountingEngine, engines=2, transport=Transport(ObjectStore()))
    for version in (1, 2):
        weights = [
            ("sum", torch.full((3, 5), float(version), dtype=torch.bfloat16)),
            ("empty", torch.empty(0)),
        ]
        pool.load(weights, version)
        assert pool.score([[1, 2, 3]]) == {f"engine {i} (CPU)": [[15.0 * version] * 2] for i in range(2)}
        assert pool.policy_version == version


def test_an_engine_lost_in_a_push_does_not_hold_up_the_others(open_pool: OpenPool, logged: Logged) -> None:
    """The others are loaded and scored at once; the new one has the weights before it serves."""
    pool = open_pool(pool_engines.CountingEngine, engines=2)
    pool.load([("sum", torch.ones(2))], version=1)
    victim, survivor = pool.supervisor.members
    os.kill(victim, signal.SIGKILL)
    assert pool.score([[1, 2]]) == {"engine 1 (CPU)": [[2.0]]}
    pool.load([("sum", torch.ones(3))], version=2)
    assert pool.score([[1, 2]])["engine 1 (CPU)"] == [[3.0]]
    pool.supervisor.wait_for_every()
    assert pool.supervisor.members[1] == survivor
    assert pool.supervisor.members[0] != victim
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[3.0]], "engine 1 (CPU)": [[3.0]]}
    pool.load([("sum", torch.ones(4))], version=3)
    assert logged.text.count("engine 0 (CPU) is back, with policy version 2") == 1
    assert logged.text.count("is back") == 1


def test_engines_go_on_without_one_that_does_not_come_back_until_none_is_left(
    open_pool: OpenPool, tmp_path: Path, logged: Logged
) -> None:
    """As where a cluster has no place for it."""
    pool = open_pool(partial(pool_engines.SlowAgain, tmp_path, 2), engines=2)
    pool.load([("sum", torch.ones(2))], version=1)
    pool.supervisor.settings = replace(pool.supervisor.settings, start_timeout_s=1.0)
    lost, other = pool.supervisor.members
    os.kill(lost, signal.SIGKILL)
    assert len(generate(pool, requests(6))) == 6
    deadline = time.monotonic() + 600
    while "the other engines go on" not in logged.text and time.monotonic() < deadline:
        pool.step(0.1)
    assert "for engine 0 (CPU), still starting, to take the place of a lost engine" in logged.text
    assert re.search(r"free in Ray: \d of 8 CPUs, 0 of 0 GPUs; the other engines go on", logged.text)
    pool.load([("sum", torch.ones(3))], version=2)
    assert pool.score([[1, 2]]) == {"engine 1 (CPU)": [[3.0]]}
    os.kill(other, signal.SIGKILL)
    pool.submit(requests(1)[0])
    with pytest.raises(
        EngineLost, match=r"for engine 0 \(CPU\), still starting, engine 1 \(CPU\), still start"
    ):
        drain(pool)


def test_the_only_engine_lost_in_a_push_is_waited_for(open_pool: OpenPool) -> None:
    pool = open_pool(pool_engines.CountingEngine)
    pool.load([("sum", torch.ones(2))], version=1)
    os.kill(pool.supervisor.members[0], signal.SIGKILL)
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]]}


# --- past the memory of hosts: a direct transfer, and the copy beside it --------------------------------------


def ones(count: int) -> list[tuple[str, torch.Tensor]]:
    return [("sum", torch.ones(count))]


def ways(pool: RayPool) -> list[str]:
    return pool.supervisor.call_each("came_by", [{}] * len(pool.supervisor.members))


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_an_engine_lost_after_a_direct_push_loads_the_copy_by_itself(
    open_pool: OpenPool, logged: Logged
) -> None:
    """Nobody pushes again: the group that the lost engine had is drawn with the weights of the last push."""
    pool = open_pool(CountingEngine, transport=Transport(SharedMemory(), HandCarried()))
    for version in (1, 2):
        pool.load(ones(version), version)
    assert ways(pool) == ["direct"]
    pool.submit(requests(1)[0])
    kill(pool.supervisor.members)
    (response,) = drain(pool)
    assert response.completions[0].policy_versions == [2]
    assert ways(pool) == ["copy"]
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]]}
    assert "engine 0 (CPU) is back, with policy version 2" in logged.text


@pytest.mark.parametrize("noticed", [True, False])
def test_a_direct_push_waits_for_no_engine_that_is_still_starting(open_pool: OpenPool, noticed: bool) -> None:
    """It reaches the live ones, the new engine loads the copy of that push. A loss that the push itself notices is one
    inside it."""
    pool = open_pool(CountingEngine, engines=2, transport=Transport(SharedMemory(), HandCarried()))
    pool.load(ones(1), version=1)
    kill(pool.supervisor.members[:1])
    if noticed:
        assert pool.score([[1, 2]]) == {"engine 1 (CPU)": [[1.0]]}
    pool.load(ones(2), version=2)
    pool.supervisor.wait_for_every()
    assert ways(pool) == (["copy", "direct"] if noticed else ["copy", "copy"])
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]], "engine 1 (CPU)": [[2.0]]}
    pool.load(ones(3), version=3)
    assert ways(pool) == ["direct", "direct"]


def test_engines_that_were_in_a_direct_push_with_a_lost_one_start_anew(
    open_pool: OpenPool, logged: Logged
) -> None:
    """They may hold half a push, or wait for a peer that is gone; what they were drawing is drawn again."""

    def lose(version: int) -> None:
        if version == 2:
            kill(before[1:])

    transport = Transport(SharedMemory(), HandCarried(before=lose))
    pool = open_pool(partial(CountingEngine, 0.2), engines=2, transport=transport)
    before = pool.supervisor.members
    pool.load(ones(1), version=1)
    for request in requests(6):
        pool.submit(request)
    responses = pool.step(timeout=0.0)
    pool.load(ones(2), version=2)
    assert pool.policy_version == 2
    responses += drain(pool)
    assert sorted(response.request_id for response in responses) == list(range(6))
    pool.supervisor.wait_for_every()
    assert not set(pool.supervisor.members) & set(before)
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]], "engine 1 (CPU)": [[2.0]]}
    assert (
        "engine 1 (CPU) was lost during transfer, which needs every engine; the others start anew"
        in logged.text
    )


def test_an_engine_that_fails_a_direct_push_ends_the_run(open_pool: OpenPool) -> None:
    """Nothing died: what the engine raised must not be taken for a loss and mended by another way."""
    pool = open_pool(
        CountingEngine, transport=Transport(SharedMemory(), HandCarried(method="no_such_method"))
    )
    with pytest.raises(EngineLost, match=r"no attribute 'no_such_method'[\s\S]*engine 0 \(CPU\) failed"):
        pool.load(ones(1), version=1)


def test_engines_draw_with_new_weights_while_their_copy_is_written(open_pool: OpenPool) -> None:
    drawn: list[list[int]] = []

    class Watched(SharedMemory):
        def write(self, weights: Outgoing) -> WeightHandle:
            pool.submit(requests(1)[0])
            drawn.extend(response.completions[0].policy_versions for response in drain(pool))
            return super().write(weights)

    pool: RayPool = open_pool(CountingEngine, transport=Transport(Watched(), HandCarried()))
    pool.load(ones(1), version=1)
    pool.load(ones(1), version=2)
    assert drawn == [[1], [2]]


def test_no_copy_is_overwritten_while_an_engine_reads_it(open_pool: OpenPool, tmp_path: Path) -> None:
    """The only engine is lost, and the next push comes while the new one loads the last."""
    factory = partial(pool_engines.SlowLoad, tmp_path)
    pool = open_pool(factory, transport=Transport(SharedMemory(), HandCarried()))
    pool.load(ones(4), version=1)
    kill(pool.supervisor.members)
    pool.submit(requests(1)[0])
    while not (tmp_path / "reading").exists():
        pool.step(0.1)
    pool.load([("sum", torch.full((4,), 9.0))], version=2)
    assert (tmp_path / "reading").read_text() == "4.0 4.0"
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[36.0]]}
