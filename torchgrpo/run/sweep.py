"""A sweep around its jobs: what its launchers and sweepers need, and its page at the end.

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

from config.cli.command_line import BAD_INPUT, CANNOT_GO_ON
from config.run_folder.folders import REPORT

ROOT = Path(__file__).resolve().parents[2]


class SweepStart(Callback):
    """Hydra calls it, as config/base.yaml says, before the jobs of a sweep begin.

    folder: of the sweep that this process has started; None where it has not.
    """

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Prepare the environment, the launcher and the sweeper."""
        SweepStart.folder = Path(config.hydra.sweep.dir).absolute()
        # Processes that a launcher starts find this code wherever they are.
        places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        chosen = config.hydra.runtime.choices
        if chosen["hydra/launcher"] != "basic":
            # Launchers end their processes on Ctrl-C.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        if chosen["hydra/launcher"] == "ray":
            _prepare_ray(config.hydra.launcher.ray)
        if chosen["hydra/sweeper"] == "optuna":
            _prepare_optuna(config.hydra)


def _prepare_optuna(chosen: DictConfig) -> None:
    """Maximise the objective, a reward, and go on after failed trials, unless the command line says otherwise."""
    if chosen.sweeper.storage is not None and not version("sqlalchemy").startswith("1."):
        _refuse(
            f"hydra.sweeper.storage={chosen.sweeper.storage}: this version of Optuna stores no study by SQLAlchemy 2; "
            "pip install 'sqlalchemy<2', or leave the storage out"
        )
    for key in ("n_trials", "n_jobs"):
        if chosen.sweeper[key] < 1:
            _refuse(f"hydra.sweeper.{key}={chosen.sweeper[key]}: must be at least 1")
    if str(chosen.sweeper.direction).removeprefix("Direction.") not in ("maximize", "minimize"):
        _refuse(
            f"hydra.sweeper.direction={chosen.sweeper.direction}: a run has one objective; take maximize or minimize"
        )
    given = [word.partition("=")[0].lstrip("+") for word in chosen.overrides.hydra]
    for key, value in {"direction": "maximize", "max_failure_rate": 1.0}.items():
        if f"hydra.sweeper.{key}" not in given:
            chosen.sweeper[key] = value


def _refuse(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _prepare_ray(launcher: DictConfig) -> None:
    """A Ray that the launcher starts by itself listens on loopback, and starts no job a second time in its folder."""
    with open_dict(launcher):
        launcher.remote.setdefault("max_retries", 0)
        if launcher.init.get("address") is None and "RAY_ADDRESS" not in os.environ:
            from torchgrpo.cluster.runtime import prepare_local

            prepare_local()
            # As much memory for objects as Ray takes by itself; the launcher would give 75 MB.
            quiet = {"include_dashboard": False, "logging_level": "error", "object_store_memory": None}
            for key, value in quiet.items():
                launcher.init.setdefault(key, value)


@contextmanager
def reported() -> Iterator[None]:
    """Write the page of a sweep that ran in the block, and exit with 1 where one of its jobs failed."""
    failed = False
    try:
        yield
    except Exception as error:
        if SweepStart.folder is None:
            raise
        first = str(error).strip().partition("\n")[0]
        print(f"error: the launcher gave up: {type(error).__name__}: {first}", file=sys.stderr)
        failed = True
    finally:
        folder = SweepStart.folder
        if folder is not None and folder.is_dir():
            from torchgrpo.reports.sweep import TABLE, swept_runs, write_sweep

            runs = swept_runs(folder)
            if runs:
                write_sweep(folder)
                print(f"runs side by side: {folder / REPORT}, {folder / TABLE}", flush=True)
            failed = failed or any(run.summary.get("outcome") == "failed" for run in runs)
    if failed:
        sys.exit(CANNOT_GO_ON)
