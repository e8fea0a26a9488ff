"""Trust regions of the objective: rules that leave tokens out of the policy term. A `TrustRegion` each."""

import math
from dataclasses import dataclass

from config.schema.errors import ConfigError
from config.schema.values import one_of

CHOICES: dict[str, tuple[str, ...]] = {
    "measure": ("ratio", "k1", "k2", "k3", "tv", "kl", "kl_symmetric"),
    "between": ("now_old", "now_engine", "old_engine", "engine_old"),
    "level": ("token", "sum", "mean", "each"),
    "side": ("both", "outward", "negative"),
}


@dataclass
class TrustRegion:
    """A token stays in the policy term while a measure of how far two policies are apart on it lies in [low, high]."""

    measure: str = "ratio"
    """Of the later policy's probability p of the token and the earlier one's q: `ratio` p/q; with d = log p - log q,
    `k1` -d, `k2` d^2/2, `k3` exp(d) - d - 1; `tv` p - q; `kl` the KL(q, p) of "this token or another", with the sign
    of p - q; `kl_symmetric` the larger of KL(q, p) and KL(p, q)."""
    between: str = "now_old"
    """Later and earlier policy: the one being trained and the ratio's denominator (`now_old`), or the engine
    (`now_engine`); that denominator and the engine (`old_engine`), or the other way round (`engine_old`)."""
    level: str = "token"
    """Each `token` by itself; a whole response by the `sum` or the `mean` of its tokens (of a `ratio` the product, the
    geometric mean), or by whether `each` of them is inside."""
    low: float | None = None
    """Smallest value inside. Unset: no bound."""
    high: float | None = None
    """Largest value inside. Unset: no bound."""
    side: str = "both"
    """Outside counts on `both` sides; `outward`, only where the advantage pushes further: above `high` with a positive
    one, below `low` with another; `negative`, only with a negative advantage."""

    def check(self, place: str, engine_is_old: bool) -> None:
        """Raises ConfigError for a value that is none. place: of this rule in the config."""
        for key, known in CHOICES.items():
            one_of(f"{place}.{key}", vars(self)[key], known)
        low, high = self.low, self.high
        bounds = [bound for bound in (low, high) if bound is not None]
        if not bounds or any(math.isnan(bound) for bound in bounds) or (len(bounds) == 2 and low > high):  # type: ignore[operator]
            raise ConfigError(f"{place}: low={low}, high={high}: give one of them, or both with low <= high")
        if self.measure == "ratio" and not all(bound >= 0 for bound in bounds):
            raise ConfigError(f"{place}: low={low}, high={high}: a ratio of probabilities is never below 0")
        if self.between in ("old_engine", "engine_old") and engine_is_old:
            raise ConfigError(
                f"{place}.between={self.between}: with policy.old_log_prob=engine both are the engine; set "
                "policy.old_log_prob=trainer, or between=now_old"
            )
