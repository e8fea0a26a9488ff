"""Adaptive entropy coefficient that follows a target entropy (Skywork-OR1, arXiv 2505.22312, section 3.3)."""

from dataclasses import dataclass

from config.schema.policy import PolicyConfig


@dataclass
class EntropyControl:
    """Entropy coefficient of the next step, updated from the entropy of the last step.

    coef: current coefficient. is_low: whether the mean entropy of the last step was at the target or below.
    """

    policy: PolicyConfig
    coef: float
    is_low: bool = False

    @property
    def next_coef(self) -> float:
        """Entropy coefficient of the next step; 0 while the entropy is above its target."""
        return self.coef if self.policy.entropy_target is None or self.is_low else 0.0

    def update(self, entropy: float) -> None:
        """Updates the coefficient after a step with mean entropy `entropy` in nats."""
        target, change = self.policy.entropy_target, self.policy.entropy_coef_step
        if target is None:
            return
        self.is_low = entropy <= target
        self.coef = max(0.0, self.coef + (change if entropy < target else -change))
