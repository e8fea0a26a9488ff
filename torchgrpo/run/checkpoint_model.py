"""A checkpoint as a model: a run's own export, `model.name=RUN` and `run=eval`.

a checkpoint of this run ──model_maker──▶ RUN/models/NAME, in the thread that wrote it
model.name, ref_model.name=RUN or CHECKPOINT ──with_model──▶ RUN/models/NAME, made where it is missing
run=eval train.resume=... ──evaluated_model──▶ the same, or a folder that is removed afterwards
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.run_folder.checkpoints import (
    FOLDER,
    MODEL,
    checkpoints,
    is_checkpoint,
    model_of,
    remove_checkpoint,
)
from config.run_folder.files import folder_written_whole
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.models import LoraConfig, ModelConfig
from torchgrpo.plan.model_shape import model_path
from torchgrpo.run.checkpoint_retention import model_written
from torchgrpo.run.checkpoint_writer import State, no_model
from torchgrpo.run.model_card import model_card
from torchgrpo.run.overlapped import ScheduleType
from torchgrpo.run.resume import find, given

if TYPE_CHECKING:  # torch costs seconds
    from torchgrpo.training.checkpoint import Saved
    from torchgrpo.training.model_writer import ModelWriter


def model_maker(config: Config, say: Callable[[str], None]) -> Callable[[Path, State], None]:
    """The maker of the models of a run's checkpoints, or `no_model`. say: told why there will be none."""
    if not config.train.export:
        return no_model
    from torchgrpo.training.model_writer import ModelWriter

    writer = ModelWriter(config.model, config.train_model.lora)
    if not writer.streams:
        say(
            f"model.name={config.model.name} is not in safetensors files under its layers' names: models of "
            "checkpoints are not written beside the run; run=export makes one later"
        )
        return no_model

    def make(checkpoint: Path, state: State) -> None:
        target = model_of(checkpoint)
        with folder_written_whole(target) as folder:
            _fill(writer, checkpoint, state, folder)
            if target.exists():  # of a checkpoint that had this name, which the run has gone back behind
                remove_checkpoint(target)
        model_written(checkpoint)

    return make


def _fill(writer: "ModelWriter", checkpoint: Path, state: Mapping[str, Any], folder: Path) -> None:
    from torchgrpo.training.checkpoint import LEARNER

    writer.write(checkpoint / LEARNER, folder)
    write_card(checkpoint, state, folder)


def write_card(checkpoint: Path, state: Mapping[str, Any], folder: Path) -> None:
    """README.md of a model's folder, of what is known by now."""
    from torchgrpo.monitoring.metrics_file import MetricsFile

    rows = MetricsFile(checkpoint.parent.parent / "metrics.jsonl").rows()
    (folder / "README.md").write_text(model_card(state, rows), encoding="utf-8")


def names_checkpoint(name: str) -> bool:
    """Whether a name is that of a checkpoint or a run, not of a model that was made of one."""
    path = Path(name)
    if (Path(model_path(name)) / "config.json").is_file():
        return False
    return is_checkpoint(path) or (path / FOLDER).is_dir() or (path / MODEL).is_dir()


def trained_model(saved: "Saved") -> ModelConfig:
    """What the run of a checkpoint began from."""
    return ModelConfig(**saved.state["config"]["model"])


def with_model(config: Config) -> tuple[Config, list[str]]:
    """The config with folders in place of names of runs and checkpoints.

    The folders are in Hugging Face format; the names are `model.name` and `ref_model.name`.
    Where the run did not make one, it is made beside the checkpoint, RUN/models/NAME, once: a resumed run finds it
    again. A plan, which loads nothing, takes the model that the checkpoint's run began from.
    """
    name, told = _as_model(config.model.name, "model.name", config.run)
    config = _named(config, name)
    reference = config.ref_model.name
    if reference is None or not config.policy.uses_reference:
        return config, told
    name, more = _as_model(reference, "ref_model.name", config.run)
    return replace(config, ref_model=replace(config.ref_model, name=name)), told + more


