"""A sweep around its jobs: what its launchers need, how Ctrl-C ends it, what is printed and written at its end.

One process starts the jobs and waits; the jobs run in it, one after the other (Hydra's basic launcher), or in processes
of their own, which know of each other by files alone: each job's folder has its lock, and `.stopped` in the sweep's
folder keeps those that wait from beginning, also after this process has ended, until the sweep is started again.
"""

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from socket import gethostname
from threading import Thread
from types import FrameType
from typing import Any, ClassVar, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from config.command_line import BAD_INPUT, CANNOT_GO_ON
from config.folders import SUMMARY, Owner, holder
from config.run_outcome import INTERRUPTED
from config.sweep_jobs import BEGUN, ENDS_HERE, STOPPED
from run.stop import ECHO_S, Stop

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 80
"""Columns of the table that is printed."""
NOT_STORED = (
    "hydra.sweeper.storage={storage}: this version of Optuna stores no study by SQLAlchemy 2; "
    "pip install 'sqlalchemy<2', or leave the storage out"
)
DIRECTIONS = ("maximize", "minimize")
LOOK_S, SETTLE_S = 0.2, 10.0
"""Between two looks at which jobs run; without any before they are taken to have ended."""


class SweepStart(Callback):
    """Hydra calls it, as config/base.yaml says, before the jobs of a sweep begin.

    folder: of the sweep that this process has started; None where it has not.
    stop: where its jobs have processes of their own.
    """

    folder: ClassVar[Path | None] = None
    stop: ClassVar["SweepStop | None"] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SweepStart.folder = Path(config.hydra.sweep.dir).absolute()
        for left in (STOPPED, BEGUN):
            (SweepStart.folder / left).unlink(missing_ok=True)
        # Processes that a launcher starts find this code wherever they are.
        places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        chosen = config.hydra.runtime.choices
        if chosen["hydra/launcher"] != "basic":
            SweepStart.stop = SweepStop(folder=SweepStart.folder)
            SweepStart.stop.install("")
        if chosen["hydra/launcher"] == "ray":
            _prepare_ray(config.hydra.launcher.ray)
        if chosen["hydra/sweeper"] == "optuna":
            _prepare_optuna(config.hydra)


def _prepare_optuna(chosen: DictConfig) -> None:
    """The objective is a reward: it is maximised unless the command line says otherwise."""
    if chosen.sweeper.storage is not None and not version("sqlalchemy").startswith("1."):
        _refuse(NOT_STORED.format(storage=chosen.sweeper.storage))
    for key in ("n_trials", "n_jobs"):
        if chosen.sweeper[key] < 1:
            _refuse(f"hydra.sweeper.{key}={chosen.sweeper[key]}: must be at least 1")
    if str(chosen.sweeper.direction).removeprefix("Direction.") not in DIRECTIONS:
        _refuse(
            f"hydra.sweeper.direction={chosen.sweeper.direction}: a run has one objective; take maximize or minimize"
        )
    given = [word.partition("=")[0].lstrip("+") for word in chosen.overrides.hydra]
    if "hydra.sweeper.direction" not in given:
        chosen.sweeper.direction = "maximize"


