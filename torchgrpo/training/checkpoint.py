"""Checkpoints: folders that are written beside and renamed, found again, and loaded without running code from them.

checkpoint_000040/run.pt     the small state of the run: iteration, config, prompts, generators, the learner's numbers
checkpoint_000040/learner/   every tensor of the learner (training.learner_state, training.checkpoint_tensors)
"""

import io
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config.run_folder.checkpoints import FOLDER, RUN_STATE, WRITING, checkpoints, hidden, remove_checkpoint
from config.run_folder.files import sync_folder
from config.schema.errors import ConfigError
from torchgrpo.training import trained_parameters
from torchgrpo.training.checkpoint_tensors import UnreadableError, check_files

LEARNER = "learner"
KEYS = {
    *("iteration", "overlapped", "evaluated", "learner", "policy_version", "generator", "random", "config"),
    *("prompts", "next_group_id", "newest_prompts", "lowest_scores"),
}
LEARNER_KEYS = {*trained_parameters.KEYS, "optimizer_steps", "schedule_step", "step_counts"}


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose `run.pt` was read: what that holds, and where it lies."""

    path: Path
    state: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        """The folder of the run that wrote it."""
        return self.path.parent.parent

    @property
    def learner(self) -> Path:
        """The folder of its tensors."""
        return self.path / LEARNER

    @property
    def place(self) -> tuple[int, int, int]:
        """Its iteration, optimizer steps and policy version."""
        steps: int = self.state["learner"]["optimizer_steps"]
        return self.state["iteration"], steps, self.state["policy_version"]


def begin_checkpoint(path: Path) -> Path:
    """An empty folder beside `path`, hidden from every reader, that `complete_checkpoint` gives its name."""
    abandon_checkpoint(path)
    unfinished = hidden(path, WRITING)
    unfinished.mkdir(parents=True)
    return unfinished


def abandon_checkpoint(path: Path) -> None:
    """Remove what `begin_checkpoint(path)` gave."""
    shutil.rmtree(hidden(path, WRITING), ignore_errors=True)


def packed(state: dict[str, Any]) -> bytes:
    """The content of `run.pt`: nothing that changes `state` afterwards changes it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def complete_checkpoint(path: Path, run: bytes) -> None:
    """Give what `begin_checkpoint(path)` gave, with its tensors in it, `run.pt` and the name `path`: that folder is
    either absent or whole, whatever ends this process or the machine."""
    unfinished = hidden(path, WRITING)
    with (unfinished / RUN_STATE).open("wb") as file:
        file.write(run)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(unfinished)
    if path.exists():
        remove_checkpoint(path)
    unfinished.rename(path)
    sync_folder(path.parent)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What `run.pt` of a checkpoint holds whose other files are there too.

    Raises:
        ConfigError: there is no checkpoint, another version of this code wrote it, or (UnreadableError) it is only
            a part of one.
    """
    if not path.is_dir():
        raise ConfigError(
            f"train.resume={path}: no such folder; give a checkpoint, the folder of a run, or train.resume=auto"
        )
    try:
        state = _run_state(path)
        check_files(path / LEARNER)
    except UnreadableError as error:
        raise UnreadableError(
            f"train.resume={path}: {error}; take an earlier one from the same folder"
        ) from error
    there = state if isinstance(state, dict) else {}
    learner = there.get("learner")
    inside = LEARNER_KEYS - learner.keys() if isinstance(learner, dict) else set()
    missing = [*sorted(KEYS - there.keys()), *(f"learner.{key}" for key in sorted(inside))]
    if missing:
        raise ConfigError(
            f"train.resume={path}: it holds no {', '.join(missing)}: another version of this code wrote it; go on with "
            "that version, or train from the beginning without train.resume"
        )
    return state


def _run_state(path: Path) -> dict[str, Any]:
    try:
        content = (path / RUN_STATE).read_bytes()
    except OSError as error:
        raise UnreadableError(f"{RUN_STATE}: {error.strerror}") from error
    if not content:
        raise UnreadableError(f"{RUN_STATE} is empty")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling what is no checkpoint may raise anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnreadableError(f"{RUN_STATE} is damaged ({why})") from error
    return state


def origin(path: Path) -> tuple[dict[str, Any], bool] | None:
    """Config of a checkpoint's run and whether it overlapped; None where it cannot be read."""
    try:
        state = _run_state(path)
        return state["config"], state["overlapped"]
    except (UnreadableError, KeyError, TypeError):
        return None


def load_newest(run_dir: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest readable checkpoint, its state, and why later ones are not. Raises ConfigError."""
    passed_over: list[str] = []
    for path in checkpoints(run_dir):
        try:
            return path, load_checkpoint(path), passed_over
        except UnreadableError as error:
            passed_over.append(str(error).removeprefix("train.resume=").split(";")[0])
    if passed_over:
        raise ConfigError(
            f"train.resume: none of the {len(passed_over)} checkpoints in {run_dir / FOLDER} can be read "
            f"({passed_over[0]}); train from the beginning in another folder, or restore one from a copy"
        )
    raise ConfigError(f"train.resume={run_dir}: there is no {FOLDER}/checkpoint_* in this folder")


def random_state() -> dict[str, Any]:
    """Every global generator's state, in types that `weights_only` loading accepts."""
    state_tuple: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = state_tuple
    version, internal, gauss = random.getstate()
    words = torch.from_numpy(keys.astype(np.int64))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), words, int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """GPUs that were not there, or are gone, keep or lose their generators; the others go on where they were."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    for device, generator in zip(range(torch.cuda.device_count()), state.get("cuda", []), strict=False):
        torch.cuda.set_rng_state(generator, device)
