"""Starts a local Ray runtime or joins a cluster, and starts actors on selected devices."""

import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import parameter, ray_constants
from ray._private.parameter import RayParams
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from config.schema.errors import ConfigError
from torchgrpo.cluster.socket_paths import shorten_temporary_folders

log = logging.getLogger(__name__)

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
FORWARDED_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "USE_HUB_KERNELS")
"""Variables of this process that actors get on every node; config/cli/command_line.py sets them."""


@dataclass(frozen=True)
class DeviceSlot:
    """Devices of one actor.

    devices: GPUs of this machine, as in CUDA_VISIBLE_DEVICES (a physical index or a UUID).
    num_gpus: number of GPUs that Ray selects from its cluster instead.
    Without `devices` and `num_gpus` the actor runs on a CPU.
    """

    name: str
    devices: tuple[str, ...] = ()
    num_gpus: int = 0

    def __str__(self) -> str:
        if self.num_gpus:
            return f"{self.name} ({self.num_gpus} GPUs of the cluster)"
        where = f"GPU {','.join(self.devices)}" if self.devices else "CPU"
        return f"{self.name} ({where})"


def start_ray(address: str | None, num_cpus: int) -> bool:
    """Joins the Ray cluster at `address`, or starts a local runtime on loopback.

    Returns:
        Whether this call started or joined Ray; the caller must then also shut Ray down.
    Raises:
        ConfigError: no cluster answers at `address`.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        _start_local_ray(num_cpus, quiet)
        return True
    # Probe the port first, because `ray.init` would wait for minutes. It resolves "auto" and names without a
    # port.
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10.0).close()
        except OSError as error:
            raise ConfigError(
                f"ray.address={address}: no Ray cluster answers there ({error}); start one with "
                "`ray start --head`, or leave ray.address unset for a local one"
            ) from error
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"ray.address={address}: joining the Ray cluster failed: {error}; check with "
            "`ray status` there that the cluster runs, make the address of its head reachable from this machine, and "
            "set RAY_AUTH_MODE=token and the token here too if the cluster requires one"
        ) from error
    return True


class _LocalRayParams(RayParams):
    """Parameters of a local Ray runtime that `ray.init` does not expose.

    The autoscaler is off. The dashboard agent gets a free port, because its fixed port blocks the start beside
    another runtime.
    """

    def __init__(self, **params: Any) -> None:
        super().__init__(**{"dashboard_agent_listen_port": 0, "no_monitor": True, **params})


class _QuietRayParams(_LocalRayParams):
    """Parameters of a local runtime without log monitor: worker output stays in Ray's files."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**{"include_log_monitor": False, **params})


def prepare_local_ray() -> None:
    """Configures Ray for a local runtime; must run before `ray.init`.

    The runtime listens on loopback and free ports and sends no usage statistics. Its actors run at normal
    niceness and no workers are started in advance.
    """
    shorten_temporary_folders()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's default niceness of 15 would stall engines beside any other computing process.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # By default Ray starts a worker per core. Our actors cannot use these: each has environment variables of
    # its own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray's switch for machines outside a cluster: its processes listen on loopback only.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this process, which has already read the variable
    parameter.RayParams = _LocalRayParams  # type: ignore[misc, assignment]


def _start_local_ray(num_cpus: int, quiet: dict[str, Any]) -> None:
    """Starts a local runtime; retries after Ray's fixed start timeout on a busy machine."""
    prepare_local_ray()
    others = set(psutil.Process().children(recursive=True))
    parameter.RayParams = _QuietRayParams  # type: ignore[misc, assignment]
    for last in (False, True):
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
            return
        except Exception as error:
            if last or "node timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start in time (%s); retrying", error)
            ray.shutdown()
            leftover = set(psutil.Process().children(recursive=True)) - others  # would stay until this process ends
            for child in leftover:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def free_resources() -> str:
    """Returns a text with the free and total CPUs and GPUs of Ray."""
    free, total = ray.available_resources(), ray.cluster_resources()
    counts = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in ("CPU", "GPU")]
    return f"free in Ray: {', '.join(counts)}"


def start_actor(
    kind: type,
    slot: DeviceSlot,
    num_cpus: int,
    concurrency_groups: dict[str, int],
    group: PlacementGroup | None = None,
    bundle: int = -1,
) -> Any:
    """Starts an actor of class `kind` on the devices of `slot`.

    The constructor gets the environment variables that select the devices.

    concurrency_groups: concurrent calls of each group of methods.
    group, bundle: placement group and bundle index for actors that start together.
    """
    visible = {}
    if slot.devices:  # the plan has selected the GPUs: Ray must neither allocate nor hide any
        visible["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
        visible["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    paths = [str(PROJECT_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": str(num_cpus), "PYTHONPATH": os.pathsep.join(paths), **visible}
    environment |= {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "num_gpus": slot.num_gpus,
        "concurrency_groups": concurrency_groups,
        "max_restarts": 0,
        "runtime_env": {"env_vars": environment},
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
    return ray.remote(**options)(kind).remote(visible)


def node_address() -> str:
    """Returns the address of this node for the other nodes of the cluster."""
    return str(ray.util.get_node_ip_address())
