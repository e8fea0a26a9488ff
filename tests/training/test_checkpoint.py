"""What can be wrong with a checkpoint's file, and the generators that it holds. Runs that resume are in
tests/test_resume.py."""

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
from tests.saved import save_checkpoint
from tests.training.test_checkpoint_tensors import Hostile
from torchgrpo.training.checkpoint import (
    KEYS,
    LEARNER_KEYS,
    begin_checkpoint,
    load_checkpoint,
    load_newest,
    origin,
    packed,
    random_state,
    restore_random_state,
)
from torchgrpo.training.checkpoint_tensors import UnreadableError, saved_tensors

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
    ("file", "content", "why"),
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
def test_a_part_of_a_checkpoint_is_one_message(
    file: str, content: bytes | str | None, why: str, tmp_path: Path
) -> None:
    path = checkpoint_path(tmp_path, 3)
    save_checkpoint(path, WHOLE | {"tensor": torch.zeros(10_000)}, keep=0)
    damaged = path / file
    if content is None:
        damaged.unlink()
    elif content == "half":
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    else:
        damaged.write_bytes(content)
    with pytest.raises(UnreadableError) as refused:
        load_checkpoint(path)
    assert str(refused.value).startswith(f"train.resume={path}: {why}")
    assert str(refused.value).endswith("; take an earlier one from the same folder")
    assert (origin(path) is None) == (file == "run.pt")


def test_a_checkpoint_is_found_whole_under_its_name(tmp_path: Path) -> None:
    for iteration in (9, 10, 1_000_000):
        save_checkpoint(checkpoint_path(tmp_path, iteration), WHOLE | {"iteration": iteration}, keep=0)
    newest = newest_checkpoint(tmp_path)
    assert newest == checkpoint_path(tmp_path, 1_000_000)
    assert load_checkpoint(newest) == WHOLE | {"iteration": 1_000_000}
    assert origin(newest) == (0, 0)
    (newest / "run.pt").write_bytes(b"")
    path, state, passed_over = load_newest(tmp_path)
    assert (path, state["iteration"]) == (checkpoint_path(tmp_path, 10), 10)
    assert passed_over == [f"{newest}: run.pt is empty"]


def test_what_is_not_whole_is_seen_by_no_reader(tmp_path: Path) -> None:
    """Killed at the last moment before it gets its name, and while an old one is removed."""
    save_checkpoint(checkpoint_path(tmp_path, 1), WHOLE, keep=0)
    unfinished = begin_checkpoint(checkpoint_path(tmp_path, 2))
    shutil.copytree(checkpoint_path(tmp_path, 1), unfinished, dirs_exist_ok=True)
    (tmp_path / "checkpoints" / ".checkpoint_000003.removed").mkdir()
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, 1)]
    again = begin_checkpoint(checkpoint_path(tmp_path, 2))
    assert again == unfinished and not list(again.iterdir())


def test_one_that_is_written_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    for version in (1, 2):
        save_checkpoint(checkpoint_path(tmp_path, 5), WHOLE | {"policy_version": version}, keep=3)
    assert load_checkpoint(checkpoint_path(tmp_path, 5))["policy_version"] == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_000005"]


def test_the_state_of_a_run_is_packed_as_it_is_now() -> None:
    state = {"prompts": {"drawn": [1, 2]}, "generator": torch.zeros(3)}
    content = packed(state)
    state["prompts"]["drawn"].append(3)
    state["generator"] += 1
    was = torch.load(io.BytesIO(content), weights_only=True)
    assert was["prompts"] == {"drawn": [1, 2]} and torch.equal(was["generator"], torch.zeros(3))


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
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, [1], keep=0)
    with pytest.raises(ConfigError, match="it holds no config, "):
        load_checkpoint(path)


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4])])
def test_the_newest_are_kept(keep: int, left: list[int], tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save_checkpoint(checkpoint_path(tmp_path, iteration), WHOLE, keep=keep)
    assert [int(path.name.split("_")[1]) for path in sorted((tmp_path / "checkpoints").iterdir())] == left


def test_those_that_a_resumed_run_has_given_up_are_removed(tmp_path: Path) -> None:
    """It goes on from 10 and saves 20: what was 30 and 40 belongs to the run that was."""
    assert newest_checkpoint(tmp_path) is None
    for iteration in (10, 30, 40, 20):
        save_checkpoint(checkpoint_path(tmp_path, iteration), WHOLE, keep=0)
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
    save_checkpoint(path, WHOLE, keep=0)
    (path / file).write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    with pytest.raises(UnreadableError, match=f"{file} is damaged"):
        load_checkpoint(path)
    with pytest.raises(ConfigError):
        saved_tensors(path / "learner" if file != "run.pt" else path)
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
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UnreadableError, match=rf"^train\.resume={path}: run.pt: Permission denied; take"):
        load_checkpoint(path)


def test_all_that_a_run_saves_is_asked_of_a_checkpoint(lockstep_run: Path) -> None:
    assert load_checkpoint(checkpoint_path(lockstep_run, 4)).keys() == KEYS
