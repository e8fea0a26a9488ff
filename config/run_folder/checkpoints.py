"""Paths and names of a run's checkpoints, and of the models that are made of them.

RUN/checkpoints/checkpoint_000040/    RUN/checkpoints/best: a link to the one that train.keep_best keeps
RUN/models/checkpoint_000040/         RUN/models/best, RUN/model: links to the best and to the newest
"""

import re
import shutil
from pathlib import Path

FOLDER = "checkpoints"
MODELS, MODEL = "models", "model"
"""The folder of the models, and the link to the newest of them."""
BEST = "best"
"""The link to the best one, among checkpoints and among models."""
RUN_STATE = "run.pt"
"""The file in a checkpoint that holds all but the learner's tensors."""
WRITING, REMOVED = "writing", "removed"
"""What `hidden` names: a checkpoint that is not whole yet, and one that is not whole any more."""
_NAME = re.compile(r"checkpoint_(\d{6,})")


def checkpoint_path(run_dir: Path, iteration: int) -> Path:
    return run_dir / FOLDER / f"checkpoint_{iteration:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints in a run's folder, the highest iteration first."""
    named = [path for path in (run_dir / FOLDER).glob("checkpoint_*") if _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: (iteration_of(path), path), reverse=True)


def iteration_of(path: Path) -> int:
    """The iteration in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def model_of(path: Path) -> Path:
    """The folder of the model that is made of a checkpoint."""
    return path.parent.parent / MODELS / path.name


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the highest iteration in one run's folder."""
    return next(iter(checkpoints(run_dir)), None)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of a checkpoint, by its name or by its files."""
    return _NAME.fullmatch(path.name) is not None or (path / RUN_STATE).is_file()


def hidden(path: Path, state: str) -> Path:
    """A name beside a checkpoint's that no reader takes for one. state: `WRITING` or `REMOVED`."""
    return path.with_name(f".{path.name}.{state}")


def remove_checkpoint(path: Path) -> None:
    """Its name is gone at once, whatever ends this process before its files are."""
    gone = hidden(path, REMOVED)
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def remove_models(run_dir: Path) -> None:
    for path in (run_dir / MODELS).glob("checkpoint_*"):
        if _NAME.fullmatch(path.name) and not (run_dir / FOLDER / path.name).exists():
            remove_checkpoint(path)


def remove_unfinished_checkpoints(run_dir: Path) -> None:
    """Remove what killed runs left of those that they wrote or removed. The caller knows that no other run writes."""
    for state in (WRITING, REMOVED):
        for folder in (FOLDER, MODELS):
            for path in (run_dir / folder).glob(f".checkpoint_*.{state}"):
                shutil.rmtree(path)