def _refuse(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _prepare_ray(launcher: DictConfig) -> None:
    """A Ray that the launcher starts by itself listens on loopback, and starts no job a second time in its folder."""
    with open_dict(launcher):
        launcher.remote.setdefault("max_retries", 0)
        if launcher.init.get("address") is None and "RAY_ADDRESS" not in os.environ:
            from cluster.runtime import prepare_local

            prepare_local()
            # As much memory for objects as Ray takes by itself; the launcher would give 75 MB.
            quiet = {"include_dashboard": False, "logging_level": "error", "object_store_memory": None}
            for key, value in quiet.items():
                launcher.init.setdefault(key, value)


@dataclass
class SweepStop(Stop):
    """Ctrl-C and SIGTERM where the jobs have processes of their own: the first is passed on to those of this machine.

    folder: the sweep's. over: the jobs have ended. told: processes of jobs that it was passed on to.
    """

    folder: Path = Path()
    over: bool = False
    told: set[int] = field(default_factory=set)

    def heed(self, number: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / STOPPED).touch()
        self._tell_jobs()
        said = (
            f"\n{signal.Signals(number).name}: the jobs on this machine finish their iterations and write checkpoints; "
            "no other begins. Once more ends them at once.\n"
        )
        with suppress(OSError):
            os.write(2, said.encode())
        Thread(target=self._end_after_them, daemon=True).start()

    def _tell_jobs(self) -> None:
        """Each process once: a second signal would end it at once."""
        for owner in self.owners():
            if owner.pid not in self.told:
                self.told.add(owner.pid)
                with suppress(ProcessLookupError):
                    os.kill(owner.pid, signal.SIGTERM)  # Ray's workers have SIGINT blocked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            raise KeyboardInterrupt(ENDS_HERE)
        super()._ask(number, frame)

    def owners(self) -> list[Owner]:
        """Processes of this machine in which jobs of the sweep run."""
        found = map(holder, self.folder.iterdir())
        return [owner for owner in found if owner is not None and owner.host == gethostname()]

    def wait(self) -> None:
        """Until no job of this machine runs, and none has begun for `SETTLE_S`."""
        seen = time.monotonic()
        while time.monotonic() - seen < SETTLE_S:
            time.sleep(LOOK_S)
            if self.owners():
                seen = time.monotonic()

    def _end_after_them(self) -> None:
        """A launcher waits for jobs that shall not begin, and a sweeper would think of more of them."""
        while self.owners():
            time.sleep(LOOK_S)
            self._tell_jobs()  # of which one may have begun as the signal came
        time.sleep(ECHO_S)  # the processes have yet to say what came of their jobs
        self.over = True
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def summed_up() -> Iterator[None]:
    """What the command line does in the block; after a sweep, however it ended, its table and exit code."""
    code = 0
    try:
        yield
    except Exception as error:
        if SweepStart.stop is None:
            raise
        code = _of_the_launcher(error, SweepStart.stop)
    finally:
        if SweepStart.folder is not None and SweepStart.folder.is_dir():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has ended; this takes a moment
            code = finish(SweepStart.folder) or code
    if code:
        sys.exit(code)


def _of_the_launcher(error: Exception, stop: SweepStop) -> int:
    """Exit code after what a launcher raised: the jobs themselves raise nothing, but a process may be killed.

    Those that still run, as Ray's and submitit's do, are waited for.
    """
    if stop.requested:
        print(f"error: {ENDS_HERE}", file=sys.stderr)
        return INTERRUPTED
    first = str(error).strip().partition("\n")[0]
    print(f"error: the launcher gave up: {type(error).__name__}: {first}", file=sys.stderr)
    stop.wait()
    return CANNOT_GO_ON


def finish(folder: Path) -> int:
    """Print and write what came of the jobs of a sweep.

    Returns:
        130 where one was interrupted, else 1 where one failed or was refused, else 0.
    """
    from reports.sweep import swept_runs, write_sweep

    begun = _begun(folder)
    jobs = [
        begun[run.name] or SweptJob(run.name, run.overrides, _summary(folder / run.name))
        for run in swept_runs(folder)
        if run.name in begun
    ]
    if not jobs:
        return 0
    write_sweep(folder)
    print(table(folder, jobs), flush=True)
    outcomes = {job.outcome for job in jobs}
    if "interrupted" in outcomes:
        return INTERRUPTED
    return CANNOT_GO_ON if outcomes & {"failed", "refused"} else 0


def _begun(folder: Path) -> "dict[str, SweptJob | None]":
    """The jobs of this sweep by name, without those of earlier ones in its folder; of a refused one its line."""
    from reports.sweep import by_key

    path, found = folder / BEGUN, dict[str, SweptJob | None]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        told = json.loads(line)
        found[told["name"]] = None
        if "refused" in told:
            outcome = {"outcome": "refused", "error": told["refused"]}
            found[told["name"]] = SweptJob(told["name"], by_key(told["overrides"]), outcome)
    return found


@dataclass(frozen=True)
class SweptJob:
    """A job's line in the table. summary: what `summary.json` holds; empty where its process was killed."""

    name: str
    overrides: dict[str, str]
    summary: dict[str, Any]

    @property
    def outcome(self) -> str:
        return str(self.summary.get("outcome", "cut off"))

    @property
    def reward(self) -> str:
        first, last = (self.summary.get(name) for name in ("first_reward", "last_reward"))
        return "" if first is None else f"{first:.3f} -> {last:.3f}"

    @property
    def evaluation(self) -> str:
        """pass@1 of the first set."""
        found = self.summary.get("evaluation") or {}
        return next((f"{value:.3f}" for name, value in found.items() if name.endswith("/pass@1")), "")


def _summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / SUMMARY
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def table(folder: Path, jobs: list[SweptJob]) -> str:
    """The jobs of a sweep for a terminal: what differs between them, how each ended, and why it failed."""
    first = max(3, *(len(job.name) for job in jobs)) + 2
    between = WIDTH - first - len("interrupted  -0.000 -> -0.000   pass@1")
    row = f"{{:<{first}}}{{:<{between}}}{{:<13}}{{:<18}}{{:>7}}"
    lines = [row.format("job", "overrides", "outcome", "reward", "pass@1").rstrip()]
    common = set.intersection(*(set(job.overrides.items()) for job in jobs)) if len(jobs) > 1 else set()
    for job in jobs:
        differs = [f"{key}={value}" for key, value in job.overrides.items() if (key, value) not in common]
        wrapped = [part for word in differs for part in textwrap.wrap(word, between - 2)] or [""]
        lines.append(row.format(job.name, wrapped[0], job.outcome, job.reward, job.evaluation).rstrip())
        lines += [" " * first + part for part in wrapped[1:]]
    wrong: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        if job.outcome in ("failed", "refused"):
            why = str(job.summary.get("error", "")).partition("\n")[0]
            wrong.setdefault((job.outcome, why), []).append(job.name)
    for (outcome, why), names in wrong.items():
        lines += textwrap.wrap(f"{outcome} {', '.join(names)}: {why}", WIDTH, subsequent_indent="  ")
    finished = sum(job.outcome == "finished" for job in jobs)
    told = f"{len(jobs)} jobs, {finished} finished: {folder}"
    return "\n".join(["", told, *lines])
