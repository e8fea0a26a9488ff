"""Random batches and policy variants for tests of the objective."""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.loss_terms import total_loss

LENGTHS = [5, 1, 0, 7, 3, 7, 2, 4, 6, 1]
WIDTH = 8
NAMES = ("now", "engine", "trainer", "ref", "entropy")
Tensors = dict[str, Tensor]


def make_batch(seed: int = 0, spread: float = 0.4, lengths: list[int] = LENGTHS, padding: float = 0.0) -> Tensors:
    """Builds a float64 batch with the value `padding` in its padding.

    One row has no token.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    mask = torch.arange(WIDTH)[None] < torch.tensor(lengths)[:, None]
    base = -torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64) * 3
    tensors = {"now": base, "mask": mask}
    for name in NAMES[1:]:
        tensors[name] = base + spread * torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    tensors |= {name: tensors[name].clamp_max(-0.01) for name in NAMES if name != "entropy"}
    tensors["entropy"] = tensors["entropy"].abs()
    tensors["advantage"] = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    for name in NAMES:
        tensors[name] = torch.where(mask, tensors[name], padding)
    return tensors


def evaluate_loss(
    policy: PolicyConfig, tensors: Tensors, totals: BatchTotals | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Computes loss, gradient of the log-probs, and metrics of a batch."""
    log_prob = tensors["now"].clone().requires_grad_()
    reads_entropy = policy.uses_entropy or policy.select_tokens == "top_entropy"
    entropy = tensors["entropy"] - log_prob if reads_entropy else None
    loss, metrics = total_loss(
        policy,
        log_prob,
        tensors["engine"],
        tensors["trainer"],
        tensors["ref"],
        tensors["advantage"],
        tensors["mask"],
        entropy=entropy,
        totals=totals,
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.detach(), log_prob.grad, metrics


VARIANTS = {
    "grpo": {},
    "everything": {
        "old_log_prob": "trainer",
        "mismatch": "truncate",
        "kl_inference_coef": 0.1,
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "dual_clip": 2.0,
    },
    "sequence": {"ratio": "sequence", "kl_aggregation": "padded_mean"},
    "sequence_token": {"ratio": "sequence_token", "old_log_prob": "trainer", "mismatch": "mask"},
    "cispo": {"objective": "cispo"},
    "soft_clip": {"objective": "soft_clip"},
    "geometric": {"objective": "geometric", "old_log_prob": "trainer", "mismatch": "truncate"},
    "no_ratio": {"objective": "none", "ratio": "none"},
    "sampled_entropy": {"entropy_form": "sampled", "entropy_coef": 0.1},
    "sequence_mismatch": {
        "old_log_prob": "trainer",
        "mismatch": "mask",
        "mismatch_level": "sequence",
        "mismatch_cap": 1.5,
    },
}
