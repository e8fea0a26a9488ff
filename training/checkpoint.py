"""Checkpoints: written beside and renamed, found again, loaded without running code from them."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config.errors import ConfigError
from config.files import written_whole
from training import trained_parameters

FOLDER = "checkpoints"
PATTERN = "checkpoint_*.pt"
KEYS = {
    *("iteration", "overlapped", "evaluated", "learner", "policy_version", "generator", "random", "config"),
    *("prompts", "next_group_id"),
}
LEARNER_KEYS = {*trained_parameters.KEYS, "optimizer", "schedule_step"}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: what it holds, and where it lies."""

    path: Path
    state: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        """The folder of the run that wrote it."""
        return self.path.parent.parent

    @property
    def place(self) -> tuple[int, int, int]:
        """Its iteration, optimizer steps and policy version."""
        steps: int = self.state["learner"]["optimizer_steps"]
        return self.state["iteration"], steps, self.state["policy_version"]


def checkpoint_path(run_dir: Path, iteration: int) -> Path:
    return run_dir / FOLDER / f"checkpoint_{iteration:06d}.pt"


def save_checkpoint(path: Path, state: dict[str, Any], keep: int) -> None:
    """Write `state` so that `path` is either absent or whole; then remove all before it but the newest `keep`.

    Those after it are removed too: a run that was resumed from an earlier one has given them up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        torch.save(state, file)
    found = sorted(path.parent.glob(PATTERN))
    present = found.index(path) + 1
    for old in [*found[present:], *(found[:present][:-keep] if keep else [])]:
        old.unlink()


class UnreadableError(ConfigError):
    """A file that is no checkpoint, or only a part of one."""


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Raises ConfigError when there is no checkpoint, another version of this code wrote it, or (UnreadableError) it
    cannot be read."""
    if not path.is_file():
        raise ConfigError(
            f"train.resume={path}: no such file; give a checkpoint_*.pt, the folder of a run, or train.resume=auto"
        )
    if not path.stat().st_size:
        raise UnreadableError(
            f"train.resume={path}: the file is empty; take an earlier one from the same folder"
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise UnreadableError(f"train.resume={path}: {error.strerror}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnreadableError(
            f"train.resume={path}: not a readable checkpoint ({why}); take an earlier one from the same folder"
        ) from error
    missing = _missing(state)
    if missing:
        raise ConfigError(
            f"train.resume={path}: it holds no {', '.join(missing)}: another version of this code wrote it; go on with "
            "that version, or train from the beginning without train.resume"
        )
    return state


def _missing(state: Any) -> list[str]:
    if not isinstance(state, dict):
        return sorted(KEYS)
    learner = state.get("learner")
    inside = LEARNER_KEYS - learner.keys() if isinstance(learner, dict) else set()
    return [*sorted(KEYS - state.keys()), *(f"learner.{key}" for key in sorted(inside))]


def origin(path: Path) -> tuple[dict[str, Any], bool] | None:
    """The config of the run that wrote a checkpoint and whether it overlapped, without reading the tensors.

    None where it cannot be read: it is being written, or was removed, or is no checkpoint of ours.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state["config"], state["overlapped"]
    except Exception:  # unpickling what is no checkpoint may raise anything
        return None


def checkpoints(run_dir: Path) -> list[Path]:
    """Those of one run's folder, the highest iteration first."""
    return sorted((run_dir / FOLDER).glob(PATTERN), reverse=True)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the highest iteration in one run's folder."""
    return next(iter(checkpoints(run_dir)), None)


def load_newest(run_dir: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest checkpoint of a run's folder that can be read, its state, and why those after it cannot.

    Raises:
        ConfigError: there is none.
    """
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
    raise ConfigError(f"train.resume={run_dir}: there is no {FOLDER}/{PATTERN} in this folder")


def random_state() -> dict[str, Any]:
    """Every global generator's state, in types that `weights_only` loading accepts."""
    state_tuple: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = state_tuple
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            str(kind),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
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
