"""Policy in the test process that pushes weights, without an optimizer."""

from torchgrpo.plan.log_prob_bounds import BOUNDS
from torchgrpo.plan.plan import WeightCheckPlan
from torchgrpo.training.published_weights import PolicyWeights


class LocalPolicy(PolicyWeights):
    """Implementation of `torchgrpo.rollout.weights.weight_update.Learner` without an optimizer."""

    ranks = None
    optimizer_steps = 0

    def release_memory(self) -> None: ...


def check_plan(dtype: str, count: int = 3, length: int = 160) -> WeightCheckPlan:
    """Returns the plan of a weight check on fixed sequences and two prompts to decode."""
    return WeightCheckPlan(dtype, BOUNDS[dtype], BOUNDS["float32"], count, length, (8, 12))
