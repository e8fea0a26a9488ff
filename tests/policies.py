"""A policy in this process as a push sees it, without an optimizer beside it."""

from training.published_weights import PolicyWeights


class PolicyHere(PolicyWeights):
    """A `rollout.weights.outgoing.Learner`."""

    ranks = None

    def release_memory(self) -> None: ...
