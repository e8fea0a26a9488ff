"""Which checkpoints stay and which is the newest; the global generators, on any machine. Runs that resume are in
tests/test_grpo.py."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from training.checkpoint import (
    checkpoint_path,
    newest_checkpoint,
    origin,
    random_state,
    restore_random_state,
    save_checkpoint,
)


def saved(run_dir: Path, *iterations: int, keep: int = 0) -> list[int]:
    """The iterations whose checkpoints are there after these were saved."""
    for iteration in iterations:
        save_checkpoint(checkpoint_path(run_dir, iteration), {"iteration": iteration}, keep)
    return [int(path.stem.removeprefix("checkpoint_")) for path in sorted(run_dir.glob("checkpoints/*"))]


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept_and_nothing_half_written(keep: int, left: list[int], tmp_path: Path) -> None:
    assert saved(tmp_path, 1, 2, 3, 4, keep=keep) == left
    newest = newest_checkpoint(tmp_path)
    assert newest == checkpoint_path(tmp_path, 4)
    assert torch.load(newest, weights_only=True) == {"iteration": 4}


def test_those_that_a_resumed_run_has_given_up_are_removed(tmp_path: Path) -> None:
    """It goes on from 10 and saves 20: what was 30 and 40 belongs to the run that was."""
    assert saved(tmp_path, 10, 30, 40) == [10, 30, 40]
    assert saved(tmp_path, 20) == [10, 20]
    assert saved(tmp_path, 15, keep=1) == [15]


def test_the_newest_is_that_of_the_highest_iteration(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    saved(tmp_path, 9, 10, 100)
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 100)


def test_the_origin_of_a_checkpoint_and_of_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_000001.pt"
    save_checkpoint(path, {"config": {"seed": 3}, "overlapped": True, "learner": torch.zeros(9)}, keep=0)
    assert origin(path) == ({"seed": 3}, True)
    path.write_bytes(path.read_bytes()[:-100])
    assert origin(path) is None
    assert origin(tmp_path / "nowhere.pt") is None


def drawn() -> list[float]:
    """Numbers from every global generator; the second normal one comes out of a pair that was drawn at once."""
    return [
        *torch.rand(2).tolist(),
        *np.random.rand(2).tolist(),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


def test_every_generator_goes_on_where_it_was() -> None:
    drawn()
    state = random_state()
    expected = drawn()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert drawn() != expected
    restore_random_state(state)
    assert drawn() == expected


def test_the_generators_of_gpus_are_saved_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuda" not in random_state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.tensor([7])])
    assert random_state()["cuda"] == [torch.tensor([7])]


@pytest.mark.parametrize("there", [0, 1, 3])
def test_generators_of_gpus_that_are_gone_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """No GPU is here: the calls that would reach one are recorded."""
    restored: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: restored.update({device: int(state[0])})
    )
    saved = random_state() | {"cuda": [torch.tensor([7]), torch.tensor([8])]}
    expected = torch.rand(3)
    restore_random_state(saved)
    assert restored == {device: 7 + device for device in range(min(there, 2))}
    assert torch.equal(torch.rand(3), expected)
