"""Checks of the selftest's learner leave nothing behind, whatever they find."""

from pathlib import Path

import pytest

from selftest import learner
from selftest.check import Bench
from training.local_learner import LocalLearner


def test_a_check_that_fails_closes_its_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[LocalLearner] = []

    def fails(*given: object, **how: object) -> None:
        raise AssertionError("in the middle")

    monkeypatch.setattr(learner, "moved", fails)
    monkeypatch.setattr(LocalLearner, "close", lambda self: closed.append(self))
    with pytest.raises(AssertionError, match="in the middle"):
        learner.references(Bench(tmp_path, "cpu"), ["host memory"])
    assert len(closed) == 2, "that of the rollouts, and that of the check"