def _as_model(name: str, key: str, job: str) -> tuple[str, list[str]]:
    """The folder or hub name that a setting's value stands for, and what to tell. job: as `Config.run`."""
    if not names_checkpoint(name):
        return name, []
    alone = _without_checkpoint(Path(name))
    if alone is not None:
        return str(alone), []
    saved, told = given(Path(name), key)
    if job == "plan":
        return trained_model(saved).name, told
    folder = model_of(saved.path.resolve())
    if not folder.is_dir():
        with folder_written_whole(folder) as unfinished:
            write_model(saved, trained_model(saved), unfinished)
    return str(folder), [*told, f"{key}: the weights of {saved.path}, in {folder}"]


def _without_checkpoint(path: Path) -> Path | None:
    """The model of a checkpoint or of a run whose checkpoints are gone; None where there are some, or no model."""
    if is_checkpoint(path):
        return model_of(path) if not path.exists() and model_of(path).is_dir() else None
    newest = path / MODEL
    return newest.resolve() if newest.is_dir() and not checkpoints(path) else None


def _named(config: Config, name: Path | str) -> Config:
    return replace(config, model=replace(config.model, name=str(name)))


def write_model(saved: "Saved", model: ModelConfig, folder: Path) -> None:
    """The checkpoint's policy in Hugging Face format, adapters merged in, as it goes to engines.

    Raises:
        ConfigError: the checkpoint is of another model than `model`.
    """
    _fill(_writer(saved, model), saved.path, saved.state, folder)


def _writer(saved: "Saved", model: ModelConfig) -> "ModelWriter":
    """Raises ConfigError: the checkpoint is of another model, or that is not there any more."""
    from torchgrpo.training.model_writer import ModelWriter

    if Path(model.name).is_absolute() and not Path(model.name).exists():
        raise ConfigError(
            f"{saved.path}: its run began from the model {model.name}, which is not there; put it back, or export the "
            f"checkpoint first: run=export checkpoint={saved.path} to=FOLDER model.name=WHERE_IT_IS_NOW"
        )

    writer = ModelWriter(model, LoraConfig(**saved.state["config"]["train_model"]["lora"]))
    try:
        writer.check(saved.learner, saved.state["learner"])
    except ConfigError as error:
        raise ConfigError(f"{saved.path} with model.name={model.name}: {error}") from error
    return writer


@contextmanager
def evaluated_model(
    config: Config, run_dir: Path, schedule: type[ScheduleType]
) -> Iterator[tuple[Config, "Saved | None"]]:
    """For `run=eval`: the config with a checkpoint as its model: of `train.resume`, or that `model.name` is.

    Raises:
        ConfigError: there is no such checkpoint, or it is of another model than `model.name`.
    """
    path = Path(config.model.name)
    by_name = names_checkpoint(config.model.name)
    alone = _without_checkpoint(path) if by_name else None
    saved, told = find(config, run_dir, schedule)
    if alone is not None or (saved is None and not by_name):
        yield config if alone is None else _named(config, alone), None
        return
    if saved is None:
        saved, told = given(path, "model.name")
        config = _named(config, trained_model(saved).name)
    for line in told:
        print(line, file=sys.stderr)
    with _as_folder(saved, replace(config.model, dtype=trained_model(saved).dtype), run_dir) as folder:
        print(f"evaluating {saved.path.name} of {saved.run_dir}", file=sys.stderr)
        yield _named(config, folder), saved


@contextmanager
def _as_folder(saved: "Saved", model: ModelConfig, place: Path) -> Iterator[Path]:
    """The model of a checkpoint, or one that is made of it in `place` and removed."""
    there = model_of(saved.path.resolve())
    if there.is_dir():
        if model.name != trained_model(saved).name:
            _writer(saved, model)
        yield there
        return
    with tempfile.TemporaryDirectory(prefix=".model.", dir=place) as folder:
        write_model(saved, model, Path(folder))
        yield Path(folder)
