"""Rewards for length and repetition, from counts of tokens. All are 0 or negative: none rewards being longer."""

from collections.abc import Sequence


def soft_overlong(length: int, limit: int, cache: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, equation 13): from 0 down to -1 over the last `cache` tokens.

    0 up to `limit - cache`, then linear, -1 at `limit` and beyond; with `cache` 0 the step lies behind `limit`.
    """
    if length <= limit - cache:
        return 0.0
    return (limit - cache - length) / cache if length <= limit else -1.0


def repetition_penalty(tokens: Sequence[int], ngram_size: int, max_penalty: float = -1.0) -> float:
    """`max_penalty` times the share of n-grams that were there before (Yeo et al. 2025); 0 without any n-gram.

    Raises:
        ValueError: a positive `max_penalty`, or an `ngram_size` below 1.
    """
    if max_penalty > 0 or ngram_size < 1:
        raise ValueError(
            f"max_penalty={max_penalty} must not be above 0, ngram_size={ngram_size} not below 1"
        )
    total = len(tokens) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(tokens[start : start + ngram_size]) for start in range(total)})
    return (1 - distinct / total) * max_penalty
