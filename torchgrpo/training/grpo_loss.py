"""The loss as a TorchRL module, TensorDict in, TensorDict out: the learner calls it for every microbatch.

tokens ──scorer──▶ log-probs ──training.loss──▶ loss_objective + loss_kl + ... ──total──▶ backward
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.objectives import LossModule

from config.schema.policy import PolicyConfig
from torchgrpo.batches.batch import Batch, Tokens, declared, environment_tokens
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.loss import loss_terms
from torchgrpo.training.loss_metrics import effective_sample_size
from torchgrpo.training.token_weights import TokenWeights

LOSSES = ("loss_objective", "loss_kl", "loss_kl_inference", "loss_entropy", "loss_environment")


class GRPOLoss(LossModule):
    """The objectives of `PolicyConfig` (docs/objectives.md), over log-probs of the policy that `scorer` computes.

    The actor's parameters stay its own: nothing is copied, nothing functional.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """The keys of the input, by the names that `Batch` explains.

        temperature: read where the scorer has none of its own. old_log_prob: where it is missing, the weights have not
        moved since the batch was drawn. ref_log_prob: needed where the KL to the reference is in the loss, or a teacher
        in the advantage. weight, penalty: of a microbatch, where they depend on the whole batch.
        """

        tokens: NestedKey = "tokens"
        temperature: NestedKey = "temperature"
        sample_log_prob: NestedKey = "sample_log_prob"
        old_log_prob: NestedKey = "old_log_prob"
        ref_log_prob: NestedKey = "ref_log_prob"
        advantage: NestedKey = "advantage"
        mask: NestedKey = "mask"
        weight: NestedKey = "weight"
        penalty: NestedKey = "penalty"

    default_keys = _AcceptedKeys
    actor: nn.Module

    def __init__(self, scorer: ResponseScorer, policy: PolicyConfig) -> None:
        super().__init__()
        self.actor = scorer.model
        self.scorer = scorer
        self.policy = policy

    @property
    def functional(self) -> bool:
        """The actor computes with its own parameters."""
        return False

    @property
    def in_keys(self) -> list[NestedKey]:
        """What the input must hold."""
        keys: Any = self.tensor_keys
        needed = [keys.tokens, keys.sample_log_prob, keys.advantage, keys.mask]
        if self.scorer.temperature is None:
            needed.append(keys.temperature)
        kl_in_the_loss = self.policy.kl_coef != 0 and self.policy.kl_placement == "loss"
        if kl_in_the_loss or self.policy.distill_coef != 0:
            needed.append(keys.ref_log_prob)
        return needed

    @property
    def out_keys(self) -> list[NestedKey]:
        """The terms of the loss, and what they were computed with.

        ESS: of the ratios. log_prob, entropy: [N, R], the actor's. advantage: [N, R], a teacher's part included.
        metrics: accumulators.
        """
        return [*LOSSES, "ESS", "log_prob", "entropy", "advantage", "metrics"]

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """There is no value estimator to tell of renamed keys."""

    def forward(
        self,
        tensordict: TensorDictBase | Batch,
        totals: BatchTotals | None = None,
        entropy_coef: float | None = None,
    ) -> TensorDict:
        """The terms of the loss (scalars, 0 where the policy has no such term), and what is to be logged of them.

        tensordict: [N] completions, groups side by side; see `_AcceptedKeys`.
        totals: of the global batch, where this is a microbatch: terms and metrics of all its microbatches add up to
            those of the batch.
        entropy_coef: in the place of the policy's, for this batch.

        Raises:
            KeyError: the input lacks one of `in_keys`.
        """
        keys: Any = self.tensor_keys
        given = {key: tensordict.get(key, None) for key in vars(keys).values()}
        missing = [key for key in self.in_keys if given[key] is None]
        if missing:
            raise KeyError(f"the loss reads {missing}, which the batch does not have")
        tokens = given[keys.tokens]
        tokens = tokens if isinstance(tokens, Tokens) else declared(Tokens, tokens)
        policy = self.policy if entropy_coef is None else replace(self.policy, entropy_coef=entropy_coef)
        environment = environment_tokens(tokens, given[keys.mask]) if policy.environment_coef else None
        scored: Tokens = tokens if environment is None else tokens.copy()
        if environment is not None:
            scored.loss_mask = tokens.response_mask
        scores = self.scorer(scored, given[keys.temperature], with_entropy=True)

        def of(key: NestedKey) -> Any:
            return None if given[key] is None else given[key].to(scores.log_prob.device)

        weights = None
        if given[keys.weight] is not None:
            weights = TokenWeights(of(keys.weight), of(keys.penalty), of(keys.mask))
        terms, metrics, advantage = loss_terms(
            policy,
            scores.log_prob,
            of(keys.sample_log_prob),
            of(keys.old_log_prob),
            of(keys.ref_log_prob),
            of(keys.advantage),
            of(keys.mask),
            entropy=scores.entropy,
            environment=None if environment is None else environment.to(scores.log_prob.device),
            totals=totals,
            weights=weights,
        )
        assert scores.entropy is not None  # it was asked for
        named = {name.replace("/", "_"): term for name, term in terms.items()}
        zero = scores.log_prob.new_zeros(())
        return TensorDict(
            {name: named.get(name, zero) for name in LOSSES}
            | {"ESS": effective_sample_size(metrics["ess"])}
            | {"log_prob": scores.log_prob.detach(), "entropy": scores.entropy.detach()}
            | {"advantage": advantage, "metrics": TensorDict(metrics)}
        )

    @staticmethod
    def total(losses: TensorDictBase) -> Tensor:
        """What is minimised: the sum of an output's terms."""
        return torch.stack([losses[name] for name in LOSSES]).sum()
