"""Exports checkpoints as Hugging Face models, and resolves model names that name checkpoints.

a checkpoint of this run ──make_model_exporter──▶ RUN/models/NAME, in the thread that wrote the checkpoint
model.name, ref_model.name=RUN or CHECKPOINT ──resolve_checkpoint_models──▶ RUN/models/NAME, written where missing
run=eval train.resume=... ──model_to_evaluate──▶ the same, or a temporary folder
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.run_folder.atomic_files import atomic_folder
from config.run_folder.checkpoints import (
    CHECKPOINTS_FOLDER,
    MODEL_LINK,
    checkpoint_model_path,
    checkpoints,
    is_checkpoint,
    remove_checkpoint,
)
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.models import LoraConfig, ModelConfig
from torchgrpo.plan.model_shape import model_path
from torchgrpo.run.checkpoint_retention import link_newest_model
from torchgrpo.run.checkpoint_writer import RunState, skip_model_export
from torchgrpo.run.model_card import model_card
from torchgrpo.run.overlapped_run import ScheduleType
from torchgrpo.run.resume import find_checkpoint, load_named_checkpoint

if TYPE_CHECKING:  # torch costs seconds
    from torchgrpo.training.checkpoint import Checkpoint
    from torchgrpo.training.model_writer import ModelWriter


def make_model_exporter(config: Config, log: Callable[[str], None]) -> Callable[[Path, RunState], None]:
    """Returns the function that writes the model of a checkpoint, or `skip_model_export`.

    log: receives a message where models cannot be written beside the run.
    """
    if not config.train.export:
        return skip_model_export
    from torchgrpo.training.model_writer import ModelWriter

    writer = ModelWriter(config.model, config.train_model.lora)
    if not writer.can_stream:
        log(
            f"model.name={config.model.name}: the weights are not in safetensors files under the names of "
            "their layers, so no models of checkpoints are written beside the run; make a model later with "
            "run=export"
        )
        return skip_model_export

    def export_model(checkpoint: Path, state: RunState) -> None:
        target = checkpoint_model_path(checkpoint)
        with atomic_folder(target) as folder:
            _write_model_files(writer, checkpoint, state, folder)
            if target.exists():  # the model of an abandoned checkpoint with the same name
                remove_checkpoint(target)
        link_newest_model(checkpoint)

    return export_model


def _write_model_files(writer: "ModelWriter", checkpoint: Path, state: Mapping[str, Any], folder: Path) -> None:
    from torchgrpo.training.checkpoint import LEARNER

    writer.write(checkpoint / LEARNER, folder)
    write_model_card(checkpoint, state, folder)


def write_model_card(checkpoint: Path, state: Mapping[str, Any], folder: Path) -> None:
    """Writes README.md of a model's folder, with the run's metrics so far."""
    from torchgrpo.monitoring.metrics_file import MetricsFile

    rows = MetricsFile(checkpoint.parent.parent / "metrics.jsonl").read_rows()
    (folder / "README.md").write_text(model_card(state, rows), encoding="utf-8")


def is_checkpoint_name(name: str) -> bool:
    """Whether a model name is the path of a checkpoint or of a run.

    A model's folder beside a checkpoint does not count.
    """
    path = Path(name)
    if (Path(model_path(name)) / "config.json").is_file():
        return False
    return is_checkpoint(path) or (path / CHECKPOINTS_FOLDER).is_dir() or (path / MODEL_LINK).is_dir()


def base_model_config(checkpoint: "Checkpoint") -> ModelConfig:
    """Returns the config of the model that the run of a checkpoint started from."""
    return ModelConfig(**checkpoint.state["config"]["model"])


def resolve_checkpoint_models(config: Config) -> tuple[Config, list[str]]:
    """Replaces runs and checkpoints in `model.name` and `ref_model.name` by folders of their models.

    Returns the config and notices for the user. A missing model is written in Hugging Face format to RUN/models/NAME,
    where later runs find it. `run=plan` loads no weights, and takes the model that the checkpoint's run started from.
    """
    name, notices = _resolve_model_name(config.model.name, "model.name", config.run)
    config = _with_model_name(config, name)
    reference = config.ref_model.name
    if reference is None or not config.policy.uses_reference:
        return config, notices
    name, more = _resolve_model_name(reference, "ref_model.name", config.run)
    return replace(config, ref_model=replace(config.ref_model, name=name)), notices + more


def _resolve_model_name(name: str, key: str, job: str) -> tuple[str, list[str]]:
    """Returns the folder or hub name of a model, and notices for the user.

    key: the setting. job: as `Config.run`.
    """
    if not is_checkpoint_name(name):
        return name, []
    orphan_model = _model_without_checkpoint(Path(name))
    if orphan_model is not None:
        return str(orphan_model), []
    checkpoint, notices = load_named_checkpoint(Path(name), key)
    if job == "plan":
        return base_model_config(checkpoint).name, notices
    folder = checkpoint_model_path(checkpoint.path.resolve())
    if not folder.is_dir():
        with atomic_folder(folder) as unfinished:
            write_model(checkpoint, base_model_config(checkpoint), unfinished)
    return str(folder), [*notices, f"{key}: the weights of {checkpoint.path}, in {folder}"]


def _model_without_checkpoint(path: Path) -> Path | None:
    """Returns the model of a removed checkpoint, or of a run without checkpoints.

    None where there is no model, or where the run has checkpoints.
    """
    if is_checkpoint(path):
        return checkpoint_model_path(path) if not path.exists() and checkpoint_model_path(path).is_dir() else None
    newest = path / MODEL_LINK
    return newest.resolve() if newest.is_dir() and not checkpoints(path) else None


def _with_model_name(config: Config, name: Path | str) -> Config:
    return replace(config, model=replace(config.model, name=str(name)))


def write_model(checkpoint: "Checkpoint", model: ModelConfig, folder: Path) -> None:
    """Writes the checkpoint's policy in Hugging Face format, adapters merged into the weights.

    Raises:
        ConfigError: the checkpoint is of another model than `model`.
    """
    _write_model_files(_checked_model_writer(checkpoint, model), checkpoint.path, checkpoint.state, folder)


def _checked_model_writer(checkpoint: "Checkpoint", model: ModelConfig) -> "ModelWriter":
    """Returns a writer of the model, checked against the checkpoint.

    Raises:
        ConfigError: the checkpoint is of another model, or the model's folder does not exist.
    """
    from torchgrpo.training.model_writer import ModelWriter

    if Path(model.name).is_absolute() and not Path(model.name).exists():
        raise ConfigError(
            f"{checkpoint.path}: the run started from the model {model.name}, which does not exist; put that "
            f"model back, or export the checkpoint first: run=export export.checkpoint={checkpoint.path} "
            "export.to=FOLDER model.name=NEW_LOCATION"
        )

    writer = ModelWriter(model, LoraConfig(**checkpoint.state["config"]["train_model"]["lora"]))
    try:
        writer.check_checkpoint(checkpoint.learner_folder, checkpoint.state["learner"])
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path} with model.name={model.name}: {error}") from error
    return writer


@contextmanager
def model_to_evaluate(
    config: Config, run_dir: Path, schedule: type[ScheduleType]
) -> Iterator[tuple[Config, "Checkpoint | None"]]:
    """Yields the config that `run=eval` evaluates, and the checkpoint whose model replaced `model.name`, if any.

    The checkpoint is that of `train.resume`, or the one that `model.name` names.

    Raises:
        ConfigError: there is no such checkpoint, or it is of another model than `model.name`.
    """
    path = Path(config.model.name)
    by_name = is_checkpoint_name(config.model.name)
    orphan_model = _model_without_checkpoint(path) if by_name else None
    checkpoint, notices = find_checkpoint(config, run_dir, schedule)
    if orphan_model is not None or (checkpoint is None and not by_name):
        yield config if orphan_model is None else _with_model_name(config, orphan_model), None
        return
    if checkpoint is None:
        checkpoint, notices = load_named_checkpoint(path, "model.name")
        config = _with_model_name(config, base_model_config(checkpoint).name)
    for line in notices:
        print(line, file=sys.stderr)
    with _model_folder(checkpoint, replace(config.model, dtype=base_model_config(checkpoint).dtype), run_dir) as folder:
        print(f"evaluating {checkpoint.path.name} of {checkpoint.run_dir}", file=sys.stderr)
        yield _with_model_name(config, folder), checkpoint


@contextmanager
def _model_folder(checkpoint: "Checkpoint", model: ModelConfig, parent: Path) -> Iterator[Path]:
    """Yields the folder of a checkpoint's model; a missing one is written temporarily.

    parent: where the temporary folder is created.
    """
    exported = checkpoint_model_path(checkpoint.path.resolve())
    if exported.is_dir():
        if model.name != base_model_config(checkpoint).name:
            _checked_model_writer(checkpoint, model)
        yield exported
        return
    with tempfile.TemporaryDirectory(prefix=".model.", dir=parent) as folder:
        write_model(checkpoint, model, Path(folder))
        yield Path(folder)
