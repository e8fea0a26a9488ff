"""Checkpoints: written beside and renamed, found again, loaded without running code from them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config.errors import ConfigError
from config.files import written_whole

FOLDER = "checkpoints"
PATTERN = "checkpoint_*.pt"
KEYS = {
    *("iteration", "overlapped", "evaluated", "learner", "policy_version", "generator", "random", "config"),
    *("prompts", "next_group_id"),
}


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


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Raises ConfigError when there is no checkpoint, it cannot be read, or another version of this code wrote it."""
    if not path.is_file():
        raise ConfigError(
            f"train.resume={path}: no such file; give the path of a checkpoint_*.pt, or train.resume=auto"
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"train.resume={path}: not a readable checkpoint ({error}); take an earlier one from the same folder"
        ) from error
    missing = sorted(KEYS - state.keys())
    if missing:
        raise ConfigError(
            f"train.resume={path}: it holds no {', '.join(missing)}: another version of this code wrote it; go on with "
            "that version, or train from the beginning without train.resume"
        )
    return state


def origin(path: Path) -> tuple[dict[str, Any], bool] | None:
    """The config of the run that wrote a checkpoint and whether it overlapped, without reading the tensors.

    None where it cannot be read: it is being written, or was removed, or is no checkpoint of ours.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state["config"], state["overlapped"]
    except Exception:  # unpickling what is no checkpoint may raise anything
        return None


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the highest iteration in one run's folder."""
    found = sorted((run_dir / FOLDER).glob(PATTERN))
    return found[-1] if found else None


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
