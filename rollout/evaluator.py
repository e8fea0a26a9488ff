"""One evaluation of one set of prompts: a bounded number of groups in the engines, each judged as it is answered."""

import time

from tensordict import TensorDictBase

from config.errors import DeadlineError
from rollout.collector import Rollouts, StreamedGroup

FIRST_GROUP_ID = 1 << 39  # above every id that training uses; with the set's seed it fixes a problem's draws
_STEP_S = 0.05


class Evaluator:
    """Goes through `num_problems` prompts of the rollouts' environment, in its order.

    Args:
        rollouts: its own user of the engines, with the set's prompts and sampling.
        in_flight: groups that the engines hold at a time.
        timeout: seconds in which the engines must finish at least one group.
    """

    def __init__(self, rollouts: Rollouts, num_problems: int, in_flight: int, timeout: float) -> None:
        self.rollouts = rollouts
        self.num_problems = num_problems
        self.in_flight = in_flight
        self.timeout = timeout
        self._begun = 0
        self._generating: dict[int, StreamedGroup] = {}
        self._judging: dict[int, StreamedGroup] = {}
        self._deadline = time.monotonic() + timeout
        rollouts.env.next_group_id = FIRST_GROUP_ID

    @property
    def done(self) -> bool:
        return self._begun == self.num_problems and not self._generating and not self._judging

    def advance(self, seconds: float) -> list[tuple[int, TensorDictBase]]:
        """Generate and judge for about this long, less where the end comes first.

        Returns:
            (index of the problem, its scored group) of those that finished, in any order.

        Raises:
            DeadlineError: the engines finished no group in time.
        """
        finished: list[tuple[int, TensorDictBase]] = []
        until = time.monotonic() + seconds
        while not self.done and time.monotonic() < until:
            self._admit()
            if self._generating:
                self._generate()
            for group_id in self.rollouts.env.judged(0.0 if self._generating else _STEP_S):
                group = self.rollouts.assemble([self._judging.pop(group_id)])
                finished.append((group_id - FIRST_GROUP_ID, group))
        return finished

    def _admit(self) -> None:
        room = min(self.in_flight - len(self._generating), self.num_problems - self._begun)
        for group in self.rollouts.begin(room) if room else ():
            self._generating[group.request.request_id] = group
            self.rollouts.policy.engine.submit(group.request)
        self._begun += room

    def _generate(self) -> None:
        """One engine step; what it finishes goes to the graders."""
        responses = self.rollouts.policy.engine.step(_STEP_S)
        if not responses and time.monotonic() > self._deadline:
            raise DeadlineError(
                f"the evaluation waited {self.timeout:.0f} s (inference_model.request_timeout_s) for the engine "
                f"to finish any of {len(self._generating)} groups"
            )
        for response in responses:
            group = self._generating.pop(response.request_id)
            group.response = response
            self._judging[response.request_id] = group
            self.rollouts.env.submit([(group.prompted, response.completions)])
        if responses or not self._generating:
            self._deadline = time.monotonic() + self.timeout
