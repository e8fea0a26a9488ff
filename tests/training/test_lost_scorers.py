"""Tests of frozen scorers that lose copies or batches."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from config.schema.errors import ConfigError, RankLost
from envs.group import Group
from tests.groups import credit_groups
from tests.killed_ranks import RankKiller
from tests.log_capture import LogCapture
from tests.training.test_frozen_scorers import local_learner, make_scorers, score_batch, scored_config
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.training.frozen_scorers import FrozenScorers, ModelCopy
from torchgrpo.training.ranks import Ranks

pytestmark = pytest.mark.long


@pytest.fixture
def two_copies(local_ray: None, model: str, tmp_path: Path) -> Iterator[FrozenScorers]:
    there = make_scorers(scored_config(model, 1), tmp_path)
    yield there
    there.close()


def process_ids(scorers: FrozenScorers) -> list[int]:
    return [pid for copy in scorers.copies if copy.ranks is not None for pid in copy.ranks.process_ids]


def test_cancelled_batches_are_not_scored(
    two_copies: FrozenScorers, model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = local_learner(scored_config(model, 1), tmp_path, two_copies)
    scored_groups: list[int] = []
    free = threading.Event()
    log_prob = ModelCopy.log_prob

    def wait_then_score(copy: ModelCopy, batch: Batch) -> Tensor:
        scored_groups.extend(dict.fromkeys(batch.group_id[:, 0].tolist()))
        assert free.wait(600)
        return log_prob(copy, batch)

    monkeypatch.setattr(ModelCopy, "log_prob", wait_then_score)
    for group in groups:
        learner.begin_scoring(group)
    learner.drop_scores(groups[2:])
    free.set()
    score_batch(two_copies, collate(groups[:1]))
    assert set(scored_groups) <= {groups[0].group_id, groups[1].group_id}


def kill(scorers: FrozenScorers, number: int = 0) -> None:
    os.kill(process_ids(scorers)[number], signal.SIGKILL)


def test_lost_scorers_are_replaced(
    two_copies: FrozenScorers,
    model: str,
    groups: list[Group],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_capture: LogCapture,
) -> None:
    """Lost copies are replaced: two idle ones at once, one scoring, one loading."""
    batch = credit_groups(local_learner(scored_config(model, 1), tmp_path, two_copies), groups)
    (expected,) = score_batch(two_copies, batch)
    before = process_ids(two_copies)
    back = threading.Semaphore(0)
    both = threading.Barrier(2, timeout=600)
    load_copy, log_prob = ModelCopy.load, ModelCopy.log_prob

    def load_and_signal(copy: ModelCopy) -> None:
        load_copy(copy)
        back.release()

    def score_beside_the_other(copy: ModelCopy, batch: Batch) -> Tensor:
        both.wait()
        return log_prob(copy, batch)

    monkeypatch.setattr(ModelCopy, "load", load_and_signal)
    kill(two_copies, 0)
    kill(two_copies, 1)
    with monkeypatch.context() as patch:  # after this each copy has scored, and its losses count from 0
        patch.setattr(ModelCopy, "log_prob", score_beside_the_other)
        assert all(torch.equal(one, expected) for one in score_batch(two_copies, batch, 4))
    assert [copy.losses for copy in two_copies.copies] == [0, 0]
    assert not set(before) & set(process_ids(two_copies))
    killer = RankKiller(monkeypatch, "scorer", ("log_prob", 1), ("build", 1))
    assert all(torch.equal(one, expected) for one in score_batch(two_copies, batch, 6))
    assert all(back.acquire(timeout=600) for _ in range(3))
    assert not killer.remaining
    assert all(torch.equal(one, expected) for one in score_batch(two_copies, batch, 2))
    assert "is lost and replaced: scorer rank" in log_capture.text
    assert "is lost while it loads, and replaced" in log_capture.text


def test_a_lost_copy_waits_for_its_resources(
    two_copies: FrozenScorers, model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that was loaded before is replaced once Ray has room again."""
    batch = credit_groups(local_learner(scored_config(model, 1), tmp_path, two_copies), groups)
    reserve = Ranks._reserve_resources
    refused = threading.Event()

    def refuse_once(ranks: Ranks) -> Any:
        if not refused.is_set():
            refused.set()
            raise ConfigError("Ray has no free resources")
        return reserve(ranks)

    monkeypatch.setattr(Ranks, "_reserve_resources", refuse_once)
    kill(two_copies, 0)
    kill(two_copies, 1)
    expected, *others = score_batch(two_copies, batch, 4)
    assert refused.is_set()
    assert all(torch.equal(one, expected) for one in others)


def test_a_microbatch_that_kills_all_copies_ends_the_run(
    two_copies: FrozenScorers, model: str, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = credit_groups(local_learner(scored_config(model, 1), tmp_path, two_copies), groups)
    RankKiller(monkeypatch, "scorer", *[("log_prob", 1)] * 9)
    with pytest.raises(RankLost, match=r"scorer rank [01] \(CPU\) died in log-probs"):
        score_batch(two_copies, batch)
    with pytest.raises(RankLost):
        score_batch(two_copies, batch)
