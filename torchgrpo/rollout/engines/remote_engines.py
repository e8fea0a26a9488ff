"""Engine handles for calls and stack dumps from any process, and exceptions about lost engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from config.schema.errors import RunError
from torchgrpo.cluster.actor_calls import CallReference, failure_cause, wait_for_all

_STACKS_S = 5.0


class EngineLost(RunError):
    """An engine failed for good.

    The message has the engine, its devices and its own traceback.
    """


class EngineLostInCall(EngineLost):
    """An engine was lost in a call that needs all engines.

    Another engine starts in its slot. The remaining engines may have executed a part of the call.
    """


def engine_loss_message(loss_reasons: Mapping[str, str], method: str) -> str:
    """Returns the message of an `EngineLostInCall`. loss_reasons: cause of each loss, by engine title."""
    reason = "; ".join(dict.fromkeys(each.rstrip(".") for each in loss_reasons.values()))
    return f"{reason}: {', '.join(loss_reasons)} was lost during {method}, which needs every engine"


@dataclass(frozen=True)
class EngineHandle:
    """Handle of a live engine. title: its devices and state, for messages."""

    pid: int
    title: str
    actor: Any


@dataclass(frozen=True)
class RemoteEngines:
    """Live engines for another process than the driver, which cannot replace lost engines; see `LiveEngines`."""

    engines: tuple[EngineHandle, ...]
    timeout_s: float

    @property
    def engine_pids(self) -> tuple[int, ...]:
        return tuple(handle.pid for handle in self.engines)

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Calls a method of every engine, as `EngineSupervisor.call_each`; late engines count as lost."""
        pairs = zip(self.engines, arguments, strict=True)
        calls = {handle.actor.call.remote(method, own): handle for handle, own in pairs}
        finished_calls = wait_for_all(calls, self.timeout_s)
        late = f"no answer within {self.timeout_s:.0f} s"
        reasons = {handle: _loss_reason(ref) if ref in finished_calls else late for ref, handle in calls.items()}
        loss_reasons = {handle.title: reason for handle, reason in reasons.items() if reason is not None}
        if loss_reasons:
            raise EngineLostInCall(engine_loss_message(loss_reasons, method))
        return [ray.get(ref) for ref in calls]

    def remote_engines(self) -> "RemoteEngines":
        return self

    def stacks(self) -> str:
        return dump_stacks(self.engines)


def dump_stacks(handles: Sequence[EngineHandle]) -> str:
    """Returns the stack traces of all threads of these engines."""
    calls = {handle.actor.stacks.options(concurrency_group="watch").remote(): handle for handle in handles}
    finished_calls = wait_for_all(calls, _STACKS_S)
    dumps = []
    for ref, handle in calls.items():
        stack = f"no answer within {_STACKS_S:.0f} s (pid {handle.pid})"
        if ref in finished_calls:
            try:
                stack = str(ray.get(ref))
            except Exception as error:  # any error: the stacks accompany the message of another error
                stack = str(error).splitlines()[0]
        dumps.append(f"--- {handle.title}\n{stack}")
    return "\n".join(dumps)


def _loss_reason(ref: CallReference) -> str | None:
    """Returns why the engine of a call died, or None if it lives."""
    try:
        ray.get(ref)
    except (RayActorError, ObjectLostError) as error:
        return failure_cause(error)
    except Exception:  # an error of the engine itself, which `call_each` raises if no engine died
        return None
    return None
