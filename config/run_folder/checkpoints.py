"""Names, finds and removes the folders of a run's checkpoints and exported models.

RUN/checkpoints/checkpoint_000040/    RUN/checkpoints/best: a link to the checkpoint that train.keep_best keeps
RUN/models/checkpoint_000040/         RUN/models/best, RUN/model: links to the best and to the newest model
"""

import re
import shutil
from pathlib import Path

CHECKPOINTS_FOLDER = "checkpoints"
MODELS_FOLDER, MODEL_LINK = "models", "model"
"""The folder of exported models in a run's folder, and the link to the newest model."""
BEST_LINK = "best"
"""The link to the best checkpoint in the checkpoints folder, and to the best model in the models folder."""
RUN_STATE = "run.pt"
"""The file of a checkpoint with the whole run state except the learner's tensors."""
STATE_WRITING, STATE_REMOVED = "writing", "removed"
"""States in `hidden_path`: a checkpoint that is being written, and a checkpoint that is being removed."""
_NAME = re.compile(r"checkpoint_(\d{6,})")


def checkpoint_path(run_dir: Path, iteration: int) -> Path:
    return run_dir / CHECKPOINTS_FOLDER / f"checkpoint_{iteration:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Returns the checkpoints in a run's folder, highest iteration first."""
    paths = [path for path in (run_dir / CHECKPOINTS_FOLDER).glob("checkpoint_*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (checkpoint_iteration(path), path), reverse=True)


def checkpoint_iteration(path: Path) -> int:
    """Returns the iteration in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def checkpoint_model_path(path: Path) -> Path:
    """Returns the folder of the model that is exported from a checkpoint."""
    return path.parent.parent / MODELS_FOLDER / path.name


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Returns the checkpoint of the highest iteration in a run's folder, or None."""
    return next(iter(checkpoints(run_dir)), None)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, by its name or by its files."""
    return _NAME.fullmatch(path.name) is not None or (path / RUN_STATE).is_file()


def hidden_path(path: Path, state: str) -> Path:
    """Returns a hidden path beside a checkpoint, which no reader takes for a checkpoint.

    state: `STATE_WRITING` or `STATE_REMOVED`.
    """
    return path.with_name(f".{path.name}.{state}")


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint, renaming its folder first.

    No partial checkpoint keeps the name if the process dies before all files are removed.
    """
    removed = hidden_path(path, STATE_REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed)


def remove_models(run_dir: Path) -> None:
    """Removes the exported models whose checkpoints no longer exist."""
    for path in (run_dir / MODELS_FOLDER).glob("checkpoint_*"):
        if _NAME.fullmatch(path.name) and not (run_dir / CHECKPOINTS_FOLDER / path.name).exists():
            remove_checkpoint(path)


def remove_unfinished_checkpoints(run_dir: Path) -> None:
    """Removes partial checkpoints and models of killed runs.

    The caller guarantees that no other run writes to the folder.
    """
    for state in (STATE_WRITING, STATE_REMOVED):
        for folder in (CHECKPOINTS_FOLDER, MODELS_FOLDER):
            for path in (run_dir / folder).glob(f".checkpoint_*.{state}"):
                shutil.rmtree(path)
