"""Tests of pushes into an engine pool, with engines lost around a push."""

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

from tests.log_capture import LogCapture
from tests.rollout import pool_engines
from tests.rollout.conftest import OpenPool, drain, make_requests
from tests.rollout.pool_engines import CallTransfer, CountingEngine
from torchgrpo.rollout.engines.engine_actor import WeightHandle
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.interface import generate
from torchgrpo.rollout.engines.remote_engines import EngineLost
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import WeightUpdate

pytestmark = pytest.mark.long


def test_an_object_store_push_reaches_every_engine(open_pool: OpenPool) -> None:
    pool = open_pool(CountingEngine, engines=2, transport=WeightTransport(ObjectStore()))
    for version in (1, 2):
        weights = [("sum", torch.full((3, 5), float(version), dtype=torch.bfloat16)), ("empty", torch.empty(0))]
        pool.load(weights, version)
        assert pool.score([[1, 2, 3]]) == {f"engine {i} (CPU)": [[15.0 * version] * 2] for i in range(2)}
        assert pool.policy_version == version


def test_an_engine_lost_in_a_push_does_not_hold_up_the_others(open_pool: OpenPool, log_capture: LogCapture) -> None:
    """The other engines load and score at once.

    The new engine has the weights before it serves.
    """
    pool = open_pool(pool_engines.CountingEngine, engines=2)
    pool.load([("sum", torch.ones(2))], version=1)
    victim, survivor = pool.supervisor.engine_pids
    os.kill(victim, signal.SIGKILL)
    assert pool.score([[1, 2]]) == {"engine 1 (CPU)": [[2.0]]}
    pool.load([("sum", torch.ones(3))], version=2)
    assert pool.score([[1, 2]])["engine 1 (CPU)"] == [[3.0]]
    pool.supervisor.wait_for_all_engines()
    assert pool.supervisor.engine_pids[1] == survivor
    assert pool.supervisor.engine_pids[0] != victim
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[3.0]], "engine 1 (CPU)": [[3.0]]}
    pool.load([("sum", torch.ones(4))], version=3)
    assert log_capture.text.count("engine 0 (CPU) is back, with policy version 2") == 1
    assert log_capture.text.count("is back") == 1


def test_engines_continue_without_a_lost_one_until_none_is_left(
    open_pool: OpenPool, tmp_path: Path, log_capture: LogCapture
) -> None:
    """A cluster may have no room for a replacement."""
    pool = open_pool(partial(pool_engines.SlowRestartEngine, tmp_path, 2), engines=2)
    pool.load([("sum", torch.ones(2))], version=1)
    pool.supervisor.settings = replace(pool.supervisor.settings, start_timeout_s=1.0)
    lost, other = pool.supervisor.engine_pids
    os.kill(lost, signal.SIGKILL)
    assert len(generate(pool, make_requests(6))) == 6
    deadline = time.monotonic() + 600
    while "the other engines continue" not in log_capture.text and time.monotonic() < deadline:
        pool.step(0.1)
    assert "for engine 0 (CPU), still starting, to replace a lost engine" in log_capture.text
    assert re.search(r"free in Ray: \d of 8 CPUs, 0 of 0 GPUs; the other engines continue", log_capture.text)
    pool.load([("sum", torch.ones(3))], version=2)
    assert pool.score([[1, 2]]) == {"engine 1 (CPU)": [[3.0]]}
    os.kill(other, signal.SIGKILL)
    pool.submit(make_requests(1)[0])
    with pytest.raises(EngineLost, match=r"for engine 0 \(CPU\), still starting, engine 1 \(CPU\), still start"):
        drain(pool)


def test_the_only_engine_lost_in_a_push_is_waited_for(open_pool: OpenPool) -> None:
    pool = open_pool(pool_engines.CountingEngine)
    pool.load([("sum", torch.ones(2))], version=1)
    os.kill(pool.supervisor.engine_pids[0], signal.SIGKILL)
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]]}


# --- direct transfer, with a host copy ------------------------------------------------------------------------


def weights_of_ones(count: int) -> list[tuple[str, torch.Tensor]]:
    return [("sum", torch.ones(count))]


def push_paths(pool: RayEnginePool) -> list[str]:
    return pool.supervisor.call_each("push_path", [{}] * len(pool.supervisor.engine_pids))


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_an_engine_lost_after_a_direct_push_loads_the_copy_by_itself(
    open_pool: OpenPool, log_capture: LogCapture
) -> None:
    """Without another push, the lost engine's group is sampled with the last push's weights."""
    pool = open_pool(CountingEngine, transport=WeightTransport(SharedMemory(), CallTransfer()))
    for version in (1, 2):
        pool.load(weights_of_ones(version), version)
    assert push_paths(pool) == ["direct"]
    pool.submit(make_requests(1)[0])
    kill(pool.supervisor.engine_pids)
    (response,) = drain(pool)
    assert response.completions[0].policy_versions == [2]
    assert push_paths(pool) == ["copy"]
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]]}
    assert "engine 0 (CPU) is back, with policy version 2" in log_capture.text


