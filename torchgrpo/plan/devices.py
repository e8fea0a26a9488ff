"""The allocation of devices to learner, reference and engines. Touches no device; no torch here.

    GPUs    0            1            2            3            4            5
            rank 0       rank 1       inference    inference    scorer 0     scorer 1     ref_model.num_devices=2
            rank 0       rank 1       inference    inference      unset: a reference is sharded over the ranks too
            learner      inference    scorer                      one rank: the driver's process
            one GPU for all: engine and learner take turns, the reference needs none of its own

`num_devices` per component is all that a user has to give. Indices are those that a process sees (after
CUDA_VISIBLE_DEVICES).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from config.schema.checks import devices_asked
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.inference import InferenceModelConfig
from config.schema.registry import Registry
from config.schema.values import at_least

ReferenceHome = Literal["none", "own devices", "base of the LoRA policy", "learner ranks", "shared"]
"""`own devices`: scorer ranks, which are Ray actors. `learner ranks`: sharded over them beside the policy. `shared`: no
device is left for it alone, and `plan/make_plan.py` finds it a place."""
TRANSPORTS = Registry("transport", "torchgrpo.rollout.weights.transports", "make_transport")
"""Ways of weights into the engines of a pool; `in_process`, where there is no pool, is none of them."""


@dataclass(frozen=True)
class _Request:
    """The devices that one section asks for: `num_devices` of them, or `by_hand`, by index.

    num_devices: None leaves it to the plan. typed: the setting that asks for them.
    """

    section: str
    num_devices: int | None
    devices: Any
    typed: str

    @classmethod
    def of(cls, config: Config, section: str) -> "_Request":
        asked = vars(config)[section]
        return cls(section, asked.num_devices, asked.devices, devices_asked(config, section))

    @property
    def by_hand(self) -> tuple[int, ...]:
        return tuple(self.devices or ())

    @property
    def count(self) -> int:
        return len(self.by_hand) or self.num_devices or 0


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """Who has which devices.

    ranks: processes of the learner. One is the driver's own process; several are Ray actors, and the driver has no
        model.
    ranks_per_node: how many of them lie on one machine.
    train: a GPU index for each rank. scorers: processes of a reference with devices of its own, Ray actors; reference:
    a GPU index for each of them. Both lists are empty on a CPU.
    engines: one tuple of GPU indices for each engine; empty tuples on a CPU.
    On a Ray cluster, which chooses the GPUs, only the number of those of engines, scorers and several ranks counts.
    in_process: the one engine lives in the driver's process; otherwise every engine is a Ray actor.
    colocated: engines and learner use the same GPUs in turns.
    notes: what was decided for the user, one sentence each.
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
        """Scorers of one machine, if they lie as the learner's ranks do."""
        return -(-self.scorers * self.ranks_per_node // self.ranks)

    @property
    def learner_place(self) -> str:
        ranks = f"{self.ranks} ranks, " if self.ranks > 1 else ""
        if self.on_cluster and self.ranks > 1:
            return f"{ranks}of the cluster"
        gpus = ",".join(map(str, self.train))
        return ranks + (f"GPU {gpus}" if gpus else "CPU")

    @property
    def train_device(self) -> str:
        """The learner's first device as torch names it, on the machine that this rank is on."""
        return f"cuda:{self.train[0]}" if self.train else "cpu"


def transport(devices: DevicePlan, native: bool) -> str:
    """How weights travel from the learner to the engines.

    native: whether the engines speak vLLM's own transfer of full weights, and the learner has them on a GPU.
    """
    if devices.in_process:
        return "in_process"
    used = {device for engine in devices.engines for device in engine}
    if devices.on_cluster:
        return "nccl" if native and used else "object_store"
    if not native or not used:
        return "shared_memory"
    if not used & set(devices.train):
        return "nccl"
    return "ipc" if used == set(devices.train) and len(used) == 1 else "shared_memory"


def plan_devices(
    config: Config, num_gpus: int, overlapped: bool = False, cluster: bool = False
) -> DevicePlan:
    """Give each component devices of its own; they share where there are fewer than they ask for.

    Args:
        num_gpus: 0 puts everything on the CPU.
        overlapped: learner and engines work at the same time (grpo_async.py).
        cluster: engines, scorers, and the learner's ranks if there are several, live on a Ray cluster's GPUs, which
            are not counted in `num_gpus`.
    Raises:
        ConfigError: lists that overlap, repeat or leave the range; requests that cannot be met.
    """
    inference, ranks = config.inference_model, config.train_model.ranks
    sections = ("train_model", "ref_model", "inference_model")
    train, reference, generate = (_Request.of(config, section) for section in sections)
    requests = [train, reference, generate] if config.policy.uses_reference else [train, generate]
    _check_nodes(config, cluster)
    _check_lists(requests, num_gpus, inference.colocate)
    if num_gpus == 0:
        return _on_cpu(config, cluster)
    colocated, notes = (False, ()) if cluster else _takes_turns(requests, inference, num_gpus, overlapped)
    reserved = {device for request in requests for device in request.by_hand}
    free = [device for device in range(num_gpus) if device not in reserved]
    train_at = tuple(range(ranks)) if cluster and ranks > 1 else _take(free, train)
    flat: tuple[int, ...] = () if cluster else _take(free, generate, train_at if colocated else ())
    # On a cluster nobody knows what is free.
    spare = bool(free) and not cluster and ranks == 1 and _shared_home(config) == "shared"
    scorers = (reference.count or int(spare)) if reference in requests else 0
    reference_at: tuple[int, ...] = tuple(range(scorers))
    if scorers and not cluster:
        reference_at = _take(free, replace(reference, num_devices=scorers))
    size = inference.tensor_parallel_size
    engines = tuple(flat[start : start + size] for start in range(0, len(flat), size))
    first = tuple(range(size))  # that this process sees: an engine in it takes these
    return DevicePlan(
        ranks=ranks,
        ranks_per_node=ranks // config.train_model.num_nodes,
        train=train_at,
        scorers=scorers,
        reference=reference_at,
        engines=engines or (first,) * inference.num_engines,
        reference_home="own devices" if scorers else _shared_home(config),
        in_process=colocated and engines == (first,) and not config.ray.enabled,
        colocated=colocated,
        on_cluster=cluster,
        notes=notes,
    )


def _check_nodes(config: Config, cluster: bool) -> None:
    model = config.train_model
    if model.num_nodes > 1 and not cluster:
        nodes = f"plan.nodes={model.num_nodes}"
        remedy = "give its address, such as ray.address=auto" if config.plan.gpus is None else f"set {nodes}"
        raise ConfigError(
            f"train_model.num_nodes={model.num_nodes}: several nodes are a Ray cluster; {remedy}, or leave num_nodes "
            "at 1"
        )
    if cluster and model.ranks > 1 and model.devices is not None:
        raise ConfigError(
            f"train_model.devices={model.devices}: the {model.ranks} learner ranks are on a Ray cluster, which chooses "
            "their GPUs; give train_model.num_devices alone"
        )
    reference = config.ref_model
    if cluster and reference.devices is not None and config.policy.uses_reference:
        raise ConfigError(
            f"ref_model.devices={reference.devices}: scorers are on the Ray cluster, which chooses their GPUs; give "
            f"ref_model.num_devices={reference.ranks or 1} alone"
        )


def _check_lists(requests: list[_Request], num_gpus: int, colocate: bool) -> None:
    for request in requests:
        place = f"{request.section}.devices={request.devices}"
        at_least(f"{request.section}.num_devices", request.num_devices, 1)
        if request.devices is None:
            continue
        if not isinstance(request.devices, Iterable) or isinstance(request.devices, str):
            raise ConfigError(f"{place}: give a list of device indices, such as [0,1], or null")
        devices = list(request.devices)
        if not devices or any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in devices):
            raise ConfigError(f"{place}: give at least one device index, all of them integers from 0")
        if num_gpus == 0:
            raise ConfigError(f"{place}: there is no GPU here; leave it null to run on the CPU")
        if len(set(devices)) < len(devices):
            raise ConfigError(f"{place}: a device is listed twice; list each once")
        outside = [device for device in devices if device >= num_gpus]
        if outside:
            raise ConfigError(f"{place}: {outside} do not exist; this machine has GPUs 0 to {num_gpus - 1}")
        if request.num_devices not in (None, 1, len(devices)):
            raise ConfigError(
                f"{place} has {len(devices)} entries but {request.section}.num_devices={request.num_devices}: give "
                "one of the two"
            )
    hand = {one.section: one.by_hand for one in requests}
    for first, second in combinations(hand, 2):
        shared = sorted(set(hand[first]) & set(hand[second]))
        may_take_turns = {first, second} == {"train_model", "inference_model"}
        if shared and not (colocate and may_take_turns):
            turns = ", or set inference_model.colocate=true for learner and engines" if may_take_turns else ""
            raise ConfigError(
                f"{first}.devices={list(hand[first])} and {second}.devices={list(hand[second])} share "
                f"{shared}: give each its own{turns}"
            )


