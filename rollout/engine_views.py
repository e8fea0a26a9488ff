"""Several users of one engine: each is handed the responses to its own requests and nobody else's.

    training ─▶ view ─┐
                      ├─▶ engine          evaluation runs while groups of training are in flight
    evaluation ▶ view ┘

All views of an engine are used in one thread.
"""

from rollout.engines.sampler import Request, Response, SteppedEngine


class SharedEngine:
    """Knows which view each request came from."""

    def __init__(self, engine: SteppedEngine) -> None:
        self.engine = engine
        self._owners: dict[int, EngineView] = {}

    def view(self) -> "EngineView":
        return EngineView(self)

    def submit(self, request: Request, owner: "EngineView") -> None:
        """Raises ValueError when a request of this id is in flight."""
        if request.request_id in self._owners:
            raise ValueError(f"request {request.request_id} is in flight for another user of the engine")
        self._owners[request.request_id] = owner
        self.engine.submit(request)

    def step(self, timeout: float) -> None:
        """Advance everybody's requests; a response that was given up is dropped."""
        for response in self.engine.step(timeout):
            owner = self._owners.pop(response.request_id, None)
            if owner is not None:
                owner.arrived.append(response)

    def give_up(self, owner: "EngineView") -> None:
        self._owners = {key: other for key, other in self._owners.items() if other is not owner}

    def count(self, owner: "EngineView") -> int:
        return sum(other is owner for other in self._owners.values())


class EngineView:
    """One user's side of a shared engine (see `rollout.engines.sampler.SteppedEngine` for the protocol)."""

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared
        self.arrived: list[Response] = []

    @property
    def policy_version(self) -> int:
        return self.shared.engine.policy_version

    @property
    def in_flight(self) -> int:
        return self.shared.count(self) + len(self.arrived)

    def submit(self, request: Request) -> None:
        self.shared.submit(request, self)

    def step(self, timeout: float) -> list[Response]:
        if not self.arrived:
            self.shared.step(timeout)
        arrived, self.arrived = self.arrived, []
        return arrived

    def give_up(self) -> None:
        """Forget everything in flight; what the engine still finishes of it is dropped."""
        self.shared.give_up(self)
        self.arrived = []

    def close(self) -> None:
        self.shared.engine.close()
