"""The engines of a pool as another process than the driver calls them, and what a call tells that lost one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from config.schema.errors import RunError
from torchgrpo.cluster.calls import Reference, cause_of, wait_for_all

_STACKS_S = 5.0


class EngineLost(RunError):
    """An engine failed for good; the text says which, where, and what its own traceback was."""


class CallBroken(EngineLost):
    """An engine was lost in a call that needs all of them. Another one starts in its place; the rest may have begun
    something with the call."""


def call_broken(lost: Mapping[str, str], method: str) -> str:
    """The message of a `CallBroken`. lost: why each engine was, by its title."""
    why = "; ".join(dict.fromkeys(each.rstrip(".") for each in lost.values()))
    return f"{why}: {', '.join(lost)} was lost during {method}, which needs every engine"


@dataclass(frozen=True)
class Member:
    """A live engine. title: its place and state, as a person reads it."""

    pid: int
    title: str
    actor: Any


@dataclass(frozen=True)
class RemoteEngines:
    """`Engines` for a process that cannot start another engine in the place of a lost one."""

    live: tuple[Member, ...]
    timeout_s: float

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(member.pid for member in self.live)

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """As `Supervisor.call_each`; an engine that does not answer in time counts as lost."""
        pairs = zip(self.live, arguments, strict=True)
        calls = {member.actor.call.remote(method, own): member for member, own in pairs}
        there = wait_for_all(calls, self.timeout_s)
        late = f"no answer within {self.timeout_s:.0f} s"
        found = {member: _death(ref) if ref in there else late for ref, member in calls.items()}
        lost = {member.title: why for member, why in found.items() if why is not None}
        if lost:
            raise CallBroken(call_broken(lost, method))
        return [ray.get(ref) for ref in calls]

    def elsewhere(self) -> "RemoteEngines":
        return self

    def stacks(self) -> str:
        return stacks_of(self.live)


def stacks_of(members: Sequence[Member]) -> str:
    """What every thread of these engines is doing now."""
    calls = {member.actor.stacks.options(concurrency_group="watch").remote(): member for member in members}
    there = wait_for_all(calls, _STACKS_S)
    told = []
    for ref, member in calls.items():
        stack = f"no answer within {_STACKS_S:.0f} s (pid {member.pid})"
        if ref in there:
            try:
                stack = str(ray.get(ref))
            except Exception as error:  # of whatever kind: this is told beside another error
                stack = str(error).splitlines()[0]
        told.append(f"--- {member.title}\n{stack}")
    return "\n".join(told)


def _death(ref: Reference) -> str | None:
    """Why the engine of a call died; None where it lives."""
    try:
        ray.get(ref)
    except (RayActorError, ObjectLostError) as error:
        return cause_of(error)
    except Exception:  # the engine's own, which `call_each` raises when none has died
        return None
    return None
