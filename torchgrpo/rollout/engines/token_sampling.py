"""Applies temperature, min-p, top-k and top-p, and samples tokens by per-row seeds."""

from collections.abc import Sequence

import numpy as np
import torch

from envs.group import SampledCompletion, Sampling
from torchgrpo.rollout.engines.completion_ends import CompletionEnds

_BLOCK_TOKENS = 256
"""Tokens of a block of the vocabulary; a cumulative sum over the whole vocabulary would be slow."""


def uniform_samples(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Returns uniform random numbers in [0, 1), one for each (seed, counter).

    SplitMix64 (Steele et al. 2014), without state. seeds, counters: uint64 [rows]. Returns float64 [rows].
    """
    with np.errstate(over="ignore"):
        bits = seeds + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    samples: np.ndarray = ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return samples


def row_seeds(seeds: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Returns independent 64-bit seeds, one for each completion.

    seeds: of the requests. counts: completions of each request.
    """
    request_seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    completion_indices = np.concatenate([np.arange(count, dtype=np.uint64) for count in counts])
    samples: list[int] = (
        (uniform_samples(request_seeds.repeat(counts), completion_indices) * 2.0**53).astype(np.uint64).tolist()
    )
    return samples


def append_token(
    completion: SampledCompletion, token: int, log_prob: float, version: int, sampling: Sampling, ends: CompletionEnds
) -> None:
    """Appends a sampled token, which may finish the completion."""
    completion.token_ids.append(token)
    completion.log_probs.append(log_prob)
    completion.policy_versions.append(version)
    completion.finish_reason = ends.finish_reason(completion.token_ids, sampling)


class SamplingFilter:
    """Sampling settings of a batch's rows as tensors, which turn logits into log-probs.

    A filter is reused while the rows stay the same.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.any_greedy = any(s.temperature == 0 for s in samplings)
        self.plain_temperature = all(s.temperature in (0, 1) for s in samplings)
        self.has_min_p = any(s.min_p > 0 for s in samplings)
        self.has_top_filter = any(s.top_p < 1 or s.top_k > 0 for s in samplings)
        if self.any_greedy:
            self.greedy = column([float(s.temperature == 0) for s in samplings]).bool()
        if not self.plain_temperature:
            self.temperature = column([s.temperature or 1.0 for s in samplings])
        if self.has_min_p:
            self.log_min_p = column([s.min_p for s in samplings]).log()
        if self.has_top_filter:
            self.top_p = column([s.top_p for s in samplings])
            self.top_k = column([float(s.top_k) for s in samplings]).long()

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns log-probs [rows, vocabulary] float32 of the distribution that is sampled from."""
        logits = logits.float()
        if not self.plain_temperature:
            logits = logits / self.temperature
        if self.has_min_p:
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + self.log_min_p, -torch.inf)
        if self.has_top_filter:
            logits = self._restrict(logits)
        if self.any_greedy:
            best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
            logits = logits.masked_fill(self.greedy & ~best, -torch.inf)
        return torch.log_softmax(logits, dim=-1)

    def _restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks logits outside top-k, then outside top-p of the top-k distribution.

        Top-p keeps the smallest set of tokens whose probability reaches it.
        """
        vocabulary = logits.shape[-1]
        ordered, order = logits.sort(dim=-1, descending=True)
        limit = torch.where(self.top_k > 0, self.top_k, vocabulary)
        ordered = ordered.masked_fill(torch.arange(vocabulary, device=logits.device) >= limit, -torch.inf)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        outside = (before >= self.top_p) & (self.top_p < 1)
        ordered = ordered.masked_fill(outside, -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered)


def sample_tokens(
    log_probs: torch.Tensor, seeds: np.ndarray, counters: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token for each row by inverting its cumulative distribution.

    The inversion finds a block of the vocabulary first, then a token in the block.
    Returns tokens int64 [rows] and their log-probs float32 [rows].
    """
    vocabulary = log_probs.shape[-1]
    padding = -vocabulary % _BLOCK_TOKENS
    probabilities = log_probs.exp()
    if padding:
        probabilities = torch.nn.functional.pad(probabilities, (0, padding))
    blocks = probabilities.unflatten(-1, (-1, _BLOCK_TOKENS))
    block_ends = blocks.sum(-1).double().cumsum(-1)
    point = torch.from_numpy(uniform_samples(seeds, counters)).to(log_probs.device)[:, None] * block_ends[:, -1:]
    block = torch.searchsorted(block_ends, point, right=True).clamp_max(block_ends.shape[-1] - 1)
    cumulative = blocks.take_along_dim(block[..., None], 1)[:, 0].double().cumsum(-1)
    begin = torch.nn.functional.pad(block_ends, (1, 0)).gather(-1, block)
    # The point stays below the end of its block, so that rounding never selects a token of probability 0.
    rest = torch.minimum(point - begin, cumulative[:, -1:] * (1 - 2.0**-52))
    tokens = block * _BLOCK_TOKENS + torch.searchsorted(cumulative, rest, right=True)
    tokens = tokens.clamp_max(vocabulary - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]
