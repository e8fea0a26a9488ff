"""Starts rank actors in Ray, calls all of them together, and reports the first failure.

    driver ── the same method, each with its share ──▶ rank 0 ... rank N-1 ── collectives ──▶ answers

A call ends when all ranks have answered. A rank that dies or raises ends the call, since the collectives of
the other ranks wait for it; the error reports the first failure. Every wait has a deadline. When a deadline
passes, the error shows the stacks of all ranks.
"""

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from config.schema.errors import ConfigError, RankLost
from torchgrpo.cluster.actor_calls import (
    CALL_ERRORS,
    CallReference,
    failure_cause,
    is_constructor_error,
    wait_for_all,
    wait_for_any,
)
from torchgrpo.cluster.runtime import DeviceSlot, free_resources, start_actor, start_ray
from torchgrpo.training.rank_actor import CONCURRENCY_GROUPS, RankProcess, Sender

log = logging.getLogger(__name__)

_GRACE_S, _STACKS_S, _CLOSE_S = 3.0, 5.0, 10.0
_RESERVE_S = 60.0
"""Seconds in which a local Ray reserves the ranks' resources, which ranks that ended just before may still hold."""
LOADING_PATIENCE = 3
"""Factor on `timeout_s` for loading a model, which takes longer than any later call."""


@dataclass(frozen=True)
class RankSettings:
    """Settings by which ranks are started and watched.

    nodes: nodes of the cluster, with equally many ranks on each. ray_cpus: CPUs of a local Ray runtime, where
    these ranks are the first to start it. timeout_s: longest wait of ranks for one another, and of the driver
    for a rank. settings_text: the config settings that request the ranks, for messages.
    """

    nodes: int
    ray_cpus: int
    on_gpu: bool
    timeout_s: float
    address: str | None = None
    settings_text: str = "train_model.num_devices"