@pytest.mark.parametrize("is_loss_noticed", [True, False])
def test_a_direct_push_waits_for_no_engine_that_is_still_starting(open_pool: OpenPool, is_loss_noticed: bool) -> None:
    """A direct push reaches the live engines; the new engine loads its copy.

    A loss that the push itself notices counts as a loss during the push.
    """
    pool = open_pool(CountingEngine, engines=2, transport=WeightTransport(SharedMemory(), CallTransfer()))
    pool.load(weights_of_ones(1), version=1)
    kill(pool.supervisor.engine_pids[:1])
    if is_loss_noticed:
        assert pool.score([[1, 2]]) == {"engine 1 (CPU)": [[1.0]]}
    pool.load(weights_of_ones(2), version=2)
    pool.supervisor.wait_for_all_engines()
    assert push_paths(pool) == (["copy", "direct"] if is_loss_noticed else ["copy", "copy"])
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]], "engine 1 (CPU)": [[2.0]]}
    pool.load(weights_of_ones(3), version=3)
    assert push_paths(pool) == ["direct", "direct"]


def test_engines_that_were_in_a_direct_push_with_a_lost_one_start_anew(
    open_pool: OpenPool, log_capture: LogCapture
) -> None:
    """Such engines may hold a partial push or wait for a lost peer.

    Their groups are sampled again.
    """

    def kill_second_engine(version: int) -> None:
        if version == 2:
            kill(before[1:])

    transport = WeightTransport(SharedMemory(), CallTransfer(on_push=kill_second_engine))
    pool = open_pool(partial(CountingEngine, 0.2), engines=2, transport=transport)
    before = pool.supervisor.engine_pids
    pool.load(weights_of_ones(1), version=1)
    for request in make_requests(6):
        pool.submit(request)
    responses = pool.step(timeout=0.0)
    pool.load(weights_of_ones(2), version=2)
    assert pool.policy_version == 2
    responses += drain(pool)
    assert sorted(response.request_id for response in responses) == list(range(6))
    pool.supervisor.wait_for_all_engines()
    assert not set(pool.supervisor.engine_pids) & set(before)
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[2.0]], "engine 1 (CPU)": [[2.0]]}
    assert (
        "engine 1 (CPU) was lost during transfer, which needs every engine; the other engines are replaced"
        in log_capture.text
    )


def test_an_engine_that_fails_a_direct_push_ends_the_run(open_pool: OpenPool) -> None:
    """An error of an engine must not count as a loss.

    No other transfer must replace the failed one.
    """
    pool = open_pool(CountingEngine, transport=WeightTransport(SharedMemory(), CallTransfer(method="no_such_method")))
    with pytest.raises(EngineLost, match=r"no attribute 'no_such_method'[\s\S]*engine 0 \(CPU\) failed"):
        pool.load(weights_of_ones(1), version=1)


def test_engines_draw_with_new_weights_while_their_copy_is_written(open_pool: OpenPool) -> None:
    token_versions: list[list[int]] = []

    class RecordingMemory(SharedMemory):
        def write(self, weights: WeightUpdate) -> WeightHandle:
            pool.submit(make_requests(1)[0])
            token_versions.extend(response.completions[0].policy_versions for response in drain(pool))
            return super().write(weights)

    pool: RayEnginePool = open_pool(CountingEngine, transport=WeightTransport(RecordingMemory(), CallTransfer()))
    pool.load(weights_of_ones(1), version=1)
    pool.load(weights_of_ones(1), version=2)
    assert token_versions == [[1], [2]]


def test_no_copy_is_overwritten_while_an_engine_reads_it(open_pool: OpenPool, tmp_path: Path) -> None:
    """The next push comes while the replacement of a lost engine loads the last push."""
    factory = partial(pool_engines.SlowLoadEngine, tmp_path)
    pool = open_pool(factory, transport=WeightTransport(SharedMemory(), CallTransfer()))
    pool.load(weights_of_ones(4), version=1)
    kill(pool.supervisor.engine_pids)
    pool.submit(make_requests(1)[0])
    while not (tmp_path / "reading").exists():
        pool.step(0.1)
    pool.load([("sum", torch.full((4,), 9.0))], version=2)
    assert (tmp_path / "reading").read_text() == "4.0 4.0"
    assert pool.score([[1, 2]]) == {"engine 0 (CPU)": [[36.0]]}
