"""Damaged and incomplete checkpoint files, and the random generators in a checkpoint.

Runs that resume are in tests/test_resume.py.
"""

import io
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config.run_folder.checkpoints import checkpoint_path, checkpoints, newest_checkpoint
from config.schema.errors import ConfigError
from tests.checkpoint_helpers import save_checkpoint
from tests.training.test_checkpoint_tensors import Hostile
from torchgrpo.training.checkpoint import (
    LEARNER_KEYS,
    RUN_STATE_KEYS,
    begin_checkpoint,
    load_checkpoint,
    load_newest_checkpoint,
    random_state,
    read_run_config,
    restore_random_state,
    serialize_run_state,
)
from torchgrpo.training.checkpoint_tensors import UnreadableError, saved_tensors

RUN_STATE: dict[str, Any] = dict.fromkeys(RUN_STATE_KEYS, 0) | {"learner": dict.fromkeys(LEARNER_KEYS, 0)}


def random_numbers() -> list[float]:
    """Samples one number of every global generator, the cached half of a normal pair included."""
    numbers = [float(torch.rand(1)), float(np.random.rand()), float(np.random.randn()), random.random()]
    return [*numbers, random.gauss(0.0, 1.0)]


def test_every_global_generator_goes_on_where_it_was() -> None:
    np.random.seed(7)
    random.seed(7)
    np.random.randn()
    random.gauss(0.0, 1.0)
    file = io.BytesIO()
    torch.save(random_state(), file)
    expected = [random_numbers() for _ in range(3)]
    file.seek(0)
    restore_random_state(torch.load(file, weights_only=True))
    assert [random_numbers() for _ in range(3)] == expected


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("run.pt", b"", "run.pt is empty"),
        ("run.pt", b"no checkpoint", "run.pt is damaged (UnpicklingError"),
        ("run.pt", "half", "run.pt is damaged (ValueError"),
        ("run.pt", None, "run.pt: No such file or directory"),
        ("learner/.metadata", b"", "learner/.metadata is damaged (EOFError)"),
        ("learner/.metadata", b"no checkpoint", "learner/.metadata is damaged (UnpicklingError)"),
        ("learner/.metadata", "half", "learner/.metadata is damaged ("),
        ("learner/.metadata", None, "learner/.metadata: No such file or directory"),
        ("learner/__0_0.distcp", b"", "learner/__0_0.distcp has 0 bytes of 4"),
        ("learner/__0_0.distcp", "half", "learner/__0_0.distcp has 2"),
        ("learner/__0_0.distcp", None, "learner/__0_0.distcp is missing"),
    ],
)
def test_a_damaged_checkpoint_gives_one_message(
    file: str, content: bytes | str | None, reason: str, tmp_path: Path
) -> None:
    path = checkpoint_path(tmp_path, 3)
    save_checkpoint(path, RUN_STATE | {"tensor": torch.zeros(10_000)}, keep=0)
    damaged = path / file
    if content is None:
        damaged.unlink()
    elif content == "half":
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    else:
        damaged.write_bytes(content)
    with pytest.raises(UnreadableError) as error:
        load_checkpoint(path)
    assert str(error.value).startswith(f"train.resume={path}: {reason}")
    assert str(error.value).endswith("; name an earlier checkpoint of the same folder")
    assert (read_run_config(path) is None) == (file == "run.pt")


def test_a_checkpoint_is_found_whole_under_its_name(tmp_path: Path) -> None:
    for iteration in (9, 10, 1_000_000):
        save_checkpoint(checkpoint_path(tmp_path, iteration), RUN_STATE | {"iteration": iteration}, keep=0)
    newest = newest_checkpoint(tmp_path)
    assert newest == checkpoint_path(tmp_path, 1_000_000)
    assert load_checkpoint(newest) == RUN_STATE | {"iteration": 1_000_000}
    assert read_run_config(newest) == (0, 0)
    (newest / "run.pt").write_bytes(b"")
    path, state, skipped = load_newest_checkpoint(tmp_path)
    assert (path, state["iteration"]) == (checkpoint_path(tmp_path, 10), 10)
    assert skipped == [f"{newest}: run.pt is empty"]


