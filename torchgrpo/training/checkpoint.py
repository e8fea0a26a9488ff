"""Writes and loads `run.pt` of checkpoints, completes their folders, and captures random-generator states.

checkpoint_000040/run.pt     the small state of the run: iteration, config, prompts, generators, the learner's
scalars
checkpoint_000040/learner/   every tensor of the learner (training.learner_state, training.checkpoint_tensors)

A checkpoint is written under a hidden name and renamed when complete. Loading runs no code from the files.
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

from config.run_folder.atomic_files import sync_to_disk
from config.run_folder.checkpoints import (
    CHECKPOINTS_FOLDER,
    RUN_STATE,
    STATE_WRITING,
    checkpoints,
    hidden_path,
    remove_checkpoint,
)
from config.schema.errors import ConfigError
from config.schema.former_names import with_new_settings
from torchgrpo.training import trained_parameters
from torchgrpo.training.checkpoint_tensors import UnreadableError, check_tensor_files

LEARNER = "learner"
RUN_STATE_KEYS = {
    *("iteration", "overlapped", "evaluated", "learner", "policy_version", "generator", "random", "config"),
    *("prompts", "next_group_id", "newest_prompts", "lowest_scores"),
}
LEARNER_KEYS = {*trained_parameters.MODEL_KEYS, "optimizer_steps", "schedule_step", "step_counts"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose `run.pt` has been read.

    path: the checkpoint's folder. state: the content of `run.pt`.
    """

    path: Path
    state: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        """The folder of the run that wrote the checkpoint."""
        return self.path.parent.parent

    @property
    def learner_folder(self) -> Path:
        """The folder of the learner's tensors."""
        return self.path / LEARNER

    @property
    def counters(self) -> tuple[int, int, int]:
        """Iteration, optimizer steps and policy version at which the checkpoint was written."""
        steps: int = self.state["learner"]["optimizer_steps"]
        return self.state["iteration"], steps, self.state["policy_version"]


def begin_checkpoint(path: Path) -> Path:
    """Creates the hidden folder in which the checkpoint `path` is written, and returns it.

    `complete_checkpoint` renames the folder to `path`. No reader sees the folder before.
    """
    abandon_checkpoint(path)
    unfinished = hidden_path(path, STATE_WRITING)
    unfinished.mkdir(parents=True)
    return unfinished


def abandon_checkpoint(path: Path) -> None:
    """Removes the unfinished folder that `begin_checkpoint(path)` created."""
    shutil.rmtree(hidden_path(path, STATE_WRITING), ignore_errors=True)


def serialize_run_state(state: dict[str, Any]) -> bytes:
    """Returns the bytes of `run.pt`; later changes of `state` do not affect them."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def complete_checkpoint(path: Path, run: bytes) -> None:
    """Writes `run.pt` into the unfinished checkpoint and gives its folder the name `path`.

    run: the content of `run.pt`. The learner's tensors must already be in the folder. `path` is either absent
    or complete, whatever ends this process or the machine.
    """
    unfinished = hidden_path(path, STATE_WRITING)
    with (unfinished / RUN_STATE).open("wb") as file:
        file.write(run)
        file.flush()
        os.fsync(file.fileno())
    sync_to_disk(unfinished)
    if path.exists():
        remove_checkpoint(path)
    unfinished.rename(path)
    sync_to_disk(path.parent)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads `run.pt` of a complete checkpoint, and checks the lengths of its tensor files.

    Raises:
        ConfigError: there is no checkpoint, or another version of this code wrote it.
        UnreadableError: a file of the checkpoint is missing or damaged.
    """
    if not path.is_dir():
        raise ConfigError(
            f"train.resume={path}: no such folder; give a checkpoint, the folder of a run, or train.resume=auto"
        )
    try:
        state = _load_run_state(path)
        check_tensor_files(path / LEARNER)
    except UnreadableError as error:
        raise UnreadableError(f"train.resume={path}: {error}; name an earlier checkpoint of the same folder") from error
    run_state = state if isinstance(state, dict) else {}
    learner = run_state.get("learner")
    missing_in_learner = LEARNER_KEYS - learner.keys() if isinstance(learner, dict) else set()
    missing = [*sorted(RUN_STATE_KEYS - run_state.keys()), *(f"learner.{key}" for key in sorted(missing_in_learner))]
    if missing:
        raise ConfigError(
            f"train.resume={path}: the checkpoint has no {', '.join(missing)}, so another version of this "
            "code wrote it; resume with that version, or start from the beginning without train.resume"
        )
    return state


def _load_run_state(path: Path) -> dict[str, Any]:
    """Reads `run.pt` of a checkpoint. Raises UnreadableError."""
    try:
        content = (path / RUN_STATE).read_bytes()
    except OSError as error:
        raise UnreadableError(f"{RUN_STATE}: {error.strerror}") from error
    if not content:
        raise UnreadableError(f"{RUN_STATE} is empty")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a file that is no checkpoint may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnreadableError(f"{RUN_STATE} is damaged ({reason})") from error
    if isinstance(state, dict) and isinstance(state.get("config"), dict):
        with_new_settings(state["config"])
    return state


def read_run_config(path: Path) -> tuple[dict[str, Any], bool] | None:
    """Returns the config of a checkpoint's run and whether the run overlapped; None where unreadable."""
    try:
        state = _load_run_state(path)
        return state["config"], state["overlapped"]
    except (UnreadableError, KeyError, TypeError):
        return None


def load_newest_checkpoint(run_dir: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Returns the newest readable checkpoint, its state, and the errors of newer, unreadable ones.

    Raises:
        ConfigError: no checkpoint of the folder can be read.
    """
    skipped: list[str] = []
    for path in checkpoints(run_dir):
        try:
            return path, load_checkpoint(path), skipped
        except UnreadableError as error:
            skipped.append(str(error).removeprefix("train.resume=").split(";")[0])
    if skipped:
        raise ConfigError(
            f"train.resume: none of the {len(skipped)} checkpoints in {run_dir / CHECKPOINTS_FOLDER} can be "
            f"read ({skipped[0]}); train from the beginning in another folder, or restore a checkpoint from a "
            "copy"
        )
    raise ConfigError(f"train.resume={run_dir}: the folder has no {CHECKPOINTS_FOLDER}/checkpoint_*")


def random_state() -> dict[str, Any]:
    """Returns the states of all global random-number generators, in types that `weights_only` loading accepts."""
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
    """Restores the global random-number generators from `random_state`.

    A GPU that the saving machine did not have keeps its generator; the saved generator of a GPU that is gone
    is dropped.
    """
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    for device, generator in zip(range(torch.cuda.device_count()), state.get("cuda", []), strict=False):
        torch.cuda.set_rng_state(generator, device)
