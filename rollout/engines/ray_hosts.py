"""Engines in Ray actors: calls that answer with references, and what these bring. Beside ray_runtime.py the only file
of the pool that calls Ray."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rollout.engines.host import WeightHandle
from rollout.engines.ray_runtime import EnginePlace, start_host
from rollout.engines.sampler import Engine, Request

Reference = Any


class HostLost(Exception):
    """The actor died before it answered."""


class HostFailed(Exception):
    """The call raised; the text is the remote traceback. cause: the exception itself."""

    def __init__(self, text: str, cause: Any) -> None:
        super().__init__(text)
        self.cause = cause


class RayHost:
    """One engine in an actor of its own (`rollout.engines.host.EngineHost`). Each call returns at once."""

    def __init__(self, place: EnginePlace, num_cpus: int) -> None:
        self._actor = start_host(place, num_cpus)

    def start(self, factory: Callable[[], Engine]) -> Reference:
        return self._actor.start.remote(factory)

    def submit(self, requests: Sequence[Request]) -> Reference:
        return self._actor.submit.remote(requests)

    def poll(self, timeout: float) -> Reference:
        return self._actor.poll.options(concurrency_group="poll").remote(timeout)

    def load(self, handle: WeightHandle, version: int) -> Reference:
        return self._actor.load.remote(handle, version)

    def score(self, sequences: Sequence[Sequence[int]]) -> Reference:
        return self._actor.score.remote(sequences)

    def call(self, method: str, arguments: dict[str, Any]) -> Reference:
        """Any other method of the engine."""
        return self._actor.call.remote(method, arguments)

    def stacks(self) -> Reference:
        return self._actor.stacks.options(concurrency_group="watch").remote()

    def close(self) -> Reference:
        return self._actor.close.remote()

    def terminate(self) -> Reference:
        """The process ends as if by itself, so that it cleans up."""
        return self._actor.__ray_terminate__.remote()

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


def wait_for_any(references: Collection[Reference], timeout: float) -> list[Reference]:
    """Wait until one of them has an outcome, at most `timeout` seconds; all that have one by then."""
    import ray

    ray.wait(list(references), timeout=timeout)
    return list(ray.wait(list(references), num_returns=len(references), timeout=0)[0])


def wait_for_all(references: Collection[Reference], timeout: float) -> list[Reference]:
    """Wait until all of them have an outcome, at most `timeout` seconds; those that have one by then."""
    import ray

    calls = list(references)
    return list(ray.wait(calls, num_returns=len(calls), timeout=timeout)[0]) if calls else []


def outcome(reference: Reference) -> Any:
    """What a call returned.

    Raises:
        HostLost, HostFailed: it returned nothing.
    """
    import ray
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    try:
        return ray.get(reference)
    except (RayActorError, ObjectLostError) as error:  # an answer lies where it was made until it is fetched
        raise HostLost(str(error).splitlines()[0]) from None
    except RayTaskError as error:
        raise HostFailed(str(error), error.cause) from None


def ray_runs() -> bool:
    import ray

    return bool(ray.is_initialized())


def leave_ray() -> None:
    import ray

    ray.shutdown()
