"""Allocates devices to learner, reference and engines, and chooses the transport of weights.

    GPUs    0            1            2            3            4            5
            rank 0       rank 1       inference    inference    scorer 0     scorer 1     ref_model.num_devices=2
            rank 0       rank 1       inference    inference      unset: a reference is sharded over the ranks too
            learner      inference    scorer                      one rank: the main process
            one GPU for all: engine and learner take turns, the reference has no GPU of its own

A user only sets `num_devices` per component. Device indices are visible indices (after CUDA_VISIBLE_DEVICES). The
module touches no device and imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from config.schema.checks import device_setting
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.inference import InferenceModelConfig
from config.schema.registry import Registry
from config.schema.values import check_minimum

ReferenceHome = Literal["none", "own devices", "base of the LoRA policy", "learner ranks", "shared"]
"""Location of the reference.

`own devices`: scorer ranks, which are Ray actors. `learner ranks`: sharded over the learner ranks beside the policy.
`shared`: the reference has no device of its own, and `plan/make_plan.py` chooses its location.
"""
TRANSPORTS = Registry("transport", "torchgrpo.rollout.weights.transports", "make_transport")
"""Transports of weights to the engines of a pool; `in_process` has no pool and is not a transport."""


@dataclass(frozen=True)
class _DeviceRequest:
    """The devices that one config section requests: a number, or a list of indices.

    num_devices: None leaves the number to the plan. setting: the setting of the request.
    """

    section: str
    num_devices: int | None
    devices: Any
    setting: str

    @classmethod
    def from_config(cls, config: Config, section: str) -> "_DeviceRequest":
        fields = vars(config)[section]
        return cls(section, fields.num_devices, fields.devices, device_setting(config, section))

    @property
    def listed_devices(self) -> tuple[int, ...]:
        return tuple(self.devices or ())

    @property
    def count(self) -> int:
        return len(self.listed_devices) or self.num_devices or 0


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """Devices of learner ranks, scorers and engines.

    ranks: learner processes. A single rank is the main process; several ranks are Ray actors, and the main process has
        no model.
    ranks_per_node: learner ranks on one node.
    train: a GPU index for each rank. scorers: processes of a reference with devices of its own, which are Ray actors.
    reference: a GPU index for each scorer. Both lists are empty on a CPU.
    engines: one tuple of GPU indices for each engine; empty tuples on a CPU.
    in_process: whether the main process has the single engine, or the clients of servers outside the run; otherwise
        every engine is a Ray actor.
    colocated: whether engines and learner take turns on the same GPUs.
    notes: decisions that the plan made for the user, one sentence each.

    A Ray cluster chooses the GPUs itself. There, only the number of GPUs of engines, scorers and several ranks counts.
    """

    ranks: int
    ranks_per_node: int
    train: tuple[int, ...] = ()
    scorers: int
    reference: tuple[int, ...] = ()
    engines: tuple[tuple[int, ...], ...]
    reference_home: ReferenceHome
    in_process: bool
    colocated: bool = False
    on_cluster: bool
    notes: tuple[str, ...] = ()

    @property
    def on_cpu(self) -> bool:
        return not self.train

    @property
    def scorers_per_node(self) -> int:
        """Scorers of one node, if they are spread over the nodes like the learner ranks."""
        return -(-self.scorers * self.ranks_per_node // self.ranks)

    @property
    def learner_devices(self) -> str:
        """The learner's ranks and devices as text."""
        ranks = f"{self.ranks} ranks, " if self.ranks > 1 else ""
        if self.on_cluster and self.ranks > 1:
            return f"{ranks}of the cluster"
        gpus = ",".join(map(str, self.train))
        return ranks + (f"GPU {gpus}" if gpus else "CPU")

    @property
    def train_device(self) -> str:
        """The torch name of the learner's first device."""
        return f"cuda:{self.train[0]}" if self.train else "cpu"


def choose_transport(devices: DevicePlan, has_native_transfer: bool) -> str:
    """Chooses the transport of weights from the learner to the engines.

    has_native_transfer: whether the engines support vLLM's own transfer of full weights, and the learner has the full
        weights on a GPU.
    """
    if devices.in_process:
        return "in_process"
    used = {device for engine in devices.engines for device in engine}
    if devices.on_cluster:
        return "nccl" if has_native_transfer and used else "object_store"
    if not has_native_transfer or not used:
        return "shared_memory"
    if not used & set(devices.train):
        return "nccl"
    return "ipc" if used == set(devices.train) and len(used) == 1 else "shared_memory"


