"""The `optimizer` section: update rule, learning rates by parameter, schedule."""

from dataclasses import dataclass, field

from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.values import above_0, check_fields, is_share, one_of

OPTIMIZERS = Registry("optimizer.name", "torchgrpo.training.optimizers", "make_members")


@dataclass
class OptimizerConfig:
    """The update rule, its learning rates and its schedule."""

    name: str = "adamw"
    """`adamw` for every parameter, or `muon_adamw`: Muon for the matrices between embedding and head, AdamW
    for the rest."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay on matrices; vectors (norms, biases) have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's denominator epsilon."""
    group_lr: dict[str, float] = field(default_factory=dict)
    """Peak learning rate by parameter name, `*` being a wild card, such as {"*embed_tokens*": 1e-5}; the
    first match counts."""
    muon_lr: float = 2e-5
    """Peak learning rate of Muon's matrices, whose updates are scaled to AdamW's root mean square."""
    muon_momentum: float = 0.95
    """Muon's momentum, with Nesterov's look-ahead."""

    clip_grad_norm: float | None = 1.0
    """Largest 2-norm of the whole gradient; null: no clipping."""
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine` decay to `min_lr_fraction` of the peak."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly to its peak."""
    warmup_fraction: float = 0.0
    """The length of the warm-up as a share of all optimizer steps; the longer of the two counts."""
    min_lr_fraction: float = 0.0
    """Share of the peak that the decay ends at."""

    def __post_init__(self) -> None:
        OPTIMIZERS.check(self.name)
        one_of("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        not_negative = ("lr", "weight_decay", "eps", "warmup_steps", "muon_lr")
        check_fields("optimizer", self, not_negative, lambda value: value >= 0, "must be 0 or above")
        shares = ("warmup_fraction", "min_lr_fraction", "muon_momentum")
        check_fields("optimizer", self, shares, is_share, "must lie in [0, 1]")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas={self.betas}: must be two numbers in [0, 1)")
        self.betas = (self.betas[0], self.betas[1])
        check_fields("optimizer", self, ("clip_grad_norm",), above_0, "must be above 0, or null")
        for pattern, rate in self.group_lr.items():
            if not rate >= 0:
                raise ConfigError(f"optimizer.group_lr[{pattern!r}]={rate}: must be 0 or above")
