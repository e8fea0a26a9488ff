"""Ray: a local runtime on loopback or an existing cluster, and actors on chosen devices."""

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
from torchgrpo.cluster.sockets import make_room_for_sockets

log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    """The devices of one actor.

    devices: GPUs of this machine, named as CUDA_VISIBLE_DEVICES names them (a physical index, or a UUID).
    num_gpus: that Ray shall choose instead, from its cluster. Without either the actor is on a CPU.
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
    """Join the cluster at `address`, or start a local runtime that listens on loopback.

    Returns:
        Whether this call started or joined Ray, so that the caller must also leave it.
    Raises:
        ConfigError: no cluster answers at `address`.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        _start_local(num_cpus, quiet)
        return True
    # `ray.init` would wait for minutes; "auto" and names without a port are left to it.
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
            f"ray.address={address}: joining the Ray cluster failed: {error}; `ray status` there tells whether it "
            "runs; its head's address must be reachable from this machine, and where the cluster asks for a token, "
            "RAY_AUTH_MODE=token and the token must be set here too"
        ) from error
    return True


class _Local(RayParams):
    """Parameters of a local runtime that `ray.init` does not offer.

    No autoscaler, and a free port for the one agent that has a fixed one, for which it would wait beside another
    runtime.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"dashboard_agent_listen_port": 0, "no_monitor": True, **given})


class _Unheard(_Local):
    """One whose workers' lines stay in Ray's own files: nothing reads these."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"include_log_monitor": False, **given})


def prepare_local() -> None:
    """Before a local runtime is started: it listens on loopback and on free ports, sends no usage figures, does not
    stand back, and starts no workers before they are asked for."""
    make_room_for_sockets()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would start actors at niceness 15: engines that stand still beside anything else that computes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would start a worker for each core, and none of them for us: actors are made with variables of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray's own switch for machines that are not part of a cluster: no process of it listens elsewhere.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, which has read the variable already
    parameter.RayParams = _Local  # type: ignore[misc, assignment]


def _start_local(num_cpus: int, quiet: dict[str, Any]) -> None:
    """Start a local runtime, a second time where a busy machine was too slow for Ray's fixed limit."""
    prepare_local()
    others = set(psutil.Process().children(recursive=True))
    parameter.RayParams = _Unheard  # type: ignore[misc, assignment]
    for last in (False, True):
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
            return
        except Exception as error:
            if last or "node timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start in time (%s); once more", error)
            ray.shutdown()
            left_by_ray = set(psutil.Process().children(recursive=True)) - others  # until we end
            for child in left_by_ray:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def free_resources() -> str:
    """The resources that Ray could give to another actor now."""
    free, all_there = ray.available_resources(), ray.cluster_resources()
    parts = [f"{free.get(name, 0):g} of {all_there.get(name, 0):g} {name}s" for name in ("CPU", "GPU")]
    return f"free in Ray: {', '.join(parts)}"


def start_actor(
    kind: type,
    place: Place,
    num_cpus: int,
    concurrency_groups: dict[str, int],
    group: PlacementGroup | None = None,
    bundle: int = -1,
) -> Any:
    """A new actor of the class `kind` at `place`; it is made with the environment that selects its devices.

    concurrency_groups: of its methods, and how many calls of each run at a time.
    group, bundle: what it was promised, where it is one of several that start together.
    """
    visible = {}
    if place.devices:  # the plan chose them: Ray is asked for none, and must not hide any
        visible["CUDA_VISIBLE_DEVICES"] = ",".join(place.devices)
        visible["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": str(num_cpus), "PYTHONPATH": os.pathsep.join(paths), **visible}
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "num_gpus": place.num_gpus,
        "concurrency_groups": concurrency_groups,
        "max_restarts": 0,
        "runtime_env": {"env_vars": environment},
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
    return ray.remote(**options)(kind).remote(visible)


def own_address() -> str:
    """The address at which the other nodes of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())
