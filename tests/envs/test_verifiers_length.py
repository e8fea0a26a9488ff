"""Length and repetition: recorded values, and that longer is never better."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.verifiers.length import repetition_penalty, soft_overlong

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden" / "length_shaping.json"


def test_recorded_values() -> None:
    if not GOLDEN.is_file():
        pytest.skip("no ../shared/golden/length_shaping.json")
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 58
    for case in cases:
        given_input, parameters = case["input"], case["params"]
        if "ids" in given_input:
            got = repetition_penalty(given_input["ids"], parameters["ngram_size"], parameters["max_penalty"])
        else:
            limit, cache = parameters["max_completion_len"], parameters["soft_punish_cache"]
            got = soft_overlong(given_input["length"], limit, cache)
        assert got == pytest.approx(case["output"], abs=1e-12), case


@pytest.mark.parametrize(
    ("length", "limit", "cache", "value"),
    [(80, 100, 20, 0.0), (90, 100, 20, -0.5), (100, 100, 20, -1.0), (101, 100, 20, -1.0), (100, 100, 0, 0.0)],
)
def test_soft_overlong(length: int, limit: int, cache: int, value: float) -> None:
    assert soft_overlong(length, limit, cache) == value


@given(st.integers(0, 300), st.integers(1, 200), st.data())
def test_longer_is_never_better(length: int, limit: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(0, limit))
    assert -1.0 <= soft_overlong(length + 1, limit, cache) <= soft_overlong(length, limit, cache) <= 0.0


def test_repetition() -> None:
    assert repetition_penalty([5, 5, 5, 5, 5], 2) == -0.75
    assert repetition_penalty([1, 2, 3], 2) == 0.0
    assert repetition_penalty([1], 2) == 0.0
    with pytest.raises(ValueError, match="max_penalty=1"):
        repetition_penalty([1, 2], 1, 1.0)
