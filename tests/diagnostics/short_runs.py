"""Short training runs for tests of the diagnostics, in this process."""

from pathlib import Path
from types import ModuleType

from omegaconf import OmegaConf

import grpo
from config.cli.composition import to_config
from config.run_folder.folders import SETTINGS, SETTINGS_FILES
from config.schema.errors import RunError
from tests.config_composition import compose_config
from tests.script_runner import QUICK, SCHEDULE_CLASSES
from torchgrpo.run.job import run_job


def run_quickstart(run_dir: Path, *overrides: str, script: ModuleType = grpo) -> str | None:
    """Trains the quickstart model and returns the error message, or None.

    The run folder has the settings that `diagnose` reads.
    """
    settings = compose_config("grpo_quickstart", *QUICK, "train.checkpoint_frequency=0", *overrides)
    run_dir.mkdir(parents=True, exist_ok=True)

    def write_settings() -> None:
        (run_dir / SETTINGS).mkdir(exist_ok=True)
        (run_dir / SETTINGS / SETTINGS_FILES[0]).write_text(OmegaConf.to_yaml(settings))

    try:
        run_job(to_config(settings), run_dir, script.train, SCHEDULE_CLASSES[script], write_settings)
    except RunError as error:
        return str(error)
    return None