def plan_devices(config: Config, num_gpus: int, is_overlapped: bool = False, on_cluster: bool = False) -> DevicePlan:
    """Allocates devices to each component; learner and engines share if there are too few.

    Args:
        num_gpus: visible GPUs; 0 puts everything on the CPU.
        is_overlapped: whether learner and engines work at the same time (grpo_async.py).
        on_cluster: whether engines, scorers, and several learner ranks are on the GPUs of a Ray cluster. `num_gpus`
            does not include these GPUs.
    Raises:
        ConfigError: device lists overlap, repeat an index or leave the range, or a request cannot be met.
    """
    inference, ranks = config.inference_model, config.train_model.ranks
    sections = ("train_model", "ref_model", "inference_model")
    train, reference, generate = (_DeviceRequest.from_config(config, section) for section in sections)
    requests = [train, reference, generate] if config.policy.uses_reference else [train, generate]
    has_servers = bool(inference.urls)
    if has_servers:
        requests.remove(generate)
    _check_nodes(config, on_cluster)
    _check_lists(requests, num_gpus, inference.colocate)
    if num_gpus == 0:
        return _on_cpu(config, on_cluster)
    colocated, notes = False, tuple[str, ...]()
    if not on_cluster and not has_servers:
        colocated, notes = _choose_colocation(requests, inference, num_gpus, is_overlapped)
    reserved = {device for request in requests for device in request.listed_devices}
    free = [device for device in range(num_gpus) if device not in reserved]
    train_devices = tuple(range(ranks)) if on_cluster and ranks > 1 else _allocate(free, train)
    engine_devices: tuple[int, ...] = (
        () if on_cluster or has_servers else _allocate(free, generate, train_devices if colocated else ())
    )
    # The free GPUs of a cluster are unknown.
    has_spare_gpu = bool(free) and not on_cluster and ranks == 1 and _shared_home(config) == "shared"
    scorers = (reference.count or int(has_spare_gpu)) if reference in requests else 0
    reference_devices: tuple[int, ...] = tuple(range(scorers))
    if scorers and not on_cluster:
        reference_devices = _allocate(free, replace(reference, num_devices=scorers))
    size = inference.tensor_parallel_size
    engines = tuple(engine_devices[start : start + size] for start in range(0, len(engine_devices), size))
    first = () if has_servers else tuple(range(size))  # GPUs of an engine in this process
    return DevicePlan(
        ranks=ranks,
        ranks_per_node=ranks // config.train_model.num_nodes,
        train=train_devices,
        scorers=scorers,
        reference=reference_devices,
        engines=engines or (first,) * inference.num_engines,
        reference_home="own devices" if scorers else _shared_home(config),
        in_process=has_servers or (colocated and engines == (first,) and not config.ray.enabled),
        colocated=colocated,
        on_cluster=on_cluster,
        notes=notes,
    )


