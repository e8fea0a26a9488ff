"""Job `run=export`: writes a checkpoint's model to `export.to`, and uploads it to `export.hub`."""

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from config.cli.command_line import typed_overrides
from config.run_folder.atomic_files import atomic_folder
from config.run_folder.checkpoints import checkpoint_model_path
from config.run_folder.folders import remove_unused_folder
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.run.checkpoint_model import base_model_config, write_model, write_model_card
from torchgrpo.run.job import Job
from torchgrpo.run.resume import load_named_checkpoint


def run(job: Job[Any]) -> RunOutcome:
    return export(job.config, job.run_dir)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def export(config: Config, run_dir: Path) -> RunOutcome:
    """Writes the model of `export.checkpoint` to `export.to`, and uploads it where `export.hub` is set.

    The run's own folder is removed.

    Raises:
        ConfigError: `export.checkpoint` or `export.to` is unset; the checkpoint cannot be read; the folder is not empty
            or cannot be written; the hub name is invalid, there is no token, or the upload fails.
    """
    remove_unused_folder(run_dir)
    if config.export.checkpoint is None:
        raise ConfigError(
            "run=export without export.checkpoint: name a checkpoint or the folder of a run, export.checkpoint=RUN"
        )
    path = Path(config.export.checkpoint)
    if not path.exists():
        raise ConfigError(
            f"export.checkpoint={path}: no such folder; give a checkpoint, RUN/checkpoints/best, or the folder of a run"
        )
    checkpoint, notices = load_named_checkpoint(path, "export.checkpoint")
    if config.export.to is None:
        raise ConfigError("run=export without export.to: set the output folder, export.to=FOLDER")
    to = Path(config.export.to)
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise ConfigError(f"export.to={to}: the folder is not empty; name a new or empty folder")
    if config.export.hub is not None:
        from huggingface_hub import get_token

        if _HUB_NAME.fullmatch(config.export.hub) is None:
            raise ConfigError(f"export.hub={config.export.hub} is not a valid hub model name; set export.hub=USER/NAME")
        if get_token() is None:
            raise ConfigError(
                f"export.hub={config.export.hub}: no token for the hub; run `hf auth login`, or set HF_TOKEN"
            )
    base, exported = base_model_config(checkpoint), checkpoint_model_path(checkpoint.path.resolve())
    if any(word.lstrip("+").startswith("model.name=") for word in typed_overrides()):  # the model may have been moved
        base = replace(base, name=config.model.name)
    try:
        with atomic_folder(to) as folder:
            if exported.is_dir():  # written by the run; the card is renewed with later metrics
                _copy_files(exported, folder)
                write_model_card(checkpoint.path, checkpoint.state, folder)
            else:
                write_model(checkpoint, base, folder)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise ConfigError(f"export.to={to}: the model could not be written there ({reason})") from error
    for line in (*notices, f"{checkpoint.path}: its model is in {to}"):
        print(line)
    if config.export.hub is not None:
        _upload(to, config.export.hub)
        print(f"uploaded to {config.export.hub}")
    return "finished"


def _copy_files(model: Path, folder: Path) -> None:
    """Copies the content of a folder, without file modes, which may forbid writing."""
    for path in sorted(model.rglob("*")):
        copy = folder / path.relative_to(model)
        if path.is_dir():
            copy.mkdir()
        else:
            shutil.copyfile(path, copy)


def _upload(folder: Path, name: str) -> None:
    from huggingface_hub import HfApi

    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # without this a line for every request is logged
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="A model trained with GRPO")
    except Exception as error:  # the hub client raises a dozen unrelated types for "cannot be reached"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"export.hub={name}: the upload failed ({reason}); the model is in {folder}, upload it with `hf "
            f"upload {name} {folder}`"
        ) from error
