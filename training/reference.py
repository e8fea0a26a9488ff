"""The frozen reference model: log-probs for the KL, on a device of its own where there is one.

learner's thread       forward 1 ─▶ loss 1 ─▶ backward 1 ─▶ forward 2 ─▶ loss 2 ─▶ ...
                                      ▲                                    ▲
reference's thread     score 1 ───────┘ score 2 ───────────────────────────┘          with `beside`
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from peft import PeftModel
from tensordict import TensorDictBase

from training.forward import ResponseScorer, portions


class Reference:
    """Scores batches with weights that never change.

    Args:
        scorer: over the frozen model, with the sampling distribution's temperature.
        rows: rows of one forward pass, whole groups.
        beside: on other devices than the learner's, so that both can work at a time.
    """

    def __init__(self, scorer: ResponseScorer, rows: int, beside: bool = False) -> None:
        self.scorer = scorer
        self.rows = rows
        self.beside = beside
        self._thread = ThreadPoolExecutor(1, "reference")
        for parameter in scorer.model.parameters():
            parameter.requires_grad_(False)
        scorer.model.eval()

    @torch.no_grad()
    def log_prob(self, batch: TensorDictBase) -> torch.Tensor:
        """[N, R] float32, zeros outside the loss mask."""
        return torch.cat([self.scorer(part).log_prob for part in portions(batch, self.rows)])

    def begin(self, parts: Iterable[TensorDictBase]) -> list[Future[torch.Tensor]]:
        """`log_prob` of each part, scored one after the other while the caller works on something else."""
        return [self._thread.submit(self.log_prob, part) for part in parts]


class AdapterOff:
    """The base under a LoRA policy is the reference: no second copy of the weights, and never beside the learner.

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
