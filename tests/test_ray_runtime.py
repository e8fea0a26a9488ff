"""Tests the placement of Ray actors on devices, and the local Ray instance."""

import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

from tests.processes import actor_pids, child_command_lines, process_tree
from tests.rollout import pool_engines
from tests.rollout.conftest import shared_memory_transport
from torchgrpo.cluster.runtime import DeviceSlot, start_actor
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings


def test_engines_see_the_gpus_that_their_places_name(local_ray: None) -> None:
    """Engines see the GPU names of the learner's CUDA_VISIBLE_DEVICES, UUIDs included."""
    names = [("4", "6"), ("GPU-8a9b2c1d-0000-1111-2222-333344445555",)]
    places = [DeviceSlot(f"engine {index}", gpus) for index, gpus in enumerate(names)]
    pool = RayEnginePool(pool_engines.CountingEngine, places, EnginePoolSettings(), shared_memory_transport())
    try:
        assert pool.supervisor.call_each("visible_gpus", [{}] * 2) == [
            "4,6",
            "GPU-8a9b2c1d-0000-1111-2222-333344445555",
        ]
    finally:
        pool.close()


def test_a_cluster_is_asked_for_the_gpus_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options_seen: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        options_seen.append(options)
        return lambda host: SimpleNamespace(remote=lambda environment: environment)

    monkeypatch.setattr(ray, "remote", remote)
    assert start_actor(object, DeviceSlot("engine 0", num_gpus=2), 1, {}) == {}
    assert options_seen[0]["num_gpus"] == 2
    assert "CUDA_VISIBLE_DEVICES" not in options_seen[0]["runtime_env"]["env_vars"], "Ray sets it"


def test_actors_get_the_variables_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor on another node does not inherit the environment of the run's process."""
    options_seen: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        options_seen.append(options)
        return lambda host: SimpleNamespace(remote=lambda environment: environment)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setenv("USE_HUB_KERNELS", "0")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    start_actor(object, DeviceSlot("learner rank 0"), 1, {})
    variables = options_seen[0]["runtime_env"]["env_vars"]
    assert variables["USE_HUB_KERNELS"] == "0"
    assert "CUBLAS_WORKSPACE_CONFIG" not in variables


def test_a_local_ray_listens_on_loopback_only(local_ray: None) -> None:
    addresses = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a process may end between the listing and the query
            addresses |= {one.laddr.ip for one in process.net_connections("inet") if one.status == "LISTEN"}
    assert addresses
    assert {address.removeprefix("::ffff:") for address in addresses} <= {"127.0.0.1", "::1"}


def test_no_port_is_fixed(local_ray: None) -> None:
    """No port is fixed, because another Ray on the machine would block it."""
    node = ray._private.worker._global_node
    assert node is not None
    assert node.dashboard_agent_listen_port not in (0, None, DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)


class EmptyActor:
    def __init__(self, visible: dict[str, str]) -> None: ...


def test_a_local_ray_starts_no_unused_processes(local_ray: None) -> None:
    """The local Ray starts no autoscaler, no log monitor and no idle workers.

    There is one machine, and the driver does not print the output of workers.
    """
    command_lines = " ".join(child_command_lines())
    assert "/agent.py " in command_lines, "command lines contain the names of helpers"
    assert "/monitor.py " not in command_lines and "/log_monitor.py " not in command_lines
    before = {process.pid for process in process_tree(os.getpid())}  # some are left by earlier tests in this process
    actor = start_actor(EmptyActor, DeviceSlot("anybody"), 1, {})
    ray.get(actor.__ray_ready__.remote(), timeout=600.0)
    assert actor_pids(os.getpid(), "ray::EmptyActor") and before.issuperset(actor_pids(os.getpid(), "ray::IDLE"))
