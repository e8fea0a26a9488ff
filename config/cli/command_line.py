"""The command line: Hydra composes, one job runs, and however it ends there is one message and an exit code.

2    bad input, or no room to write: nothing was begun, or what is there is whole
1    the run cannot go on (RunError), or a fault of ours, with its traceback; a job of a sweep failed
130  an interrupt left no result
"""

import logging
import os
import re
import select
import shlex
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from config.cli.broken_packages import broken_package
from config.cli.composition import CONFIG_DIR, register_schema, to_config
from config.cli.error_messages import is_readable, quoted, readable
from config.cli.sweep_jobs import JobFailed, objective, run_in_sweep
from config.run_folder.files import disk_full, unwritable
from config.run_folder.folders import SETTINGS, remove_if_unused, save_settings
from config.schema.config import Config
from config.schema.errors import INTERRUPTED, ConfigError, RunError, RunOutcome, causes

log = logging.getLogger("grpo")
"""Goes to `grpo.log` in the run's folder alone (config/base.yaml)."""

BAD_INPUT, CANNOT_GO_ON = 2, 1
DISK_FULL = (
    "no space is left to write {run_dir}, or a temporary file. What is there is whole. Make room and go on from the "
    "newest checkpoint with train.resume=auto, or write elsewhere with hydra.run.dir"
)
TAKES_NO_MORE = (
    "nothing more can be written in {run_dir} ({why}). What is there is whole. Mend it and go on from the newest "
    "checkpoint with train.resume=auto, or go on elsewhere with hydra.run.dir=FOLDER train.resume={run_dir}"
)
UNWRITABLE = (
    "the run's folder cannot be written: {why}; make it writable, or choose another: hydra.run.dir=FOLDER"
)
EVERY_TRIAL_FAILED = "every trial of the study failed; see above what each of them said"
AT_ONCE = "interrupted: ended at once"
ENDED = f"{AT_ONCE}; what came after the newest checkpoint is lost"
_OF_THE_START = re.compile(
    r"\+*(hydra\.(run|sweep|mode|sweeper|launcher)\b|hydra/(sweeper|launcher)=|train\.resume=)"
)

Job = Callable[[Config, Path, Callable[[], None]], RunOutcome]
"""Given the config, the run's folder, and what it calls once it is sure to begin."""


def command_line(job: Job) -> None:
    """Run `job` with the composed and checked config in the run's folder, once for each run of a sweep."""
    escape_what_a_terminal_lacks()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions reach us; we print the one readable message
    # Sums in the same order each time (train.deterministic); cuBLAS reads it when torch first uses a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    register_schema()
    sys.argv[1:] = map(_with_list, sys.argv[1:])
    logging.raiseExceptions = False  # a log on a full disk does not stand in the way of the message
    began = False
    script = sys.argv[0]

    @hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name="grpo_gsm8k")
    def main(composed: DictConfig) -> float | None:
        nonlocal began
        began = True
        sys.argv[0] = script  # in the process of a launcher's too, for resume_command
        chosen = HydraConfig.get()
        run_dir = Path(chosen.runtime.output_dir)
        if chosen.mode == RunMode.MULTIRUN:
            return run_in_sweep(partial(_outcome, job, composed, run_dir), composed)
        finished = _outcome(job, composed, run_dir) == "finished"
        return objective(run_dir, composed.train.keep_best) if finished else None

    try:
        main()
        sys.stdout.flush()
    except JobFailed as failed:
        sys.exit(_complain(f"{failed} (the first of the sweep that did)", CANNOT_GO_ON))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        sys.exit(_complain(f"{place}: this is no YAML ({error.problem or error.context})"))
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_complain(readable(error)))
    except KeyboardInterrupt as interrupt:
        sys.exit(_complain(str(interrupt) or (ENDED if began else AT_ONCE), INTERRUPTED))
    except (OSError, ValueError) as error:
        if _unread(error):
            sys.exit(CANNOT_GO_ON)
        if str(error) == "No trials are completed yet.":  # Optuna, asked for the best one
            sys.exit(_complain(EVERY_TRIAL_FAILED, CANNOT_GO_ON))
        found = None if began else next((link for link in causes(error) if isinstance(link, OSError)), None)
        if found is not None and (
            found.filename or found.strerror
        ):  # that kept Hydra from writing the run's folder
            why = f"{found.filename}: {found.strerror}" if found.filename else found.strerror
            sys.exit(_complain(UNWRITABLE.format(why=why)))
        if not is_readable(error):
            raise
        sys.exit(_complain(readable(error)))


