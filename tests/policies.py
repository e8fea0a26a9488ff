"""A policy in this process as a push sees it, without an optimizer beside it."""

from torchgrpo.plan.plan import WeightCheckPlan
from torchgrpo.plan.weight_bounds import BOUNDS
from torchgrpo.training.published_weights import PolicyWeights


class PolicyHere(PolicyWeights):
    """A `torchgrpo.rollout.weights.outgoing.Learner`."""

    ranks = None
    optimizer_steps = 0

    def release_memory(self) -> None: ...


def check_plan(dtype: str, count: int = 3, length: int = 160) -> WeightCheckPlan:
    """Fixed sequences, and two prompts to decode."""
    return WeightCheckPlan(dtype, BOUNDS[dtype], BOUNDS["float32"], count, length, (8, 12))
