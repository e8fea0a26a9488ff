"""One evaluation of one set of prompts: a bounded number of groups in flight, each judged when it is done."""

import time

from tensordict import TensorDictBase

from envs.token_env import TokenEnv
from rollout.collector import EnginePolicy

FIRST_GROUP_ID = 1 << 39  # above every id that training uses; with the set's seed it fixes a problem's draws
_STEP_S = 0.05


class Evaluator:
    """Goes through `num_problems` prompts of `env`, in its order.

    Args:
        policy: its own user of the engines, with the set's sampling.
        in_flight: groups at a time.
        timeout: seconds in which at least one group must finish.
    """

    def __init__(
        self, env: TokenEnv, policy: EnginePolicy, num_problems: int, in_flight: int, timeout: float
    ) -> None:
        self.env = env
        self.policy = policy
        self.num_problems = num_problems
        self.in_flight = in_flight
        self.timeout = timeout
        self._begun = 0
        self._flying: dict[int, TensorDictBase] = {}
        self._deadline = time.monotonic() + timeout
        env.next_group_id = FIRST_GROUP_ID

    @property
    def done(self) -> bool:
        return self._begun == self.num_problems and not self._flying

    def advance(self, seconds: float) -> list[tuple[int, TensorDictBase]]:
        """Generate and judge for about this long, less where the end comes first.

        Returns:
            (index of the problem, its scored group) of those that finished, in any order.

        Raises:
            TimeoutError: no group finished in time.
        """
        finished: list[tuple[int, TensorDictBase]] = []
        until = time.monotonic() + seconds
        while not self.done and time.monotonic() < until:
            self._admit()
            for response in self.policy.engine.step(_STEP_S):
                group = self._flying.pop(response.request_id)
                scored = self.env.step(self.policy.fill(group, [response]))
                finished.append((response.request_id - FIRST_GROUP_ID, scored))
                self._deadline = time.monotonic() + self.timeout
            if time.monotonic() > self._deadline:
                raise TimeoutError(
                    f"the evaluation waited {self.timeout:.0f} s (inference_model.request_timeout_s) for the engine "
                    f"to finish any of {len(self._flying)} groups"
                )
        return finished

    def _admit(self) -> None:
        while self._begun < self.num_problems and len(self._flying) < self.in_flight:
            group = self.env.groups(1)
            (request,) = self.policy.requests(group)
            self._flying[request.request_id] = group
            self.policy.engine.submit(request)
            self._begun += 1
