"""Tests of the engine pool: dispatch, pushes, and engines that die, hang or fail."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError

from config.schema.errors import ConfigError
from envs.group import SINGLE_ENGINE_NAME
from tests.log_capture import LogCapture
from tests.processes import engine_pids, wait_for_exit
from tests.rollout import pool_engines
from tests.rollout.conftest import (
    SAMPLING,
    OpenPool,
    StartEngine,
    drain,
    make_requests,
    shared_memory_transport,
    tiny_llama,
    tiny_settings,
)
from torchgrpo.cluster.runtime import DeviceSlot, start_ray
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings
from torchgrpo.rollout.engines.interface import Engine, Request, generate
from torchgrpo.rollout.engines.remote_engines import EngineLost
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine

PROJECT = Path(__file__).resolve().parents[2]
TWO_PLACES = (DeviceSlot("engine 0"), DeviceSlot("engine 1"))


# --- with real vLLM engines -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_pool(local_ray: None, tiny_folders: dict[bool, Path]) -> Iterator[RayEnginePool]:
    if installed_vllm() is None:
        pytest.skip("vLLM is not installed")
    factory = partial(VLLMEngine, tiny_settings(tiny_folders[True]))
    pool = RayEnginePool(
        factory,
        [DeviceSlot("engine 0"), DeviceSlot("engine 1")],
        EnginePoolSettings(window=32),
        shared_memory_transport(),
    )
    yield pool
    pool.close()


def test_two_vllm_engines_answer_like_one(vllm_pool: RayEnginePool, start_engine: StartEngine) -> None:
    wanted = make_requests(24, n=4)
    alone = start_engine(tied=True)
    alone.load(tiny_llama(True).state_dict().items(), version=1)
    vllm_pool.load(tiny_llama(True).state_dict().items(), version=1)
    assert vllm_pool.policy_version == 1
    expected = generate(alone, wanted)
    got = generate(vllm_pool, wanted)
    assert {one.engine for response in got for one in response.completions} == {str(one) for one in TWO_PLACES}
    assert {one.engine for response in expected for one in response.completions} == {SINGLE_ENGINE_NAME}
    for one, other in zip(got, expected, strict=True):
        assert one.request_id == other.request_id
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.policy_versions == theirs.policy_versions == [1] * len(mine.token_ids)
            assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_a_killed_vllm_engine_loses_and_doubles_nothing(vllm_pool: RayEnginePool) -> None:
    """After SIGKILL during generation, the new actor has the pushed weights before its first request."""
    weights = tiny_llama(True, seed=5).state_dict()
    vllm_pool.load(weights.items(), version=2)
    wanted = make_requests(40, n=4)
    expected = {response.request_id: response for response in generate(vllm_pool, wanted)}
    for request in wanted:
        vllm_pool.submit(request)
    responses = vllm_pool.step(timeout=0.0)
    victim, survivor = engine_pids()
    os.kill(victim, signal.SIGKILL)
    responses += drain(vllm_pool)
    ids = [response.request_id for response in responses]
    assert sorted(ids) == list(range(40))
    assert all(response == expected[response.request_id] for response in responses)

    sequence = list(range(3, 160))
    vllm_pool.supervisor.wait_for_all_engines()
    assert survivor in vllm_pool.supervisor.engine_pids
    scores = vllm_pool.score([sequence])
    assert list(scores) == ["engine 0 (CPU)", "engine 1 (CPU)"]
    assert survivor in engine_pids()
    assert victim not in engine_pids()
    with torch.no_grad():
        logits = tiny_llama(True, seed=5)(torch.tensor([sequence])).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
    for one in scores.values():
        torch.testing.assert_close(torch.tensor(one.log_probs[0]), theirs, atol=1e-4, rtol=0)


# --- mechanics of the pool ---------------------------------------------------------------------------------


def test_groups_go_to_the_engine_with_room(open_pool: OpenPool) -> None:
    pool = open_pool(partial(pool_engines.CountingEngine, 0.05), engines=2, window=4)
    for request in make_requests(6):
        pool.submit(request)
    pool.step(timeout=0.0)
    stacks = pool.supervisor.stacks()
    assert "engine 0 (CPU), live" in stacks
    assert "engine 1 (CPU), live" in stacks
    assert sorted(response.request_id for response in drain(pool)) == list(range(6))


def test_engines_have_the_niceness_of_the_driver(open_pool: OpenPool) -> None:
    """At Ray's default niceness of 15, an engine stands still beside any busy process."""
    pool = open_pool(pool_engines.CountingEngine)
    assert {psutil.Process(pid).nice() for pid in pool.supervisor.engine_pids} == {psutil.Process().nice()}