def test_unfinished_checkpoints_are_invisible(tmp_path: Path) -> None:
    """A process was killed just before the rename, and while an old checkpoint was removed."""
    save_checkpoint(checkpoint_path(tmp_path, 1), RUN_STATE, keep=0)
    unfinished = begin_checkpoint(checkpoint_path(tmp_path, 2))
    shutil.copytree(checkpoint_path(tmp_path, 1), unfinished, dirs_exist_ok=True)
    (tmp_path / "checkpoints" / ".checkpoint_000003.removed").mkdir()
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, 1)]
    again = begin_checkpoint(checkpoint_path(tmp_path, 2))
    assert again == unfinished and not list(again.iterdir())


def test_a_rewritten_checkpoint_replaces_the_old_one(tmp_path: Path) -> None:
    for version in (1, 2):
        save_checkpoint(checkpoint_path(tmp_path, 5), RUN_STATE | {"policy_version": version}, keep=3)
    assert load_checkpoint(checkpoint_path(tmp_path, 5))["policy_version"] == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_000005"]


def test_later_changes_do_not_affect_a_serialized_state() -> None:
    state = {"prompts": {"sampled": [1, 2]}, "generator": torch.zeros(3)}
    content = serialize_run_state(state)
    state["prompts"]["sampled"].append(3)
    state["generator"] += 1
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert loaded["prompts"] == {"sampled": [1, 2]} and torch.equal(loaded["generator"], torch.zeros(3))


@pytest.mark.parametrize("key", [*sorted(RUN_STATE_KEYS), *(f"learner.{key}" for key in sorted(LEARNER_KEYS))])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    state = RUN_STATE | {"learner": dict(RUN_STATE["learner"])}
    outer, _, inner = key.partition(".")
    del (state["learner"] if inner else state)[inner or outer]
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, state, keep=0)
    with pytest.raises(ConfigError, match=rf"the checkpoint has no {key}, so another version of this code wrote it"):
        load_checkpoint(path)
    with pytest.raises(ConfigError, match="another version"):
        load_newest_checkpoint(tmp_path)


def test_a_list_is_no_checkpoint(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, [1], keep=0)
    with pytest.raises(ConfigError, match="the checkpoint has no config, "):
        load_checkpoint(path)


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4])])
def test_the_newest_are_kept(keep: int, left: list[int], tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save_checkpoint(checkpoint_path(tmp_path, iteration), RUN_STATE, keep=keep)
    assert [int(path.name.split("_")[1]) for path in sorted((tmp_path / "checkpoints").iterdir())] == left


def test_checkpoints_after_the_resumed_one_are_removed(tmp_path: Path) -> None:
    """A run that resumes at 10 and saves 20 removes the earlier 30 and 40."""
    assert newest_checkpoint(tmp_path) is None
    for iteration in (10, 30, 40, 20):
        save_checkpoint(checkpoint_path(tmp_path, iteration), RUN_STATE, keep=0)
    assert [int(path.name.split("_")[1]) for path in sorted((tmp_path / "checkpoints").iterdir())] == [10, 20]


def test_the_generators_of_gpus_are_saved_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuda" not in random_state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.tensor([7])])
    assert random_state()["cuda"] == [torch.tensor([7])]


@pytest.mark.parametrize("file", ["run.pt", "learner/.metadata"])
def test_a_checkpoint_runs_no_code(file: str, tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, RUN_STATE, keep=0)
    (path / file).write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    with pytest.raises(UnreadableError, match=f"{file} is damaged"):
        load_checkpoint(path)
    with pytest.raises(ConfigError):
        saved_tensors(path / "learner" if file != "run.pt" else path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_generators_of_gpus_that_are_gone_are_passed_over(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Calls that would reach a GPU are recorded, since no GPU is needed."""
    restored: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: int(state[0])}))
    saved = random_state() | {"cuda": [torch.tensor([7]), torch.tensor([8])]}
    expected = torch.rand(3)
    restore_random_state(saved)
    assert restored == {device: 7 + device for device in range(min(gpus, 2))}
    assert torch.equal(torch.rand(3), expected)


def test_a_file_without_read_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is faked, since root may read everything."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, RUN_STATE, keep=0)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UnreadableError, match=rf"^train\.resume={path}: run.pt: Permission denied; name an earlier"):
        load_checkpoint(path)


def test_a_run_saves_exactly_the_required_keys(lockstep_run: Path) -> None:
    assert load_checkpoint(checkpoint_path(lockstep_run, 4)).keys() == RUN_STATE_KEYS
