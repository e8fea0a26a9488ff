"""From logits to tokens: temperature, top-k, top-p, and draws that depend on nothing but their own seed."""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from envs.group import SampledCompletion, Sampling

_BLOCK = 256
"""Tokens of a block: a cumulative sum of a whole vocabulary takes longer than its exponentials."""


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), one for each (seed, counter): SplitMix64 (Steele et al. 2014), no state.

    seeds, counters: uint64 [rows].
    """
    with np.errstate(over="ignore"):
        bits = seeds + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    drawn: np.ndarray = ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def row_seeds(seeds: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Independent 64-bit seeds, `counts[i]` of them for the completions of the request with seed `seeds[i]`."""
    of_requests = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    places = np.concatenate([np.arange(count, dtype=np.uint64) for count in counts])
    drawn: list[int] = (uniforms(of_requests.repeat(counts), places) * 2.0**53).astype(np.uint64).tolist()
    return drawn


def append_token(
    completion: SampledCompletion,
    token: int,
    log_prob: float,
    version: int,
    ends: Collection[int],
    limit: int,
) -> None:
    """Append a sampled token; one of `ends`, or the `limit`-th token, finishes the completion."""
    completion.token_ids.append(token)
    completion.log_probs.append(log_prob)
    completion.policy_versions.append(version)
    if token in ends:
        completion.finish_reason = "stop"
    elif len(completion.token_ids) >= limit:
        completion.finish_reason = "length"


class Filter:
    """The sampling settings of a batch of rows, as tensors, made once and kept while the rows stay."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.any_greedy = any(s.temperature == 0 for s in samplings)
        self.plain_temperature = all(s.temperature in (0, 1) for s in samplings)
        self.restricts = any(s.top_p < 1 or s.top_k > 0 for s in samplings)
        if self.any_greedy:
            self.greedy = column([float(s.temperature == 0) for s in samplings]).bool()
        if not self.plain_temperature:
            self.temperature = column([s.temperature or 1.0 for s in samplings])
        if self.restricts:
            self.top_p = column([s.top_p for s in samplings])
            self.top_k = column([float(s.top_k) for s in samplings]).long()

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probs [rows, vocabulary] float32 of the distribution that is sampled from."""
        logits = logits.float()
        if not self.plain_temperature:
            logits = logits / self.temperature
        if self.restricts:
            logits = self._restrict(logits)
        if self.any_greedy:
            best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
            logits = logits.masked_fill(self.greedy & ~best, -torch.inf)
        return torch.log_softmax(logits, dim=-1)

    def _restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Top-k first, then the smallest set whose probability under the top-k distribution reaches top-p."""
        vocabulary = logits.shape[-1]
        ordered, order = logits.sort(dim=-1, descending=True)
        limit = torch.where(self.top_k > 0, self.top_k, vocabulary)
        ordered = ordered.masked_fill(torch.arange(vocabulary, device=logits.device) >= limit, -torch.inf)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        outside = (before >= self.top_p) & (self.top_p < 1)
        ordered = ordered.masked_fill(outside, -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered)


def draw(
    log_probs: torch.Tensor, seeds: np.ndarray, counters: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row by inverting its cumulative distribution: first of blocks, then in one of them.

    Returns tokens int64 [rows] and their log-probs float32 [rows].
    """
    vocabulary = log_probs.shape[-1]
    padding = -vocabulary % _BLOCK
    probabilities = log_probs.exp()
    if padding:
        probabilities = torch.nn.functional.pad(probabilities, (0, padding))
    blocks = probabilities.unflatten(-1, (-1, _BLOCK))
    ends = blocks.sum(-1).double().cumsum(-1)
    point = torch.from_numpy(uniforms(seeds, counters)).to(log_probs.device)[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp_max(ends.shape[-1] - 1)
    within = blocks.take_along_dim(block[..., None], 1)[:, 0].double().cumsum(-1)
    begin = torch.nn.functional.pad(ends, (1, 0)).gather(-1, block)
    # Below the block's own end, so that rounding never draws a token of probability 0.
    rest = torch.minimum(point - begin, within[:, -1:] * (1 - 2.0**-52))
    tokens = block * _BLOCK + torch.searchsorted(within, rest, right=True)
    tokens = tokens.clamp_max(vocabulary - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]