def wait_for_death(actor: Any) -> None:
    """Waits until Ray reports a killed actor as dead; before, it may be only unavailable."""
    deadline = time.monotonic() + 600.0
    while True:
        try:
            ray.get(actor.stacks.options(concurrency_group="watch").remote(), timeout=600.0)
        except ActorDiedError:
            return
        except ActorUnavailableError:
            pass
        assert time.monotonic() < deadline, "the actor is not dead after 600 s"
        time.sleep(0.05)


def test_a_call_that_needs_every_engine_names_the_lost_one(open_pool: OpenPool) -> None:
    pool = open_pool(pool_engines.CountingEngine, engines=2)
    os.kill(pool.supervisor.engine_pids[1], signal.SIGKILL)
    wait_for_death(pool.supervisor.slots[1].actor)
    lost = r"The actor died.*: engine 1 \(CPU\) was lost during wake, which needs every engine"
    with pytest.raises(EngineLost, match=lost):
        pool.supervisor.call_each("wake", [{}] * 2)


def test_a_late_answer_shows_the_stacks_and_ends_the_engine(open_pool: OpenPool, log_capture: LogCapture) -> None:
    pool = open_pool(pool_engines.HangingEngine, request_timeout_s=2.0)
    (late,) = pool.supervisor.engine_pids
    with pytest.raises(EngineLost, match="no answer to never_returns within 2 s"):
        pool.supervisor.call_each("never_returns", [{}])
    assert re.search(r"stacks of all engines:[\s\S]*in never_returns", log_capture.text)
    wait_for_exit(late)


