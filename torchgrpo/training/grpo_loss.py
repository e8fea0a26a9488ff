"""TorchRL loss module that scores a microbatch's tokens and calls `loss_terms`.

batch ──prepare──▶ inputs ──scorer──▶ log-probs ──loss_terms──▶ loss_objective + loss_kl + ... ──total──▶ backward

The inputs are computed on the host, and copied to the device of the scorer together.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.objectives import LossModule

from config.schema.policy import PolicyConfig
from torchgrpo.batches.batch import Batch, Tokens, environment_token_mask, select_declared_fields
from torchgrpo.batches.episodes import EpisodeRows
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.device_copy import copy_to_device
from torchgrpo.training.loss_metrics import effective_sample_size
from torchgrpo.training.loss_terms import loss_terms
from torchgrpo.training.response_scorer import ResponseScorer, ScoringInputs
from torchgrpo.training.token_weights import TokenWeights

LOSS_KEYS = ("loss_objective", "loss_kl", "loss_kl_inference", "loss_entropy", "loss_env_token_nll")


@dataclass(frozen=True)
class LossBatch:
    """Inputs of the loss for N token sequences.

    scoring: inputs of the scorer. mask_indices: int64 [M], indices of the tokens in `mask` in its flattened form. The
    other fields are arguments of `loss_terms`.
    """

    scoring: ScoringInputs
    sample_log_prob: Tensor
    old_log_prob: Tensor | None
    ref_log_prob: Tensor | None
    advantage: Tensor
    mask: Tensor
    mask_indices: Tensor
    weights: TokenWeights | None
    environment: Tensor | None
    episodes: EpisodeRows | None
    totals: BatchTotals | None


class GRPOLoss(LossModule):
    """Loss of the objectives of `PolicyConfig` (docs/objectives.md), on log-probs of `scorer`.

    The module computes with the actor's own parameters, without a copy and without functional calls.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Keys of the input, by the field names of `Batch`.

        temperature: needed if the scorer has no temperature. old_log_prob: a missing entry means that the weights
        have not changed since the batch was sampled. ref_log_prob: needed for a KL to the reference in the loss, or
        for a teacher's advantage. weight, penalty: rows of the batch-wide values, if the policy needs these.
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
        episode: NestedKey = "episode"

    default_keys = _AcceptedKeys
    actor: nn.Module

    def __init__(self, scorer: ResponseScorer, policy: PolicyConfig) -> None:
        super().__init__()
        self.actor = scorer.model
        self.scorer = scorer
        self.policy = policy

    @property
    def functional(self) -> bool:
        """Whether the actor runs with functional parameters: never."""
        return False

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that the input must have."""
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
        """Keys of the output, which are loss terms and the tensors they were computed with.

        ESS: effective sample size of the ratios. log_prob, entropy: [N, R], of the actor. advantage: [N, R],
        with the teacher's advantage. metrics: accumulators.
        """
        return [*LOSS_KEYS, "ESS", "log_prob", "entropy", "advantage", "metrics"]

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """Does nothing: there is no value estimator to forward renamed keys to."""

    def forward(
        self,
        tensordict: TensorDictBase | Batch | LossBatch,
        totals: BatchTotals | None = None,
        entropy_coef: float | None = None,
    ) -> TensorDict:
        """Computes the loss terms of a batch, and their metrics.

        Terms are scalars, 0 for terms that the policy does not use.

        Args:
            tensordict: [N] token sequences, in the order of groups, see `_AcceptedKeys`; or the output of `prepare`, on
                the device of the scorer.
            totals: of the global batch, if this is a microbatch; terms and metrics then sum over microbatches. All rows
                of a completion are in the same microbatch.
            entropy_coef: replaces the policy's coefficient for this batch.

        Raises:
            KeyError: the input lacks one of `in_keys`.
        """
        inputs: LossBatch = (
            tensordict
            if isinstance(tensordict, LossBatch)
            else copy_to_device(self.prepare(tensordict, totals), self.scorer.device)
        )
        policy = self.policy if entropy_coef is None else replace(self.policy, entropy_coef=entropy_coef)
        scores = self.scorer.score(inputs.scoring, with_entropy=True)
        terms, metrics, advantage = loss_terms(
            policy,
            scores.log_prob,
            inputs.sample_log_prob,
            inputs.old_log_prob,
            inputs.ref_log_prob,
            inputs.advantage,
            inputs.mask,
            entropy=scores.entropy,
            environment=inputs.environment,
            totals=inputs.totals,
            weights=inputs.weights,
            episodes=inputs.episodes,
        )
        assert scores.entropy is not None  # `with_entropy` is set
        named = {name.replace("/", "_"): term for name, term in terms.items()}
        zero = scores.log_prob.new_zeros(())
        return TensorDict(
            {name: named.get(name, zero) for name in LOSS_KEYS}
            | {"ESS": effective_sample_size(metrics["ess"])}
            | {"log_prob": scores.log_prob.detach(), "entropy": scores.entropy.detach()}
            | {"advantage": advantage, "metrics": TensorDict(metrics)}
        )

    def prepare(self, tensordict: TensorDictBase | Batch, totals: BatchTotals | None = None) -> LossBatch:
        """Prepares the inputs of the loss on the device of the batch.

        The arguments are those of `forward`.

        Raises:
            KeyError: the input lacks one of `in_keys`.
        """
        keys: Any = self.tensor_keys
        inputs = {key: tensordict.get(key, None) for key in vars(keys).values()}
        missing = [key for key in self.in_keys if inputs[key] is None]
        if missing:
            raise KeyError(f"the loss reads {missing}, which the batch does not have")
        tokens, mask = inputs[keys.tokens], inputs[keys.mask]
        tokens = tokens if isinstance(tokens, Tokens) else select_declared_fields(Tokens, tokens)
        episodes = tokens.episode_rows(inputs[keys.episode])
        environment = environment_token_mask(tokens, mask, episodes) if self.policy.environment_coef else None
        scored_tokens: Tokens = tokens if environment is None else tokens.copy()
        if environment is not None:
            scored_tokens.loss_mask = tokens.response_mask
        weight = inputs[keys.weight]
        return LossBatch(
            scoring=self.scorer.prepare(scored_tokens, inputs[keys.temperature]),
            sample_log_prob=inputs[keys.sample_log_prob],
            old_log_prob=inputs[keys.old_log_prob],
            ref_log_prob=inputs[keys.ref_log_prob],
            advantage=inputs[keys.advantage],
            mask=mask,
            mask_indices=mask.flatten().nonzero()[:, 0],
            weights=None if weight is None else TokenWeights(weight, inputs[keys.penalty], mask),
            environment=environment,
            episodes=episodes,
            totals=totals,
        )

    @staticmethod
    def total(losses: TensorDictBase) -> Tensor:
        """Returns the loss to minimise: the sum of the terms of an output."""
        return torch.stack([losses[name] for name in LOSS_KEYS]).sum()