def escape_what_a_terminal_lacks() -> None:
    """Write characters that an output's encoding lacks as escapes, here and in child processes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"


def _with_list(word: str) -> str:
    """`run_dir=A,B` as Hydra writes a list; to it commas are a sweep."""
    match = re.fullmatch(r"run_dir=([^\[\]{}'\"]+,[^\[\]{}'\"]+)", word)
    if match is None:
        return word
    return "run_dir=[" + ",".join(f'"{name}"' for name in match[1].split(",")) + "]"


def _outcome(job: Job, composed: DictConfig, run_dir: Path) -> RunOutcome:
    """Run the job; end the process here where it ends with a message."""
    try:
        return job(to_config(composed), run_dir, partial(save_settings, run_dir, composed, HydraConfig.get()))
    except (ConfigError, OmegaConfBaseException) as error:
        raise SystemExit(_refused(readable(error), run_dir)) from error
    except RunError as error:
        raise SystemExit(_ended_with(str(error), CANNOT_GO_ON)) from error
    except KeyboardInterrupt as interrupt:
        remove_if_unused(run_dir)
        if not (str(interrupt) or run_dir.exists()):  # nothing that could be lost had begun
            raise KeyboardInterrupt(AT_ONCE) from interrupt
        raise
    except Exception as error:
        if _unread(error):
            raise SystemExit(CANNOT_GO_ON) from error
        if disk_full(error):
            raise SystemExit(_ended_with(DISK_FULL.format(run_dir=run_dir))) from error
        broken = broken_package(error)
        if broken is not None:
            raise SystemExit(_refused(broken, run_dir)) from error
        why = unwritable(error, run_dir)
        if why is not None:
            raise SystemExit(_ended_with(TAKES_NO_MORE.format(run_dir=run_dir, why=why))) from error
        log.exception("a fault")
        raise


def _refused(message: str, run_dir: Path) -> int:
    """End as `_ended_with` where a run has begun in the folder, else remove it."""
    if (run_dir / SETTINGS).exists():
        return _ended_with(message)
    remove_if_unused(run_dir)
    return _complain(message)


def _ended_with(message: str, code: int = BAD_INPUT) -> int:
    """The job's message, in its log too."""
    log.error(message)
    return _complain(message, code)


def _complain(message: str, code: int = BAD_INPUT) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _unread(error: Exception) -> bool:
    """Whether what read our output has ended, as `head` does. Nothing is left to say; what is held goes nowhere."""
    if not isinstance(error, BrokenPipeError):
        return False
    output = select.poll()
    output.register(1, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):  # another pipe's, then
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def typed() -> list[str]:
    """The settings of the command line as they were typed; none where other code runs a job."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def resume_command(run_dir: Path) -> str:
    """The command that goes on with the run in this folder, as it is typed in a shell.

    Run by other code than the command line, the settings alone that it takes.
    """
    return " ".join([*_command(_OF_THE_START), _setting("hydra.run.dir", run_dir), "train.resume=auto"])


def evaluate_command(model: Path, sets: str) -> str:
    """The command that evaluates a model as this run would. sets: a setting of `eval.sets`, or nothing."""
    left_out = re.compile(rf"{_OF_THE_START.pattern}|\+*(model\.name|run)=")
    given = ["run=eval", _setting("model.name", model), *([shlex.quote(sets)] if sets else [])]
    return " ".join([*_command(left_out), *given])


def _setting(key: str, path: Path) -> str:
    return f"{key}={path}" if re.fullmatch(r"[\w./:@-]+", str(path)) else quoted(key, str(path))


def _command(left_out: re.Pattern[str]) -> list[str]:
    """The words of this run's command less some of its overrides; none where other code runs it."""
    if not HydraConfig.initialized():
        return []
    chosen = HydraConfig.get()
    interpreter = ["python"] if sys.argv[0].endswith(".py") else []  # the installed command needs none
    words = [*interpreter, sys.argv[0], "--config-name", str(chosen.job.config_name)]
    for source in chosen.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != CONFIG_DIR:
            words += ["--config-path", source.path]
    given = [*chosen.overrides.hydra, *chosen.overrides.task]
    words += [text for text in given if not left_out.match(text)]
    return [shlex.quote(word) for word in words]
