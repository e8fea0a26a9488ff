"""Real runs for the doctor: a few seconds each, in this process, with the settings that `diagnose` reads."""

from pathlib import Path
from types import ModuleType

from omegaconf import OmegaConf

import grpo
from config.cli.composition import to_config
from config.run_folder.folders import SETTINGS, SETTINGS_FILES
from config.schema.errors import RunError
from tests.composed import composed
from tests.scripts import QUICK, SCHEDULE_OF
from torchgrpo.run.job import run_job


def run(run_dir: Path, *overrides: str, script: ModuleType = grpo) -> str | None:
    """A run of the quickstart model; what it ended with, where that was an error."""
    settings = composed("grpo_quickstart", *QUICK, "train.checkpoint_frequency=0", *overrides)
    run_dir.mkdir(parents=True, exist_ok=True)

    def begun() -> None:
        (run_dir / SETTINGS).mkdir(exist_ok=True)
        (run_dir / SETTINGS / SETTINGS_FILES[0]).write_text(OmegaConf.to_yaml(settings))

    try:
        run_job(to_config(settings), run_dir, script.train, SCHEDULE_OF[script], begun)
    except RunError as error:
        return str(error)
    return None
