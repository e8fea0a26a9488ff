"""Actors on the devices that were meant."""

import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

from tests.processes import actors_under, command_lines
from tests.rollout import pool_engines
from tests.rollout.conftest import through_memory
from torchgrpo.cluster.runtime import Place, start_actor
from torchgrpo.rollout.engines.pool import RayPool
from torchgrpo.rollout.engines.supervisor import PoolSettings


def test_engines_see_the_gpus_that_their_places_name(local_ray: None) -> None:
    """Names are those of the learner's CUDA_VISIBLE_DEVICES, UUIDs too, and not its own indices."""
    names = [("4", "6"), ("GPU-8a9b2c1d-0000-1111-2222-333344445555",)]
    places = [Place(f"engine {index}", gpus) for index, gpus in enumerate(names)]
    pool = RayPool(pool_engines.CountingEngine, places, PoolSettings(), through_memory())
    try:
        assert pool.supervisor.call_each("visible_gpus", [{}] * 2) == [
            "4,6",
            "GPU-8a9b2c1d-0000-1111-2222-333344445555",
        ]
    finally:
        pool.close()


def test_a_cluster_is_asked_for_the_gpus_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        asked.append(options)
        return lambda host: SimpleNamespace(remote=lambda environment: environment)

    monkeypatch.setattr(ray, "remote", remote)
    assert start_actor(object, Place("engine 0", num_gpus=2), 1, {}) == {}
    assert asked[0]["num_gpus"] == 2
    assert "CUDA_VISIBLE_DEVICES" not in asked[0]["runtime_env"]["env_vars"], "Ray sets it"


def test_a_local_ray_listens_on_loopback_only(local_ray: None) -> None:
    listening = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it may end between being listed and being asked
            listening |= {one.laddr.ip for one in process.net_connections("inet") if one.status == "LISTEN"}
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}


def test_no_port_is_fixed(local_ray: None) -> None:
    """Beside another runtime on the machine Ray would try for seconds to have the same one."""
    node = ray._private.worker._global_node
    assert node is not None
    assert node.dashboard_agent_listen_port not in (0, None, DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)


class Anybody:
    def __init__(self, visible: dict[str, str]) -> None: ...


def test_nothing_runs_for_nobody(local_ray: None) -> None:
    """No autoscaler, for there is one machine; nothing that sends what workers print to a driver, which takes none; no
    worker beside that of an actor."""
    started = " ".join(command_lines())
    assert "/agent.py " in started, "as helpers are told apart"
    assert "/monitor.py " not in started and "/log_monitor.py " not in started
    idle = set(actors_under(os.getpid(), "ray::IDLE"))  # of tests before, in the same process
    actor = start_actor(Anybody, Place("anybody"), 1, {})
    ray.get(actor.__ray_ready__.remote(), timeout=600.0)
    assert actors_under(os.getpid(), "ray::Anybody") and idle.issuperset(
        actors_under(os.getpid(), "ray::IDLE")
    )
