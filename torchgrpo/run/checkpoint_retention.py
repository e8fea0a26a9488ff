"""Removes old checkpoints and models, finds and links the best, and reports the newest model.

the newest train.keep_checkpoints ─┐
the best by train.keep_best ───────┴▶ stay; all others, and those after a resumed one, are removed
"""

from pathlib import Path

from config.cli.command_line import evaluate_command
from config.run_folder.atomic_files import replace_link
from config.run_folder.checkpoints import (
    BEST_LINK,
    CHECKPOINTS_FOLDER,
    MODEL_LINK,
    MODELS_FOLDER,
    checkpoint_iteration,
    checkpoint_model_path,
    checkpoints,
    remove_checkpoint,
    remove_models,
)
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalSetConfig
from config.schema.train import TrainConfig


def remove_old_checkpoints(path: Path, train: TrainConfig) -> None:
    """Removes checkpoints once a new one has been written.

    The newest `train.keep_checkpoints` and the best stay. Checkpoints of later iterations than the new one are left
    from before a resume, and are removed.

    path: the new checkpoint.
    """
    run_dir, found = path.parent.parent, checkpoints(path.parent.parent)
    position = found.index(path)
    for abandoned in found[:position]:
        remove_checkpoint(abandoned)
    best = None if train.keep_best is None else best_checkpoint(run_dir, train.keep_best)
    if best is not None:
        replace_link(run_dir / CHECKPOINTS_FOLDER / BEST_LINK, best.name)
    for old in found[position + train.keep_checkpoints :] if train.keep_checkpoints else []:
        if old != best:
            remove_checkpoint(old)
    _remove_dangling(run_dir / CHECKPOINTS_FOLDER / BEST_LINK)


def best_checkpoint(run_dir: Path, metric: str) -> Path | None:
    """Returns the checkpoint with the highest value of a metric, the earliest of equals.

    None where no checkpoint was evaluated.
    """
    values = evaluation_metric(run_dir, metric)
    candidates = [path for path in reversed(checkpoints(run_dir)) if checkpoint_iteration(path) in values]
    return max(candidates, key=lambda path: values[checkpoint_iteration(path)], default=None)


def is_best_evaluation(run_dir: Path, metric: str, iteration: int) -> bool:
    """Whether the metric after this iteration is higher than that of every checkpoint."""
    values, best = evaluation_metric(run_dir, metric), best_checkpoint(run_dir, metric)
    if iteration not in values:
        return False
    return best is None or values[iteration] > values[checkpoint_iteration(best)]


def evaluation_metric(run_dir: Path, metric: str) -> dict[int, float]:
    """Returns the values of an evaluation metric by iteration, without NaN."""
    from torchgrpo.monitoring.metrics_file import MetricsFile  # which imports torch

    rows = MetricsFile(run_dir / "metrics.jsonl").read_rows()
    values = {row["iteration"]: row[metric] for row in rows if metric in row and "iteration" in row}
    return {iteration: value for iteration, value in values.items() if value == value}


def link_newest_model(checkpoint: Path) -> None:
    """Links the models of the newest and best checkpoints, and removes models without checkpoint.

    checkpoint: the newest one, whose model has been written.
    """
    run_dir = checkpoint.parent.parent
    replace_link(run_dir / MODEL_LINK, f"{MODELS_FOLDER}/{checkpoint.name}")
    best = (run_dir / CHECKPOINTS_FOLDER / BEST_LINK).resolve()
    if checkpoint_model_path(best).is_dir():
        replace_link(run_dir / MODELS_FOLDER / BEST_LINK, best.name)
    remove_models(run_dir)
    _remove_dangling(run_dir / MODELS_FOLDER / BEST_LINK)


def model_notices(config: Config, run_dir: Path) -> list[str]:
    """Returns notices about a run's newest model: its path, and the command that evaluates it.

    Empty where the run has no model.
    """
    model = run_dir / MODEL_LINK
    if not model.is_dir():
        return []
    notice = f"model: {model} ({model.resolve().name})"
    sets = "" if config.eval.sets else f"eval.sets={{test:{{dataset:{config.env.dataset}}}}}"
    try:
        EvalSetConfig(config.env.dataset).env("eval.sets.test", config.env)
    except ConfigError:  # the training data have no test split
        return [notice]
    return [f"{notice}\nto evaluate this model:\n  {evaluate_command(model, sets)}"]


def _remove_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        path.unlink()