def _on_cpu(config: Config, cluster: bool) -> DevicePlan:
    inference, model = config.inference_model, config.train_model
    if model.offload != "none":
        raise ConfigError(
            f"train_model.offload={model.offload}: there is no GPU here, everything is in host memory already; take "
            "none"
        )
    idle = "inference_model.colocate does nothing on a CPU: there is no GPU memory to take turns on"
    engines = inference.num_engines
    scorers = config.ref_model.ranks if config.policy.uses_reference else 0
    return DevicePlan(
        ranks=model.ranks,
        ranks_per_node=model.ranks // model.num_nodes,
        scorers=scorers,
        engines=((),) * engines,
        reference_home="own devices" if scorers else _shared_home(config),
        in_process=engines == 1 and not config.ray.enabled and not cluster,
        on_cluster=cluster,
        notes=(idle,) if inference.colocate else (),
    )


def _shared_home(config: Config) -> ReferenceHome:
    """The reference's home without devices of its own; under adapters lies the policy's own base."""
    if not config.policy.uses_reference:
        return "none"
    if config.train_model.lora.enabled and config.ref_model.name is None:
        return "base of the LoRA policy"
    return "learner ranks" if config.train_model.ranks > 1 else "shared"


def _takes_turns(
    requests: list[_Request], inference: InferenceModelConfig, there: int, overlapped: bool
) -> tuple[bool, tuple[str, ...]]:
    """Whether learner and engines share the GPUs that are there, and what to say about it."""
    train, generate = requests[0], requests[-1]
    wanted, trained = generate.count, train.count
    if wanted % inference.tensor_parallel_size:
        raise ConfigError(
            f"inference_model.tensor_parallel_size={inference.tensor_parallel_size} does not divide the {wanted} "
            f"devices of inference_model.devices={generate.devices}: take a divisor"
        )
    scorers = sum(one.count for one in requests[1:-1])
    in_turns = scorers + max(trained, wanted)
    needed = in_turns if inference.colocate else scorers + trained + wanted
    if scorers and needed > there:
        helps = in_turns <= there and not overlapped
        key = "ref_model.devices" if requests[1].by_hand else "ref_model.num_devices"
        turns = ", or let learner and engines take turns (inference_model.colocate=true)" if helps else ""
        raise ConfigError(
            f"{', '.join(one.typed for one in requests)}: {needed} GPUs are asked for, and this machine has {there} "
            f"GPU(s): lower one of them, leave {key} unset, so that the reference takes none of its own{turns}"
        )
    if max(trained, wanted) > there:
        raise ConfigError(
            f"{train.typed}, {generate.typed}: this machine has {there} GPU(s); lower the larger one, or use a "
            "machine with more"
        )
    if not inference.colocate and trained + wanted <= there:
        return False, ()
    if overlapped:
        raise ConfigError(
            f"{generate.typed} and {train.typed} must take turns on {there} GPU(s), but grpo_async.py works on both at "
            "once: use grpo.py, or more GPUs"
        )
    note = (
        f"{there} GPU(s) for {trained} of train_model and {wanted} of inference_model: they take turns, as "
        "with inference_model.colocate=true"
    )
    return True, () if inference.colocate else (note,)


def _take(free: list[int], request: _Request, shared: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The devices given by hand, else `shared` ones first and then those off the `free` ones.

    Raises:
        ConfigError: devices given by hand to other components leave too few.
    """
    if request.by_hand:
        return request.by_hand
    missing = request.count - len(shared)
    if missing > len(free):
        raise ConfigError(
            f"{request.typed}: only {len(free) + len(shared)} GPU(s) are left by the `devices` lists of the other "
            "components; shorten those, or lower num_devices"
        )
    new = [free.pop(0) for _ in range(max(0, missing))]
    return (*shared[: request.count], *new)
