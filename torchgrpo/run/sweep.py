"""Prepares a Hydra sweep's launcher and sweeper, writes its report, and sets the exit code.

The jobs run in this process, one after the other (Hydra's basic launcher), or in processes that a launcher starts.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from config.cli.command_line import EXIT_BAD_INPUT, EXIT_RUN_FAILED
from config.run_folder.folders import REPORT

ROOT = Path(__file__).resolve().parents[2]


class SweepStart(Callback):
    """Hydra callback that prepares a sweep before its jobs begin; config/base.yaml registers it.

    folder: that of the sweep that this process has started; None where it has started none.
    """

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Prepares the environment, the launcher and the sweeper."""
        SweepStart.folder = Path(config.hydra.sweep.dir).absolute()
        # Processes that a launcher starts must find this code from any working directory.
        folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        choices = config.hydra.runtime.choices
        if choices["hydra/launcher"] != "basic":
            # Launchers end their processes on KeyboardInterrupt, so SIGTERM raises it, too.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        if choices["hydra/launcher"] == "ray":
            _prepare_ray(config.hydra.launcher.ray)
        if choices["hydra/sweeper"] == "optuna":
            _prepare_optuna(config.hydra)


def _prepare_optuna(hydra: DictConfig) -> None:
    """Checks settings of Optuna, and sets defaults.

    The defaults maximise the reward and go on after failed trials.
    """
    if hydra.sweeper.storage is not None and not version("sqlalchemy").startswith("1."):
        _exit_with_error(
            f"hydra.sweeper.storage={hydra.sweeper.storage}: this version of Optuna cannot store a study with "
            "SQLAlchemy 2; run pip install 'sqlalchemy<2', or unset hydra.sweeper.storage"
        )
    for key in ("n_trials", "n_jobs"):
        if hydra.sweeper[key] < 1:
            _exit_with_error(f"hydra.sweeper.{key}={hydra.sweeper[key]}: must be at least 1")
    if str(hydra.sweeper.direction).removeprefix("Direction.") not in ("maximize", "minimize"):
        _exit_with_error(
            f"hydra.sweeper.direction={hydra.sweeper.direction}: a run has one objective; set maximize or minimize"
        )
    overridden_keys = [word.partition("=")[0].lstrip("+") for word in hydra.overrides.hydra]
    for key, value in {"direction": "maximize", "max_failure_rate": 1.0}.items():
        if f"hydra.sweeper.{key}" not in overridden_keys:
            hydra.sweeper[key] = value


def _exit_with_error(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


def _prepare_ray(launcher: DictConfig) -> None:
    """Sets defaults of Hydra's Ray launcher.

    A Ray instance that the launcher starts listens on loopback. A job is never retried, because its folder is in use.
    """
    with open_dict(launcher):
        launcher.remote.setdefault("max_retries", 0)
        if launcher.init.get("address") is None and "RAY_ADDRESS" not in os.environ:
            from torchgrpo.cluster.runtime import prepare_local_ray

            prepare_local_ray()
            # Ray's own default of object store memory; the launcher's default is 75 MB.
            defaults = {"include_dashboard": False, "logging_level": "error", "object_store_memory": None}
            for key, value in defaults.items():
                launcher.init.setdefault(key, value)


@contextmanager
def write_sweep_report() -> Iterator[None]:
    """Writes the report of the sweep that ran in the block.

    Exits with 1 if one of the sweep's jobs failed.
    """
    failed = False
    try:
        yield
    except Exception as error:
        if SweepStart.folder is None:
            raise
        first = str(error).strip().partition("\n")[0]
        print(f"error: the launcher failed: {type(error).__name__}: {first}", file=sys.stderr)
        failed = True
    finally:
        folder = SweepStart.folder
        if folder is not None and folder.is_dir():
            from torchgrpo.reports.sweep_report import TABLE_FILE, read_sweep_runs, write_sweep

            runs = read_sweep_runs(folder)
            if runs:
                write_sweep(folder)
                print(f"runs side by side: {folder / REPORT}, {folder / TABLE_FILE}", flush=True)
            failed = failed or any(run.summary.get("outcome") == "failed" for run in runs)
    if failed:
        sys.exit(EXIT_RUN_FAILED)
