"""The frozen reference model: log-probs for the KL, on a device of its own where there is one."""

import torch
from peft import PeftModel
from tensordict import TensorDictBase

from training.forward import ResponseScorer, portions


class Reference:
    """Scores batches with weights that never change.

    Args:
        scorer: over the frozen model, with the sampling distribution's temperature.
        rows: rows of one forward pass, whole groups.
    """

    def __init__(self, scorer: ResponseScorer, rows: int) -> None:
        self.scorer = scorer
        self.rows = rows
        for parameter in scorer.model.parameters():
            parameter.requires_grad_(False)
        scorer.model.eval()

    @torch.no_grad()
    def log_prob(self, batch: TensorDictBase) -> torch.Tensor:
        """[N, R] float32, zeros outside the loss mask."""
        return torch.cat([self.scorer(part).log_prob for part in portions(batch, self.rows)])


class AdapterOff:
    """The base under a LoRA policy is the reference: no second copy of the weights.

    Args:
        scorer: over the policy itself, a peft model.
        rows: rows of one forward pass, whole groups.
    """

    def __init__(self, scorer: ResponseScorer, rows: int) -> None:
        self.scorer = scorer
        self.rows = rows

    @torch.no_grad()
    def log_prob(self, batch: TensorDictBase) -> torch.Tensor:
        """[N, R] float32, zeros outside the loss mask."""
        policy = self.scorer.model
        assert isinstance(policy, PeftModel)
        with policy.disable_adapter():
            return torch.cat([self.scorer(part).log_prob for part in portions(batch, self.rows)])