class Ranks:
    """The actors of `actor_class`, one for each device slot; call `start` first."""

    def __init__(self, slots: Sequence[DeviceSlot], settings: RankSettings, actor_class: type[RankProcess]) -> None:
        self.slots = list(slots)
        self.settings = settings
        self.actor_class = actor_class
        self.actors: list[Any] = []
        self.process_ids: list[int] = []
        self._group: PlacementGroup | None = None
        self._sender: Sender | None = None
        self._store_folder = Path(tempfile.mkdtemp(prefix="grpo_ranks_"))
        self._owns_ray = False

    def start(self) -> None:
        """Starts all ranks at once and waits until they have joined.

        Raises:
            ConfigError: the cluster has no room for the ranks.
            RankLost: a rank does not start; every started rank has been ended.
        """
        settings = self.settings
        try:
            self._owns_ray = start_ray(settings.address, settings.ray_cpus)
            self._group = self._reserve_resources()
            per_node = len(self.slots) // settings.nodes
            for number, slot in enumerate(self.slots):
                group, bundle = self._group, number // per_node
                self.actors.append(start_actor(self.actor_class, slot, 1, CONCURRENCY_GROUPS, group, bundle))
            # On one machine the ranks join through a file, on a cluster through an address of rank 0.
            if settings.address is None:
                point = f"file://{self._store_folder / 'store'}"
            else:
                (address,) = self.wait_for_answers([self.actors[0].free_address.remote()], "the address")
                point = f"tcp://{address}"
            count, options = len(self.slots), (settings.on_gpu, settings.timeout_s)
            calls = self.begin_call("join", [(rank, count, point, *options) for rank in range(count)])
            self.process_ids = self.wait_for_answers(calls, "the start")
        except BaseException:
            self.close()
            raise

    def _reserve_resources(self) -> PlacementGroup:
        """Reserves room for all ranks at once, one bundle per node. Raises ConfigError."""
        settings = self.settings
        per_node = len(self.slots) // settings.nodes
        bundle: dict[str, float] = {"CPU": per_node}
        if gpus := sum(slot.num_gpus for slot in self.slots) // settings.nodes:
            bundle["GPU"] = gpus
        group: PlacementGroup = placement_group(
            [bundle] * settings.nodes, "STRICT_SPREAD" if settings.nodes > 1 else "PACK"
        )
        if not group.wait(settings.timeout_s if settings.address else _RESERVE_S):
            remove_placement_group(group)
            raise ConfigError(
                f"{settings.settings_text}: Ray has no free resources for {settings.nodes} x {bundle} "
                f"({free_resources()}); request fewer devices, or join more nodes to the cluster"
            )
        return group

    def begin_call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[CallReference]:
        """Begins a method of every rank at once, each with its own arguments."""
        pairs = zip(self.actors, arguments, strict=True)
        return [getattr(actor, method).remote(*own) for actor, own in pairs]

    def begin_same_call(self, method: str, *arguments: Any) -> list[CallReference]:
        """Begins a method of every rank with the same arguments."""
        return self.begin_call(method, [arguments] * len(self.actors))

    def wait_for_answers(self, calls: Sequence[CallReference], subject: str, patience: int = 1) -> list[Any]:
        """Waits for the answers to a call; returns them in the order of the ranks.

        subject: name of the call or of its result, for messages. patience: factor on `timeout_s`.

        Raises:
            RankLost: a rank died or raised, or the call took too long.
            ConfigError: a rank raised a ConfigError.
        """
        limit = patience * self.settings.timeout_s
        waiting = {ref: number for number, ref in enumerate(calls)}
        answered: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while waiting:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                late = ", ".join(str(self.slots[number]) for number in waiting.values())
                raise RankLost(
                    f"{self.stacks()}\nthe run waited {limit:.0f} s for {subject} of {late} (train.wait_timeout_s); "
                    "see the stacks above"
                )
            answered_refs = wait_for_any(waiting, min(remaining, 1.0))
            outcomes = {ref: _call_outcome(ref) for ref in answered_refs}
            if any(error is not None for _, error in outcomes.values()):
                # Waits for failures that follow soon: the first reported failure need not be the first one.
                ended = wait_for_all(waiting, _GRACE_S)
                errors = {waiting[ref]: error for ref in ended if (error := _call_outcome(ref)[1]) is not None}
                raise self._lost_rank_error(subject, errors)
            answered |= {waiting.pop(ref): answer for ref, (answer, _) in outcomes.items()}
        return [answered[number] for number in range(len(calls))]

    def send(self, sender: Sender, version: int, engines: Any) -> None:
        """Pushes weights from the ranks straight to the engines.

        sender: work of each rank for a push; the first call sends it to the ranks, where it keeps its connections.

        Raises:
            RankLost: the sender raised, or took too long. Or else the exception that the first rank's sender
                returned.
        """
        if sender != self._sender:
            self.wait_for_answers(self.begin_same_call("set_sender", sender), "the sender setup")
            self._sender = sender
        # Twice the time: the ranks finish gathering long before the engines have received everything.
        error = self.wait_for_answers(self.begin_same_call("send", version, engines), "the weight push", patience=2)[0]
        if error is not None:
            raise error

    def _lost_rank_error(self, method: str, errors: dict[int, Exception]) -> Exception:
        """Returns the exception of the rank that failed first, most likely."""
        number = min(errors, key=lambda number: _blame_order(errors[number]))
        error, slot = errors[number], self.slots[number]
        if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
            return ConfigError(f"{error.cause}\n({slot})")
        if is_constructor_error(error):
            return RankLost(f"{error}\n{slot} could not be started: {failure_cause(error)}")
        if isinstance(error, DEATHS):
            # Ray's facts about the ended process, without its guesses at causes.
            pid = re.search(r"pid: (\d+)", str(error))
            detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", str(error), re.DOTALL)
            process = f" (pid {pid.group(1)})" if pid else ""
            end = detail.group(1) if detail else str(error).splitlines()[0]
            return RankLost(
                f"{slot} died in {method}{process}: {end} The process was killed, for instance for lack of "
                "memory, or native code crashed; check the system's log"
            )
        stacks = f"{self.stacks()}\n" if _blame_order(error) else ""
        return RankLost(f"{stacks}{error}\n{slot} failed in {method}: {failure_cause(error)}")

    def stacks(self) -> str:
        """Returns the stacks of all threads of all ranks."""
        calls = [actor.stacks.remote() for actor in self.actors]
        ended = wait_for_all(calls, _STACKS_S)
        texts = [
            str(_call_outcome(ref)[1] or ray.get(ref)) if ref in ended else f"no answer within {_STACKS_S:.0f} s"
            for ref in calls
        ]
        return "\n".join(f"--- {slot}\n{text}" for slot, text in zip(self.slots, texts, strict=True))

    def close(self) -> None:
        """Ends the ranks; a rank that waits for another one is killed."""
        if ray.is_initialized():
            wait_for_all([actor.__ray_terminate__.remote() for actor in self.actors], _CLOSE_S)
            for actor in self.actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self.actors, self._group = [], None
        shutil.rmtree(self._store_folder, ignore_errors=True)
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()


DEATHS = (RayActorError, ObjectLostError)
"""Exceptions of Ray where a process is gone, or the node that holds its answer."""


def _call_outcome(ref: CallReference) -> tuple[Any, Exception | None]:
    """Returns the answer of a finished call and None, or None and its exception."""
    try:
        return ray.get(ref), None
    except (*DEATHS, *CALL_ERRORS) as error:
        return None, error


def _blame_order(error: Exception) -> int:
    """Returns the order in which errors are blamed for a failed call.

    0 for a death, 1 for an error of the rank itself, 2 for a collective that another rank left.
    """
    if isinstance(error, DEATHS):
        return 0
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return 2 if any(sign in str(error) for sign in signs) else 1
