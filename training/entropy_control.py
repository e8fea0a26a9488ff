"""The weight of the entropy, where it follows a target (Skywork-OR1, arXiv 2505.22312, section 3.3)."""

from dataclasses import dataclass

from config.policy import PolicyConfig


@dataclass
class EntropyControl:
    """coef: the weight as it is now. entropy: mean of the last step, in nats; 0 before the first."""

    policy: PolicyConfig
    coef: float
    entropy: float = 0.0

    @property
    def applied(self) -> float:
        """The weight that the next step takes: none while the entropy is above its target."""
        target = self.policy.entropy_target
        return self.coef if target is None or self.entropy <= target else 0.0

    def update(self, entropy: float) -> None:
        """After a step whose mean entropy was `entropy`."""
        self.entropy = entropy
        if self.policy.entropy_target is not None:
            change = self.policy.entropy_coef_step
            self.coef = max(0.0, self.coef + (change if entropy < self.policy.entropy_target else -change))
