"""What can be wrong with a checkpoint's file, and the generators that it holds. Runs that resume are in
tests/test_resume.py."""

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config.errors import ConfigError
from training.checkpoint import (
    KEYS,
    LEARNER_KEYS,
    UnreadableError,
    checkpoint_path,
    load_checkpoint,
    load_newest,
    newest_checkpoint,
    origin,
    random_state,
    restore_random_state,
    save_checkpoint,
)

WHOLE: dict[str, Any] = dict.fromkeys(KEYS, 0) | {"learner": dict.fromkeys(LEARNER_KEYS, 0)}


def draws() -> list[float]:
    """Of every global generator, the cached half of a normal pair included."""
    drawn = [float(torch.rand(1)), float(np.random.rand()), float(np.random.randn()), random.random()]
    return [*drawn, random.gauss(0.0, 1.0)]


def test_every_global_generator_goes_on_where_it_was() -> None:
    np.random.seed(7)
    random.seed(7)
    np.random.randn()
    random.gauss(0.0, 1.0)
    file = io.BytesIO()
    torch.save(random_state(), file)
    expected = [draws() for _ in range(3)]
    file.seek(0)
    restore_random_state(torch.load(file, weights_only=True))
    assert [draws() for _ in range(3)] == expected


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the file is empty"),
        (b"no checkpoint", "not a readable checkpoint (UnpicklingError"),
        (None, "not a readable checkpoint (RuntimeError"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(content: bytes | None, why: str, tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 3)
    save_checkpoint(path, WHOLE | {"tensor": torch.zeros(10_000)}, keep=0)
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    with pytest.raises(UnreadableError) as refused:
        load_checkpoint(path)
    assert str(refused.value).startswith(f"train.resume={path}: {why}")
    assert str(refused.value).endswith("; take an earlier one from the same folder")
    assert origin(path) is None


def test_a_checkpoint_is_found_whole_under_its_name(tmp_path: Path) -> None:
    for iteration in (9, 10, 100):
        save_checkpoint(checkpoint_path(tmp_path, iteration), WHOLE | {"iteration": iteration}, keep=0)
    newest = newest_checkpoint(tmp_path)
    assert newest == checkpoint_path(tmp_path, 100)
    assert load_checkpoint(newest) == WHOLE | {"iteration": 100}
    assert origin(newest) == (0, 0)
    newest.write_bytes(b"")
    path, state, passed_over = load_newest(tmp_path)
    assert (path, state["iteration"]) == (checkpoint_path(tmp_path, 10), 10)
    assert passed_over == [f"{newest}: the file is empty"]


@pytest.mark.parametrize("key", [*sorted(KEYS), *(f"learner.{key}" for key in sorted(LEARNER_KEYS))])
def test_what_an_older_version_did_not_save_is_named(key: str, tmp_path: Path) -> None:
    state = WHOLE | {"learner": dict(WHOLE["learner"])}
    outer, _, inner = key.partition(".")
    del (state["learner"] if inner else state)[inner or outer]
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, state, keep=0)
    with pytest.raises(ConfigError, match=rf"it holds no {key}: another version of this code wrote it"):
        load_checkpoint(path)
    with pytest.raises(ConfigError, match="another version"):
        load_newest(tmp_path)


def test_a_list_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="it holds no config, "):
        load_checkpoint(tmp_path / "list.pt")


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4])])
def test_the_newest_are_kept(keep: int, left: list[int], tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save_checkpoint(checkpoint_path(tmp_path, iteration), WHOLE, keep=keep)
    assert [int(path.stem.split("_")[1]) for path in sorted((tmp_path / "checkpoints").iterdir())] == left


def test_those_that_a_resumed_run_has_given_up_are_removed(tmp_path: Path) -> None:
    """It goes on from 10 and saves 20: what was 30 and 40 belongs to the run that was."""
    assert newest_checkpoint(tmp_path) is None
    for iteration in (10, 30, 40, 20):
        save_checkpoint(checkpoint_path(tmp_path, iteration), WHOLE, keep=0)
    assert [int(path.stem.split("_")[1]) for path in sorted((tmp_path / "checkpoints").iterdir())] == [10, 20]


def test_the_generators_of_gpus_are_saved_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuda" not in random_state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.tensor([7])])
    assert random_state()["cuda"] == [torch.tensor([7])]


class Hostile:
    """Unpickling it would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    torch.save({"iteration": Hostile(tmp_path / "made")}, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "made").exists()


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


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything: the refusal is made here."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, WHOLE, keep=0)
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(UnreadableError, match=rf"^train\.resume={path}: Permission denied$"):
        load_checkpoint(path)
