"""A checkpoint as a model: `model.name=RUN` or `model.name=CHECKPOINT`, and what `run=eval` evaluates.

model.name=RUN or CHECKPOINT ──with_model──▶ a folder in Hugging Face format, beside the checkpoint, once
run=eval train.resume=... ──evaluated_model──▶ such a folder, removed afterwards
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from config.checkpoints import FOLDER, is_checkpoint
from config.errors import ConfigError
from config.schema import Config, LoraConfig, ModelConfig
from plan.model_shape import model_path
from run.overlapped import Schedule
from run.resume import find, given

if TYPE_CHECKING:  # torch costs seconds
    from training.checkpoint import Saved

MODELS = "models"


def names_checkpoint(name: str) -> bool:
    """Whether `model.name` names a checkpoint or a run's folder, and not what was made of one."""
    path = Path(name)
    if (Path(model_path(name)) / "config.json").is_file():
        return False
    return path.suffix == ".pt" or is_checkpoint(path) or (path / FOLDER).is_dir()


def model_of(saved: "Saved") -> ModelConfig:
    return ModelConfig(**saved.state["config"]["model"])


def with_model(config: Config) -> tuple[Config, list[str]]:
    """The config, with a folder in Hugging Face format for a `model.name` that is a checkpoint or a run's folder.

    That folder is made beside the checkpoint, RUN/models/NAME, once: a resumed run finds it again. A plan, which
    loads nothing, takes the model that the checkpoint's run began from.
    """
    if not names_checkpoint(config.model.name):
        return config, []
    path = Path(config.model.name)
    folder = path.parent.parent / MODELS / path.name
    if is_checkpoint(path) and not path.exists() and folder.is_dir():
        return _named(config, folder), []
    saved, told = given(path, "model.name")
    if config.run == "plan":
        return _named(config, Path(model_of(saved).name)), told
    folder = saved.run_dir.resolve() / MODELS / saved.path.name
    if not folder.is_dir():
        with _made_beside(folder) as unfinished:
            write_model(saved, model_of(saved), unfinished)
    return _named(config, folder), [*told, f"model.name: the weights of {saved.path}, in {folder}"]


def _named(config: Config, name: Path | str) -> Config:
    return replace(config, model=replace(config.model, name=str(name)))


@contextmanager
def _made_beside(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `folder` at the end; another that did so first is as good."""
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as unfinished:
        yield Path(unfinished)
        os.chmod(unfinished, 0o755)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():
                raise


def write_model(saved: "Saved", model: ModelConfig, folder: Path) -> None:
    """The checkpoint's policy in Hugging Face format, adapters merged in, as it goes to engines.

    Raises:
        ConfigError: the checkpoint is of another model than `model`.
    """
    import torch

    from training.model import add_lora, causal_model, load_in_4bit, load_model, load_tokenizer
    from training.tensor_files import read_tensors, saved_shapes
    from training.trained_parameters import MODEL, base_digest, check_same_model, save_model, trained_tensors
    from training.weights import made, named_weights

    tokenizer = load_tokenizer(model.name)
    lora = LoraConfig(**saved.state["config"]["train_model"]["lora"])
    cpu = torch.device("cpu")
    loaded = load_in_4bit(model, cpu, torch.float32) if lora.quantized else load_model(model, cpu)
    policy = add_lora(loaded, lora) if lora.enabled else loaded
    try:
        check_same_model(policy, base_digest(policy), saved.state["learner"], saved_shapes(saved.learner))
        tensors = {f"{MODEL}{name}": tensor for name, tensor in trained_tensors(policy).items()}
        read_tensors(saved.learner, tensors)
    except ConfigError as error:
        raise ConfigError(f"{saved.path} with model.name={model.name}: {error}") from error
    save_model(causal_model(policy), made(named_weights(policy)), tokenizer, folder)


@contextmanager
def evaluated_model(
    config: Config, run_dir: Path, schedule: type[Schedule]
) -> Iterator[tuple[Config, "Saved | None"]]:
    """For `run=eval`: the config with the checkpoint of `train.resume` as its model, in a folder that is removed.

    Raises:
        ConfigError: there is no such checkpoint, or it is of another model than `model.name`.
    """
    saved, told = find(config, run_dir, schedule)
    if saved is None and names_checkpoint(config.model.name):
        saved, told = given(Path(config.model.name), "model.name")
        config = _named(config, model_of(saved).name)
    if saved is None:
        yield config, None
        return
    for line in told:
        print(line, file=sys.stderr)
    model = replace(config.model, dtype=model_of(saved).dtype)
    with tempfile.TemporaryDirectory(prefix=".model.", dir=run_dir) as folder:
        write_model(saved, model, Path(folder))
        print(f"evaluating {saved.path.name} of {saved.run_dir}", file=sys.stderr)
        yield _named(config, folder), saved
