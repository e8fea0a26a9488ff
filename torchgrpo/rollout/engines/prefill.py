"""Computes keys, values and last logits of token sequences, with a prefix cache of prompts.

A prefix that prompts share, and a prompt that was requested before, is computed once. The cache is valid for the
current weights only: a push clears it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from torchgrpo.rollout.engines.group_kv_cache import PrefilledSequence

Tokens = tuple[int, ...]

MAX_CACHED_POSITIONS = 4096
"""Positions that the cache holds at most; the least recently used prompts are evicted first."""
_MIN_SHARED_TOKENS = 16
"""Shortest common prefix that is computed once for all sequences, or taken from the cache."""


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens with which both sequences begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


class Prefill:
    """Computes keys, values and last logits of sequences with `model`, and caches prompts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cached_prompts: dict[Tokens, PrefilledSequence] = {}  # least recently used first
        self._sorted_prompts: list[Tokens] = []
        self._cached_positions = 0

    def clear(self) -> None:
        """Empties the cache, since new weights invalidate every key and value."""
        self._cached_prompts.clear()
        self._sorted_prompts.clear()
        self._cached_positions = 0

    def prefill_prompts(self, prompts: Sequence[Tokens]) -> list[PrefilledSequence]:
        """Computes prompts in order, equal prompts once, and caches them."""
        unique_prompts = dict.fromkeys(prompts)
        new = [prompt for prompt in unique_prompts if prompt not in self._cached_prompts]
        results = {prompt: self._reuse(prompt) for prompt in unique_prompts if prompt in self._cached_prompts}
        if new:
            results |= zip(new, self.prefill_sequences(new), strict=True)
            for prompt in new:
                self._store(prompt, results[prompt])
        return [results[prompt] for prompt in prompts]

    def prefill_sequences(self, sequences: Sequence[Tokens]) -> list[PrefilledSequence]:
        """Computes sequences in order; caches only the prefix that all of them share."""
        # The shared prefix excludes each sequence's last token, whose logits are needed.
        first, last = min(sequences), max(sequences)
        shared = first[: min(common_prefix_length(first, last), min(map(len, sequences)) - 1)]
        # The cached prompt with the longest common prefix is a neighbour in lexicographic order.
        index = bisect_left(self._sorted_prompts, shared)
        near = self._sorted_prompts[max(index - 1, 0) : index + 1]
        best = max(near, key=lambda one: common_prefix_length(one, shared), default=())
        num_cached = common_prefix_length(best, shared)
        prefix, num_cached = (self._reuse(best), num_cached) if num_cached >= _MIN_SHARED_TOKENS else (None, 0)
        if len(sequences) > 1 and len(shared) - num_cached >= _MIN_SHARED_TOKENS:
            (prefix,) = self._forward([shared], prefix, num_cached)
            self._store(shared, prefix)
            num_cached = len(shared)
        return self._forward(sequences, prefix, num_cached)

    def _reuse(self, tokens: Tokens) -> PrefilledSequence:
        self._cached_prompts[tokens] = self._cached_prompts.pop(tokens)
        return self._cached_prompts[tokens]

    def _store(self, tokens: Tokens, sequence: PrefilledSequence) -> None:
        if tokens in self._cached_prompts:
            return
        insort(self._sorted_prompts, tokens)
        self._cached_prompts[tokens] = sequence
        self._cached_positions += len(tokens)
        while self._cached_positions > MAX_CACHED_POSITIONS and len(self._cached_prompts) > 1:
            oldest = next(iter(self._cached_prompts))
            del self._cached_prompts[oldest]
            del self._sorted_prompts[bisect_left(self._sorted_prompts, oldest)]
            self._cached_positions -= len(oldest)

    def _forward(
        self, sequences: Sequence[Tokens], prefix: PrefilledSequence | None, num_cached: int
    ) -> list[PrefilledSequence]:
        """Computes the tokens after the first `num_cached` of each sequence.

        Sequences are padded behind, where causal attention hides the padding from every real position.
        """
        device = self._model.device
        lengths = np.array([len(sequence) for sequence in sequences])
        ids = np.zeros((len(sequences), lengths.max() - num_cached), dtype=np.int64)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence) - num_cached] = sequence[num_cached:]
        last, columns = map(torch.from_numpy, np.unique(lengths - num_cached - 1, return_inverse=True))
        cache, mask = DynamicCache(), None
        if prefix is not None:
            rows, tokens = ids.shape
            cached_prefix = prefix.slice_positions(0, num_cached)
            for layer, (keys, values) in enumerate(zip(cached_prefix.keys, cached_prefix.values, strict=True)):
                cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), layer)
            # Mask of the new tokens [1, 1, tokens, num_cached + tokens]; without a prefix, causal attention needs none.
            visible = torch.ones(tokens, num_cached + tokens, dtype=torch.bool, device=keys.device)
            mask = visible.tril(num_cached)[None, None]
        logits = self._model(
            torch.from_numpy(ids).to(device),
            attention_mask=mask,
            position_ids=torch.arange(num_cached, num_cached + ids.shape[1], device=device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last.to(device),
        ).logits
        layers: list[Any] = cache.layers
        return [
            PrefilledSequence(
                [layer.keys[row, :, :length] for layer in layers],
                [layer.values[row, :, :length] for layer in layers],
                logits[row, column],
            )
            for row, (length, column) in enumerate(zip(lengths.tolist(), columns.tolist(), strict=True))
        ]
