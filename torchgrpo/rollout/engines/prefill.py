"""Prompts through the model, each token once: what prompts have in common, and what was asked before, is kept.

What is kept belongs to the weights: a push clears it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from torchgrpo.rollout.engines.running_cache import Computed

Tokens = tuple[int, ...]

KEPT_POSITIONS = 4096
"""Positions that are kept when nothing runs; the prompts longest unused go first."""
_WORTH = 16
"""Tokens in common from which on they are computed, or taken from what is kept, for all together."""


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Prefill:
    """Computes prompts with `model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._kept: dict[Tokens, Computed] = {}  # the longest unused first
        self._sorted: list[Tokens] = []
        self._positions = 0

    def clear(self) -> None:
        """New weights: every key is stale."""
        self._kept.clear()
        self._sorted.clear()
        self._positions = 0

    def prompts(self, prompts: Sequence[Tokens]) -> list[Computed]:
        """As asked, equal prompts as one; they are kept for later ones."""
        asked = dict.fromkeys(prompts)
        new = [prompt for prompt in asked if prompt not in self._kept]
        found = {prompt: self._use(prompt) for prompt in asked if prompt in self._kept}
        if new:
            found |= zip(new, self.sequences(new), strict=True)
            for prompt in new:
                self._keep(prompt, found[prompt])
        return [found[prompt] for prompt in prompts]

    def sequences(self, sequences: Sequence[Tokens]) -> list[Computed]:
        """As asked, none of which is kept; only what all begin with is."""
        # Without the last token of any, whose logits are wanted.
        first, last = min(sequences), max(sequences)
        shared = first[: min(common(first, last), min(map(len, sequences)) - 1)]
        # Of all that is kept, what begins most like it is a neighbour in the alphabet.
        place = bisect_left(self._sorted, shared)
        near = self._sorted[max(place - 1, 0) : place + 1]
        best = max(near, key=lambda one: common(one, shared), default=())
        known = common(best, shared)
        prefix, known = (self._use(best), known) if known >= _WORTH else (None, 0)
        if len(sequences) > 1 and len(shared) - known >= _WORTH:
            (prefix,) = self._forward([shared], prefix, known)
            self._keep(shared, prefix)
            known = len(shared)
        return self._forward(sequences, prefix, known)

    def _use(self, tokens: Tokens) -> Computed:
        self._kept[tokens] = self._kept.pop(tokens)
        return self._kept[tokens]

    def _keep(self, tokens: Tokens, computed: Computed) -> None:
        if tokens in self._kept:
            return
        insort(self._sorted, tokens)
        self._kept[tokens] = computed
        self._positions += len(tokens)
        while self._positions > KEPT_POSITIONS and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._positions -= len(oldest)

    def _forward(self, sequences: Sequence[Tokens], prefix: Computed | None, known: int) -> list[Computed]:
        """Compute what follows the first `known` tokens; no real position sees the padding behind."""
        device = self._model.device
        lengths = np.array([len(sequence) for sequence in sequences])
        ids = np.zeros((len(sequences), lengths.max() - known), dtype=np.int64)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence) - known] = sequence[known:]
        last, where = map(torch.from_numpy, np.unique(lengths - known - 1, return_inverse=True))
        cache, mask = DynamicCache(), None
        if prefix is not None:
            rows, tokens = ids.shape
            begun = prefix.part(0, known)
            for layer, (keys, values) in enumerate(zip(begun.keys, begun.values, strict=True)):
                cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), layer)
            # Of what comes behind [1, 1, tokens, known + tokens]; plain causal attention needs none.
            seen = torch.ones(tokens, known + tokens, dtype=torch.bool, device=keys.device)
            mask = seen.tril(known)[None, None]
        logits = self._model(
            torch.from_numpy(ids).to(device),
            attention_mask=mask,
            position_ids=torch.arange(known, known + ids.shape[1], device=device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last.to(device),
        ).logits
        layers: list[Any] = cache.layers
        return [
            Computed(
                [layer.keys[row, :, :length] for layer in layers],
                [layer.values[row, :, :length] for layer in layers],
                logits[row, column],
            )
            for row, (length, column) in enumerate(zip(lengths.tolist(), where.tolist(), strict=True))
        ]