def needed_nodes(config: Config, gpus_per_node: int) -> int:
    """Returns the number of nodes that learner, engines and scorers need together.

    A learner on one node needs one.
    """
    nodes, inference = config.train_model.num_nodes, config.inference_model
    if nodes == 1 or gpus_per_node == 0:
        return nodes
    engine_gpus = 0 if inference.urls else inference.num_devices
    scorer_gpus = config.ref_model.ranks if config.policy.uses_reference else 0
    return max(nodes, -(-(config.train_model.ranks + engine_gpus + scorer_gpus) // gpus_per_node))


def _check_nodes(config: Config, on_cluster: bool) -> None:
    model = config.train_model
    if model.num_nodes > 1 and not on_cluster:
        remedy = (
            "give the address of the cluster, such as ray.address=auto"
            if config.machine.gpus is None
            else f"set machine.nodes={needed_nodes(config, config.machine.gpus)}"
        )
        raise ConfigError(
            f"train_model.num_nodes={model.num_nodes}: several nodes need a Ray cluster; {remedy}, or set "
            "train_model.num_nodes=1"
        )
    if on_cluster and model.ranks > 1 and model.devices is not None:
        raise ConfigError(
            f"train_model.devices={model.devices}: the {model.ranks} learner ranks are on a Ray cluster, which chooses "
            "their GPUs; give train_model.num_devices alone"
        )
    reference = config.ref_model
    if on_cluster and reference.devices is not None and config.policy.uses_reference:
        raise ConfigError(
            f"ref_model.devices={reference.devices}: scorers are on the Ray cluster, which chooses their GPUs; give "
            f"ref_model.num_devices={reference.ranks or 1} alone"
        )


def _check_lists(requests: list[_DeviceRequest], num_gpus: int, colocate: bool) -> None:
    for request in requests:
        place = f"{request.section}.devices={request.devices}"
        check_minimum(f"{request.section}.num_devices", request.num_devices, 1)
        if request.devices is None:
            continue
        if not isinstance(request.devices, Iterable) or isinstance(request.devices, str):
            raise ConfigError(f"{place}: give a list of device indices, such as [0,1], or null")
        devices = list(request.devices)
        if not devices or any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in devices):
            raise ConfigError(f"{place}: give at least one device index, all of them integers from 0")
        if num_gpus == 0:
            raise ConfigError(f"{place}: this machine has no GPU; set null to run on the CPU")
        if len(set(devices)) < len(devices):
            raise ConfigError(f"{place}: a device is listed twice; list each once")
        outside = [device for device in devices if device >= num_gpus]
        if outside:
            raise ConfigError(f"{place}: {outside} do not exist; this machine has GPUs 0 to {num_gpus - 1}")
        if request.num_devices not in (None, 1, len(devices)):
            raise ConfigError(
                f"{place} has {len(devices)} entries but {request.section}.num_devices={request.num_devices}: "
                "set only one of the two keys"
            )
    lists = {request.section: request.listed_devices for request in requests}
    for first, second in combinations(lists, 2):
        shared = sorted(set(lists[first]) & set(lists[second]))
        may_take_turns = {first, second} == {"train_model", "inference_model"}
        if shared and not (colocate and may_take_turns):
            turns = ", or set inference_model.colocate=true for learner and engines" if may_take_turns else ""
            raise ConfigError(
                f"{first}.devices={list(lists[first])} and {second}.devices={list(lists[second])} share "
                f"{shared}: give each its own{turns}"
            )


def _on_cpu(config: Config, on_cluster: bool) -> DevicePlan:
    inference, model = config.inference_model, config.train_model
    if model.offload != "none":
        raise ConfigError(
            f"train_model.offload={model.offload}: this machine has no GPU, and everything is in host memory "
            "already; set train_model.offload=none"
        )
    idle = "inference_model.colocate has no effect on a CPU: there is no GPU memory to share"
    engines = inference.num_engines
    scorers = config.ref_model.ranks if config.policy.uses_reference else 0
    return DevicePlan(
        ranks=model.ranks,
        ranks_per_node=model.ranks // model.num_nodes,
        scorers=scorers,
        engines=((),) * engines,
        reference_home="own devices" if scorers else _shared_home(config),
        in_process=bool(inference.urls) or (engines == 1 and not config.ray.enabled and not on_cluster),
        on_cluster=on_cluster,
        notes=(idle,) if inference.colocate else (),
    )


def _shared_home(config: Config) -> ReferenceHome:
    """Returns the location of a reference without devices of its own.

    Under LoRA the reference is the policy's own base, unless another model is named.
    """
    if not config.policy.uses_reference:
        return "none"
    if config.train_model.lora.enabled and config.ref_model.name is None:
        return "base of the LoRA policy"
    return "learner ranks" if config.train_model.ranks > 1 else "shared"


def _choose_colocation(
    requests: list[_DeviceRequest], inference: InferenceModelConfig, num_gpus: int, is_overlapped: bool
) -> tuple[bool, tuple[str, ...]]:
    """Decides whether learner and engines take turns on the GPUs, with notes for the user.

    Raises:
        ConfigError: `tensor_parallel_size` does not divide the engines' devices, the requests need more GPUs than
            there are, or learner and engines of grpo_async.py would take turns.
    """
    train, generate = requests[0], requests[-1]
    engine_gpus, train_gpus = generate.count, train.count
    if engine_gpus % inference.tensor_parallel_size:
        raise ConfigError(
            f"inference_model.tensor_parallel_size={inference.tensor_parallel_size} does not divide the "
            f"{engine_gpus} devices of inference_model.devices={generate.devices}: set a divisor"
        )
    scorers = sum(one.count for one in requests[1:-1])
    in_turns = scorers + max(train_gpus, engine_gpus)
    needed = in_turns if inference.colocate else scorers + train_gpus + engine_gpus
    if scorers and needed > num_gpus:
        helps = in_turns <= num_gpus and not is_overlapped
        key = "ref_model.devices" if requests[1].listed_devices else "ref_model.num_devices"
        turns = ", or let learner and engines take turns (inference_model.colocate=true)" if helps else ""
        raise ConfigError(
            f"{', '.join(one.setting for one in requests)}: {needed} GPUs are requested, and this machine has "
            f"{num_gpus} GPU(s): lower one of them, leave {key} unset, so that the reference takes none of its "
            f"own{turns}"
        )
    if max(train_gpus, engine_gpus) > num_gpus:
        raise ConfigError(
            f"{train.setting}, {generate.setting}: this machine has {num_gpus} GPU(s); lower the larger "
            "value, or use a machine with more GPUs"
        )
    if not inference.colocate and train_gpus + engine_gpus <= num_gpus:
        return False, ()
    if is_overlapped:
        raise ConfigError(
            f"{generate.setting} and {train.setting} must take turns on {num_gpus} GPU(s), but grpo_async.py "
            "runs learner and engines at the same time: use grpo.py, or more GPUs"
        )
    note = (
        f"{num_gpus} GPU(s) for {train_gpus} of train_model and {engine_gpus} of inference_model: they take turns, as "
        "with inference_model.colocate=true"
    )
    return True, () if inference.colocate else (note,)


def _allocate(free: list[int], request: _DeviceRequest, shared: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Returns the devices of a request: the listed ones, else from `shared` and `free`.

    Raises:
        ConfigError: the device lists of other components leave too few devices.
    """
    if request.listed_devices:
        return request.listed_devices
    missing = request.count - len(shared)
    if missing > len(free):
        raise ConfigError(
            f"{request.setting}: only {len(free) + len(shared)} GPU(s) are left by the `devices` lists of the "
            "other components; shorten those lists, or lower num_devices"
        )
    allocated = [free.pop(0) for _ in range(max(0, missing))]
    return (*shared[: request.count], *allocated)
