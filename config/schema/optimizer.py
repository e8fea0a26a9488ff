"""The `optimizer` section: update rule, learning rates per parameter, schedule."""

from dataclasses import dataclass, field

from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.values import check_choice, check_fields, is_positive, is_share

OPTIMIZERS = Registry("optimizer.name", "torchgrpo.training.optimizers", "make_optimizers")


@dataclass
class OptimizerConfig:
    """The update rule, its learning rates and its schedule."""

    name: str = "adamw"
    """Update rule: `adamw` for all parameters, or `muon_adamw`, which uses Muon for the matrices between
    embedding and head, and AdamW for the rest."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """Epsilon in AdamW's denominator."""
    group_lr: dict[str, float] = field(default_factory=dict)
    """Peak learning rates by parameter name, with `*` as wildcard, such as {"*embed_tokens*": 1e-5}. The first
    matching pattern applies."""
    muon_lr: float = 2e-5
    """Peak learning rate of the matrices that Muon updates; updates are scaled to the root mean square of
    AdamW's."""
    muon_momentum: float = 0.95
    """Momentum of Muon, with Nesterov's look-ahead."""

    clip_grad_norm: float | None = 1.0
    """Maximum 2-norm of the whole gradient; null: no clipping."""
    schedule: str = "constant"
    """Learning rate after the warm-up: `constant`, or a `linear` or `cosine` decay to `min_lr_fraction` of the
    peak."""
    warmup_steps: int = 0
    """Optimizer steps of the warm-up, in which the learning rate rises linearly to its peak."""
    warmup_fraction: float = 0.0
    """Length of the warm-up as a share of all optimizer steps; the longer of the two warm-ups applies."""
    min_lr_fraction: float = 0.0
    """Learning rate at the end of the decay, as a share of the peak."""

    def __post_init__(self) -> None:
        OPTIMIZERS.check(self.name)
        check_choice("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        not_negative = ("lr", "weight_decay", "eps", "warmup_steps", "muon_lr")
        check_fields("optimizer", self, not_negative, lambda value: value >= 0, "must be 0 or above")
        shares = ("warmup_fraction", "min_lr_fraction", "muon_momentum")
        check_fields("optimizer", self, shares, is_share, "must lie in [0, 1]")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas={self.betas}: must be two numbers in [0, 1)")
        self.betas = (self.betas[0], self.betas[1])
        check_fields("optimizer", self, ("clip_grad_norm",), is_positive, "must be above 0, or null")
        for pattern, rate in self.group_lr.items():
            if not rate >= 0:
                raise ConfigError(f"optimizer.group_lr[{pattern!r}]={rate}: must be 0 or above")
