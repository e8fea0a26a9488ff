"""Which sequences the canary falls back on, and how often it may."""

from rollout.weights.canary import _Budget
from rollout.weights.fixed_sequences import canary_sequences
from tests.rollout.conftest import VOCAB


def test_sequences_reach_past_a_cache_block_unless_the_engine_is_shorter() -> None:
    assert [len(sequence) for sequence in canary_sequences(VOCAB, 4096)] == [160] * 3
    assert [len(sequence) for sequence in canary_sequences(VOCAB, 32)] == [32] * 3
    assert canary_sequences(VOCAB, 4096) == canary_sequences(VOCAB, 4096)
    assert max(map(max, canary_sequences(VOCAB, 4096))) < VOCAB


def test_the_canary_takes_no_more_than_its_share() -> None:
    """Of the clock's time since the first comparison, which is nobody's choice."""
    now = [50.0]
    budget = _Budget(0.01, lambda: now[0])
    assert budget.allows
    budget.took(2.0)
    assert not budget.allows and budget.spent == 0
    now[0] = 251.0
    assert budget.allows, "once in 200 seconds"
    budget.took(2.0)
    assert not budget.allows
    now[0] = 451.0
    assert budget.allows
    budget.looked(0.1)
    assert not budget.allows
    now[0] = 461.0
    assert budget.allows
