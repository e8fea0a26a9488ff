"""Ranks of a learner or a scorer: Ray actors that start and work together.

    driver ── the same method, each with its share ──▶ rank 0 ... rank N-1 ── collectives among themselves ──▶ answers

A call ends when all ranks have answered. One that died or raised takes the others along, for their collectives wait for
it: what happened to it is told first. Every wait has a deadline, and the stacks of all ranks are shown when it passes.
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
from torchgrpo.cluster.calls import (
    RAISED,
    Reference,
    cause_of,
    raised_in_construction,
    wait_for_all,
    wait_for_any,
)
from torchgrpo.cluster.runtime import Place, free_resources, start_actor, start_ray
from torchgrpo.training.rank_actor import CONCURRENCY_GROUPS, RankProcess, Sender

log = logging.getLogger(__name__)

_GRACE_S, _STACKS_S, _CLOSE_S = 3.0, 5.0, 10.0
LOADING = 3
"""Times `timeout_s` that a model may take to load: longer than anything that ranks wait for later."""


@dataclass(frozen=True)
class RankSettings:
    """How ranks are started and watched.

    nodes: of the cluster, with as many ranks on each. ray_cpus: of a local runtime, where this is the first to start
    it. timeout_s: that ranks may wait for one another, or the driver for one of them. asked: the settings that ask for
    them, for messages.
    """

    nodes: int
    ray_cpus: int
    on_gpu: bool
    timeout_s: float
    address: str | None = None
    asked: str = "train_model.num_devices"


class Ranks:
    """The actors of the class `host`, one for each of `places`; `start` comes first."""

    def __init__(self, places: Sequence[Place], settings: RankSettings, host: type[RankProcess]) -> None:
        self.places = list(places)
        self.settings = settings
        self.host = host
        self.actors: list[Any] = []
        self.process_ids: list[int] = []
        self._group: PlacementGroup | None = None
        self._sender: Sender | None = None
        self._meeting = Path(tempfile.mkdtemp(prefix="grpo_ranks_"))
        self._owns_ray = False

    def start(self) -> None:
        """Start all ranks at once, and wait until they have met.

        Raises:
            ConfigError: there is no room for them in the cluster.
            RankLost: a rank does not start; everything already started is taken down.
        """
        settings = self.settings
        try:
            self._owns_ray = start_ray(settings.address, settings.ray_cpus)
            self._group = self._promised()
            per_node = len(self.places) // settings.nodes
            for number, place in enumerate(self.places):
                group, bundle = self._group, number // per_node
                self.actors.append(start_actor(self.host, place, 1, CONCURRENCY_GROUPS, group, bundle))
            # The ranks find each other by a file, on a cluster by an address of rank 0.
            if settings.address is None:
                point = f"file://{self._meeting / 'store'}"
            else:
                (address,) = self.answers([self.actors[0].free_address.remote()], "its address")
                point = f"tcp://{address}"
            count, own = len(self.places), (settings.on_gpu, settings.timeout_s)
            calls = self.begin("join", [(rank, count, point, *own) for rank in range(count)])
            self.process_ids = self.answers(calls, "its start")
        except BaseException:
            self.close()
            raise

    def _promised(self) -> PlacementGroup:
        """Room for all ranks at once: one bundle a node."""
        settings = self.settings
        per_node = len(self.places) // settings.nodes
        bundle: dict[str, float] = {"CPU": per_node}
        if gpus := sum(place.num_gpus for place in self.places) // settings.nodes:
            bundle["GPU"] = gpus
        group: PlacementGroup = placement_group(
            [bundle] * settings.nodes, "STRICT_SPREAD" if settings.nodes > 1 else "PACK"
        )
        if not group.wait(settings.timeout_s if settings.address else _CLOSE_S):
            remove_placement_group(group)
            raise ConfigError(
                f"{settings.asked}: Ray has no room for {settings.nodes} x {bundle} ({free_resources()}); lower it, or "
                "join more nodes to the cluster"
            )
        return group

    def begin(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Reference]:
        """Call METHOD of every rank at once, each with its own arguments."""
        pairs = zip(self.actors, arguments, strict=True)
        return [getattr(actor, method).remote(*own) for actor, own in pairs]

    def begin_same(self, method: str, *arguments: Any) -> list[Reference]:
        """The same call of every rank."""
        return self.begin(method, [arguments] * len(self.actors))

    def answers(self, calls: Sequence[Reference], what: str, patience: int = 1) -> list[Any]:
        """What the ranks answered to a call that was begun, in their order.

        patience: how many times `timeout_s` it may take.

        Raises:
            RankLost: a rank died or raised, or it took too long. ConfigError: a rank raised one.
        """
        limit = patience * self.settings.timeout_s
        waiting = {ref: number for number, ref in enumerate(calls)}
        answered: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while waiting:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                late = ", ".join(str(self.places[number]) for number in waiting.values())
                raise RankLost(
                    f"{self.stacks()}\nthe run waited {limit:.0f} s for {what} of {late} (train.wait_timeout_s); "
                    "where, the stacks above say"
                )
            there = wait_for_any(waiting, min(remaining, 1.0))
            outcomes = {ref: _outcome(ref) for ref in there}
            if any(error is not None for _, error in outcomes.values()):
                # Those that follow soon as well: the first to be told of need not be the first that failed.
                ended = wait_for_all(waiting, _GRACE_S)
                failed = {waiting[ref]: error for ref in ended if (error := _outcome(ref)[1]) is not None}
                raise self._failure(what, failed)
            answered |= {waiting.pop(ref): answer for ref, (answer, _) in outcomes.items()}
        return [answered[number] for number in range(len(calls))]

    def send(self, sender: Sender, version: int, engines: Any) -> None:
        """A push from inside the ranks, straight to the engines.

        sender: what each rank does for it; the first call hands it to them, and it keeps its connections there.

        Raises: what the sender of the first rank returned. RankLost: it raised, or took too long.
        """
        if sender != self._sender:
            self.answers(self.begin_same("send_with", sender), "what it sends with")
            self._sender = sender
        # Twice as long, for those that gather are done long before the engines are.
        broken = self.answers(self.begin_same("send", version, engines), "its part of a push", patience=2)[0]
        if broken is not None:
            raise broken

    def _failure(self, method: str, failed: dict[int, Exception]) -> Exception:
        number = min(failed, key=lambda number: _after_others(failed[number]))
        error, place = failed[number], self.places[number]
        if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
            return ConfigError(f"{error.cause}\n({place})")
        if raised_in_construction(error):
            return RankLost(f"{error}\n{place} could not be made: {cause_of(error)}")
        if isinstance(error, DEATHS):
            # What Ray knows of a process that has ended, without its guesses.
            pid = re.search(r"pid: (\d+)", str(error))
            detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", str(error), re.DOTALL)
            who = f" (pid {pid.group(1)})" if pid else ""
            end = detail.group(1) if detail else str(error).splitlines()[0]
            return RankLost(
                f"{place} died in {method}{who}: {end} Something killed it, such as a lack of memory, or native "
                "code crashed; the system's log may say which"
            )
        stacks = f"{self.stacks()}\n" if _after_others(error) else ""
        return RankLost(f"{stacks}{error}\n{place} failed in {method}: {cause_of(error)}")

    def stacks(self) -> str:
        """What every thread of every rank is doing now."""
        calls = [actor.stacks.remote() for actor in self.actors]
        there = wait_for_all(calls, _STACKS_S)
        texts = [
            str(_outcome(ref)[1] or ray.get(ref)) if ref in there else f"no answer within {_STACKS_S:.0f} s"
            for ref in calls
        ]
        return "\n".join(f"--- {place}\n{text}" for place, text in zip(self.places, texts, strict=True))

    def close(self) -> None:
        """End the ranks; a rank that waits for another one is killed."""
        if ray.is_initialized():
            wait_for_all([actor.__ray_terminate__.remote() for actor in self.actors], _CLOSE_S)
            for actor in self.actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self.actors, self._group = [], None
        shutil.rmtree(self._meeting, ignore_errors=True)
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()


DEATHS = (RayActorError, ObjectLostError)
"""What Ray raises where a process is gone, or its node with the answer that it had given."""


def _outcome(ref: Reference) -> tuple[Any, Exception | None]:
    """What a call that has an outcome answered, or raised."""
    try:
        return ray.get(ref), None
    except (*DEATHS, *RAISED) as error:
        return None, error


def _after_others(error: Exception) -> int:
    """0 for a death, 1 for an error of the rank's own, 2 for a collective that another rank left."""
    if isinstance(error, DEATHS):
        return 0
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return 2 if any(sign in str(error) for sign in signs) else 1
