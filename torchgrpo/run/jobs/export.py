"""`run=export`: the model of a checkpoint in a folder of its own, and on the hub."""

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from config.cli.command_line import typed
from config.run_folder.checkpoints import model_of
from config.run_folder.files import folder_written_whole
from config.run_folder.folders import remove_if_unused
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.run.checkpoint_model import trained_model, write_card, write_model
from torchgrpo.run.job import Job
from torchgrpo.run.resume import given


def run(job: Job[Any]) -> RunOutcome:
    return export(job.config, job.run_dir)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def export(config: Config, run_dir: Path) -> RunOutcome:
    """Write the model of `checkpoint` to `to`, and upload it where `hub` is given. Leaves no folder of its own.

    Raises:
        ConfigError: there is no such checkpoint, no place to write to, or the hub takes nothing.
    """
    remove_if_unused(run_dir)
    if config.checkpoint is None:
        raise ConfigError(
            "run=export without checkpoint: name a checkpoint or the folder of a run, checkpoint=RUN"
        )
    path = Path(config.checkpoint)
    if not path.exists():
        raise ConfigError(
            f"checkpoint={path}: no such folder; give a checkpoint, RUN/checkpoints/best, or the folder of a run"
        )
    saved, told = given(path, "checkpoint")
    if config.to is None:
        raise ConfigError("run=export without to: name the folder that the model is written to, to=FOLDER")
    to = Path(config.to)
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise ConfigError(f"to={to}: there is something already; name a folder that is new or empty")
    if config.hub is not None:
        from huggingface_hub import get_token

        if _HUB_NAME.fullmatch(config.hub) is None:
            raise ConfigError(f"hub={config.hub}: no name of a model on the hub; give hub=USER/NAME")
        if get_token() is None:
            raise ConfigError(f"hub={config.hub}: no token for the hub; run `hf auth login`, or set HF_TOKEN")
    base, made = trained_model(saved), model_of(saved.path.resolve())
    if any(word.lstrip("+").startswith("model.name=") for word in typed()):  # it may lie elsewhere by now
        base = replace(base, name=config.model.name)
    try:
        with folder_written_whole(to) as folder:
            if made.is_dir():  # by its run; the card tells what is known now
                _copy(made, folder)
                write_card(saved.path, saved.state, folder)
            else:
                write_model(saved, base, folder)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise ConfigError(f"to={to}: the model could not be written there ({why})") from error
    for line in (*told, f"{saved.path}: its model is in {to}"):
        print(line)
    if config.hub is not None:
        _upload(to, config.hub)
        print(f"uploaded to {config.hub}")
    return "finished"


def _copy(model: Path, folder: Path) -> None:
    """What is in a folder; not its modes, which may forbid to write."""
    for path in sorted(model.rglob("*")):
        copy = folder / path.relative_to(model)
        if path.is_dir():
            copy.mkdir()
        else:
            shutil.copyfile(path, copy)


def _upload(folder: Path, name: str) -> None:
    from huggingface_hub import HfApi

    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # else a line for every request
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="A model trained with GRPO")
    except Exception as error:  # the hub client raises a dozen unrelated types for "cannot be reached"
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"hub={name}: the upload failed ({why}); the model is in {folder}, and `hf upload {name} {folder}` sends it"
        ) from error
