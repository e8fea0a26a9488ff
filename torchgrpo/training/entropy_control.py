"""The weight of the entropy, where it follows a target (Skywork-OR1, arXiv 2505.22312, section 3.3)."""

from dataclasses import dataclass

from config.schema.policy import PolicyConfig


@dataclass
class EntropyControl:
    """coef: the weight as it is now. low: the mean entropy of the last step was at the target or below."""

    policy: PolicyConfig
    coef: float
    low: bool = False

    @property
    def applied(self) -> float:
        """The weight that the next step takes: none while the entropy is above its target."""
        return self.coef if self.policy.entropy_target is None or self.low else 0.0

    def update(self, entropy: float) -> None:
        """After a step whose mean entropy was `entropy`, in nats."""
        target, change = self.policy.entropy_target, self.policy.entropy_coef_step
        if target is None:
            return
        self.low = entropy <= target
        self.coef = max(0.0, self.coef + (change if entropy < target else -change))
