"""Settings of one trust region in `policy.trust_regions`, which masks tokens outside its bounds."""

import math
from dataclasses import dataclass

from config.schema.errors import ConfigError
from config.schema.values import check_choice

CHOICES: dict[str, tuple[str, ...]] = {
    "measure": ("ratio", "k1", "k2", "k3", "tv", "kl", "kl_symmetric"),
    "between": ("now_old", "now_engine", "old_engine", "engine_old"),
    "level": ("token", "sum", "mean", "each"),
    "side": ("both", "outward", "negative"),
}


@dataclass
class TrustRegion:
    """A rule that keeps tokens whose distance between two policies is in [low, high].

    Other tokens are masked in the policy term.
    """

    measure: str = "ratio"
    """Distance of the later policy's probability p of the token and the earlier policy's probability q.
    `ratio`: p/q. With d = log p - log q, `k1`: -d, `k2`: d^2/2, `k3`: exp(d) - d - 1. `tv`: p - q. `kl`: the
    KL(q, p) of the binary choice "this token or another", with the sign of p - q. `kl_symmetric`: the larger of
    KL(q, p) and KL(p, q)."""
    between: str = "now_old"
    """Later and earlier policy. `now_old`: the trained policy and the denominator of the ratio. `now_engine`:
    the trained policy and the engine. `old_engine`: the denominator of the ratio and the engine. `engine_old`:
    the reverse."""
    level: str = "token"
    """Unit of the rule: each `token`, or a whole response by the `sum` or `mean` over its tokens (for `ratio`
    the product or the geometric mean), or by whether `each` token is inside the bounds."""
    low: float | None = None
    """Smallest distance to keep. Unset: no bound."""
    high: float | None = None
    """Largest distance to keep. Unset: no bound."""
    side: str = "both"
    """Bounds that apply: on `both` sides; `outward`, only where the gradient increases the distance, which is above
    `high` with a positive advantage and below `low` with another; `negative`, only with a negative advantage."""

    def check(self, place: str, engine_is_old: bool) -> None:
        """Raises ConfigError for invalid fields.

        place: key of this rule in the config. engine_is_old: whether `policy.old_log_prob` is `engine`.
        """
        for key, known in CHOICES.items():
            check_choice(f"{place}.{key}", vars(self)[key], known)
        low, high = self.low, self.high
        bounds = [bound for bound in (low, high) if bound is not None]
        if not bounds or any(math.isnan(bound) for bound in bounds) or (len(bounds) == 2 and low > high):  # type: ignore[operator]
            raise ConfigError(f"{place}: low={low}, high={high}: set low or high, or both with low <= high")
        if self.measure == "ratio" and not all(bound >= 0 for bound in bounds):
            raise ConfigError(f"{place}: low={low}, high={high}: bounds of a ratio of probabilities must be at least 0")
        if self.between in ("old_engine", "engine_old") and engine_is_old:
            raise ConfigError(
                f"{place}.between={self.between}: with policy.old_log_prob=engine both log-probs are the "
                "engine's; set policy.old_log_prob=trainer, or between=now_old"
            )
