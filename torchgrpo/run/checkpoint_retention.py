"""Which checkpoints of a run stay, and which of them is the best; the models that are made of them go with them.

the newest train.keep_checkpoints ─┐
the best by train.keep_best ───────┴▶ stay; all others, and those after a resumed one, are removed
"""

from pathlib import Path

from config.cli.command_line import evaluate_command
from config.run_folder.checkpoints import (
    BEST,
    FOLDER,
    MODEL,
    MODELS,
    checkpoints,
    iteration_of,
    model_of,
    remove_checkpoint,
    remove_models,
)
from config.run_folder.files import link
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalSetConfig
from config.schema.train import TrainConfig


def remove_others(path: Path, train: TrainConfig) -> None:
    """A checkpoint has been written: remove all before it but the newest ones and the best, and those after it, which a
    run that was resumed from an earlier one has given up."""
    run_dir, found = path.parent.parent, checkpoints(path.parent.parent)
    place = found.index(path)
    for given_up in found[:place]:
        remove_checkpoint(given_up)
    best = None if train.keep_best is None else best_checkpoint(run_dir, train.keep_best)
    if best is not None:
        link(run_dir / FOLDER / BEST, best.name)
    for old in found[place + train.keep_checkpoints :] if train.keep_checkpoints else []:
        if old != best:
            remove_checkpoint(old)
    _remove_dangling(run_dir / FOLDER / BEST)


def best_checkpoint(run_dir: Path, metric: str) -> Path | None:
    """The checkpoint with the highest value, the earliest of equals; None where no checkpoint was evaluated."""
    found = evaluated(run_dir, metric)
    known = [path for path in reversed(checkpoints(run_dir)) if iteration_of(path) in found]
    return max(known, key=lambda path: found[iteration_of(path)], default=None)


def is_better(run_dir: Path, metric: str, iteration: int) -> bool:
    """Whether the evaluation after this iteration gave more than that of any checkpoint."""
    found, best = evaluated(run_dir, metric), best_checkpoint(run_dir, metric)
    if iteration not in found:
        return False
    return best is None or found[iteration] > found[iteration_of(best)]


def evaluated(run_dir: Path, metric: str) -> dict[int, float]:
    """The value of a metric after each iteration that was evaluated."""
    from torchgrpo.monitoring.metrics_file import MetricsFile  # which imports torch

    rows = MetricsFile(run_dir / "metrics.jsonl").rows()
    values = {row["iteration"]: row[metric] for row in rows if metric in row and "iteration" in row}
    return {iteration: value for iteration, value in values.items() if value == value}


def model_written(checkpoint: Path) -> None:
    """The model of a run's newest checkpoint is there: name it and the best; those of removed checkpoints go."""
    run_dir = checkpoint.parent.parent
    link(run_dir / MODEL, f"{MODELS}/{checkpoint.name}")
    best = (run_dir / FOLDER / BEST).resolve()
    if model_of(best).is_dir():
        link(run_dir / MODELS / BEST, best.name)
    remove_models(run_dir)
    _remove_dangling(run_dir / MODELS / BEST)


def told_of_model(config: Config, run_dir: Path) -> list[str]:
    """Where a run's newest model is and what evaluates it; nothing where there is none."""
    model = run_dir / MODEL
    if not model.is_dir():
        return []
    said = f"model: {model} ({model.resolve().name})"
    sets = "" if config.eval.sets else f"eval.sets={{test:{{dataset:{config.env.dataset}}}}}"
    try:
        EvalSetConfig(config.env.dataset).env("eval.sets.test", config.env)
    except ConfigError:  # the file that it was trained on has no other rows
        return [said]
    return [f"{said}\nto evaluate it:\n  {evaluate_command(model, sets)}"]


def _remove_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        path.unlink()
