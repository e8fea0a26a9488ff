"""Counts the Python calls of our engine per token that vLLM samples."""

import sys
from types import FrameType
from typing import Any

import pytest

from envs.group import Sampling
from tests.rollout.conftest import MAX_LEN, StartEngine
from tests.rollout.log_prob_comparison import random_tokens
from torchgrpo.rollout.engines.interface import Request, Response

MOST_CALLS_PER_TOKEN = 10


def test_python_calls_per_token_outside_the_core(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are those of Python and C functions, without those that the core makes."""
    engine = start_engine()
    count, step_core = 0, engine._core.get_output

    def count_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def step_core_uncounted() -> Any:
        sys.setprofile(None)
        try:
            return step_core()
        finally:
            sys.setprofile(count_call)

    monkeypatch.setattr(engine._core, "get_output", step_core_uncounted)
    length = MAX_LEN - 10
    for index in range(2):
        engine.submit(Request(index, tuple(random_tokens(9, index)), 4, Sampling(max_tokens=length), index))
    sys.setprofile(count_call)
    responses: list[Response] = []
    try:
        while engine.in_flight:
            responses += engine.step()
    finally:
        sys.setprofile(None)
    tokens = sum(len(one.token_ids) for response in responses for one in response.completions)
    assert tokens > 200
    assert count <= MOST_CALLS_PER_TOKEN * tokens, f"{count} calls for {tokens} tokens"