def test_a_loss_while_the_pool_closes_starts_no_engine(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed push leaves a thread that waits for an answer while the actors end."""
    pool = open_pool(pool_engines.HangingEngine)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            pool.supervisor.call_each("never_returns", [{}])
        except BaseException as error:
            failures.append(error)

    left_behind = threading.Thread(target=wait)
    left_behind.start()
    while not re.search(r"never_returns", pool.supervisor.stacks()):
        time.sleep(0.05)
    before = set(engine_pids())
    monkeypatch.setattr(
        "torchgrpo.rollout.engines.engine_supervisor.start_actor", lambda *_: pytest.fail("an engine beside the end")
    )
    monkeypatch.setattr("torchgrpo.rollout.engines.engine_supervisor._CLOSE_S", 0.2)
    pool.close()
    left_behind.join(600)
    (failure,) = failures
    assert "ended with its pool" in str(failure)
    assert set(engine_pids()) <= before


def test_a_hung_engine_is_found_by_deadline_and_replaced(
    open_pool: OpenPool, tmp_path: Path, log_capture: LogCapture
) -> None:
    pool = open_pool(partial(pool_engines.HangingOnceEngine, tmp_path / "hung"), engines=2, request_timeout_s=2.0)
    pool.load([("sum", torch.ones(2))], version=1)
    for request in make_requests(8):
        pool.submit(request)
    responses = drain(pool)
    assert sorted(response.request_id for response in responses) == list(range(8))
    assert {version for r in responses for c in r.completions for version in c.policy_versions} == {1}
    assert "never_returns" in log_capture.text
    assert "was not finished within 2 s" in log_capture.text


def test_a_group_that_no_engine_can_finish_ends_the_run(open_pool: OpenPool) -> None:
    pool = open_pool(pool_engines.HangingEngine, request_timeout_s=0.5, max_attempts=2)
    pool.submit(make_requests(1)[0])
    with pytest.raises(EngineLost, match=r"engine 0 \(CPU\) was lost 2 times in a row.*group 0 .*request_timeout_s"):
        drain(pool)


def test_an_engines_own_exception_surfaces_with_its_traceback(open_pool: OpenPool) -> None:
    pool = open_pool(pool_engines.FailingStepEngine)
    pool.submit(make_requests(1)[0])
    with pytest.raises(
        EngineLost, match=r"pool_engines.py[\s\S]*sampler met a NaN[\s\S]*engine 0 \(CPU\) failed"
    ) as lost:
        drain(pool)
    assert re.search(r"failed while live: \w+: .*sampler met a NaN", str(lost.value).splitlines()[-1])


def test_a_refused_request_surfaces(open_pool: OpenPool) -> None:
    pool = open_pool(pool_engines.CountingEngine)
    pool.submit(Request(9, (1, 2), 1, SAMPLING, seed=-1))
    with pytest.raises(EngineLost, match="request 9: no negative seeds here"):
        drain(pool)


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (
            pool_engines.FailingStartEngine,
            EngineLost,
            r"pool_engines.py[\s\S]*no weights in this[\s\S]*engine \d \(CPU",
        ),
        (pool_engines.ConfigErrorEngine, ConfigError, r"^model.name=nowhere: .*; give a folder\n\(engine \d \(CPU\)"),
    ],
    ids=["crash", "refusal"],
)
def test_a_failing_start_takes_everything_down(
    local_ray: None, factory: Callable[[], Engine], error: type[Exception], message: str
) -> None:
    before = set(engine_pids())
    with pytest.raises(error, match=message):
        RayEnginePool(factory, TWO_PLACES, EnginePoolSettings(), shared_memory_transport())
    wait_until_gone_but(before)


def test_a_start_that_takes_too_long_takes_everything_down(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's clock jumps past the deadline when both actors wait."""
    before = set(engine_pids())

    def clock() -> float:
        return time.monotonic() + (1000.0 if len(list(tmp_path.iterdir())) == 2 else 0.0)

    monkeypatch.setattr("torchgrpo.rollout.engines.engine_supervisor.time", SimpleNamespace(monotonic=clock))
    message = r"waits_for_a_download[\s\S]*waited 600 s for engine 0 \(CPU\), engine 1"
    with pytest.raises(EngineLost, match=message):
        RayEnginePool(
            partial(pool_engines.NeverStartingEngine, tmp_path),
            TWO_PLACES,
            EnginePoolSettings(),
            shared_memory_transport(),
        )
    wait_until_gone_but(before)


def wait_until_gone_but(before: set[int]) -> None:
    for pid in set(engine_pids()) - before:
        wait_for_exit(pid)


def test_a_machine_too_busy_to_start_ray_in_time_gets_a_second_chance(
    monkeypatch: pytest.MonkeyPatch, log_capture: LogCapture
) -> None:
    """A fake start replaces Ray's, which exceeds its deadline only on a stalled machine."""
    tried: list[dict[str, object]] = []

    def start(**options: object) -> None:
        tried.append(options)
        if len(tried) == 1:
            raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", start)
    assert start_ray(None, 1)
    assert len(tried) == 2
    assert "did not start in time" in log_capture.text


def test_no_cluster_at_the_address_is_one_message() -> None:
    script = "from torchgrpo.cluster.runtime import start_ray; start_ray('127.0.0.1:1', 1)"
    run = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, timeout=900)
    assert "ConfigError: ray.address=127.0.0.1:1: no Ray cluster answers there" in run.stderr
