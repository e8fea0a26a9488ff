"""Runs a command-line job with exit codes, and builds commands that resume or evaluate runs.

Hydra composes the config. Every failure prints one message. Exit codes:

2    bad input, or no space to write: nothing has started, or the files that exist are complete
1    the run cannot continue (RunError), a bug (with its traceback), or a failed job of a sweep
130  an interrupt that left no result
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

from config.cli.broken_packages import broken_package_message
from config.cli.composition import CONFIG_DIR, register_schema, to_config
from config.cli.error_messages import is_user_error, quoted_override, user_message
from config.cli.sweep_jobs import JobFailed, objective, run_sweep_job
from config.run_folder.atomic_files import is_disk_full, write_failure_reason
from config.run_folder.folders import SETTINGS, remove_unused_folder, save_settings
from config.schema.config import Config
from config.schema.errors import EXIT_INTERRUPTED, ConfigError, RunError, RunOutcome, causes

log = logging.getLogger("grpo")
"""Logger that writes only to `grpo.log` in the run's folder (config/base.yaml)."""

EXIT_BAD_INPUT, EXIT_RUN_FAILED = 2, 1
DISK_FULL = (
    "{run_dir}: no space is left to write the run's folder or a temporary file; the existing files are "
    "complete. Free some space and continue from the newest checkpoint with train.resume=auto, or set "
    "hydra.run.dir to another folder"
)
RUN_FOLDER_UNWRITABLE = (
    "{run_dir}: the run's folder cannot be written any more ({reason}); the existing files are "
    "complete. Repair the folder and continue from the newest checkpoint with train.resume=auto, or "
    "continue in another folder with hydra.run.dir=FOLDER train.resume={run_dir}"
)
NEW_FOLDER_UNWRITABLE = (
    "hydra.run.dir: the run's folder cannot be written ({reason}); make the folder writable, or set "
    "hydra.run.dir=FOLDER to another folder"
)
ALL_TRIALS_FAILED = "every trial of the study failed; read the error of each trial above"
INTERRUPT_MESSAGE = "interrupted: the command ended immediately"
INTERRUPT_LOSS_MESSAGE = f"{INTERRUPT_MESSAGE}; progress after the newest checkpoint is lost"
_START_OVERRIDES = re.compile(
    r"\+*(hydra\.(run|sweep|mode|sweeper|launcher)\b|hydra/(sweeper|launcher)=|train\.resume=)"
)

Job = Callable[[Config, Path, Callable[[], None]], RunOutcome]
"""Function of the config, the run's folder, and a callback that the job calls as soon as it starts for certain."""


def command_line(job: Job) -> None:
    """Runs `job` with the checked config, once per run of a sweep."""
    escape_unencodable_characters()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions reach this function, which prints one message
    # A fixed order of summation (train.deterministic); cuBLAS reads the variable when torch first uses a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # No layer is replaced by a kernel from the hub where the package `kernels` is installed; transformers reads the
    # variable at its import.
    os.environ.setdefault("USE_HUB_KERNELS", "0")
    register_schema()
    sys.argv[1:] = map(_quote_run_dir_list, sys.argv[1:])
    logging.raiseExceptions = False  # an error of the log on a full disk must not hide the message
    main_entered = False
    script = sys.argv[0]

    @hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name="grpo_gsm8k")
    def main(composed_config: DictConfig) -> float | None:
        nonlocal main_entered
        main_entered = True
        sys.argv[0] = script  # also in the process of a Hydra launcher; `resume_command` reads it
        hydra_config = HydraConfig.get()
        run_dir = Path(hydra_config.runtime.output_dir)
        if hydra_config.mode == RunMode.MULTIRUN:
            return run_sweep_job(partial(_run_job, job, composed_config, run_dir), composed_config)
        outcome = _run_job(job, composed_config, run_dir)
        return objective(run_dir, composed_config.train.keep_best) if outcome == "finished" else None

    try:
        main()
        sys.stdout.flush()
    except JobFailed as failed:
        sys.exit(_print_error(f"{failed} (the first failed run of the sweep)", EXIT_RUN_FAILED))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        sys.exit(_print_error(f"{place}: invalid YAML ({error.problem or error.context}); correct the file"))
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_print_error(user_message(error)))
    except KeyboardInterrupt as interrupt:
        message = INTERRUPT_LOSS_MESSAGE if main_entered else INTERRUPT_MESSAGE
        sys.exit(_print_error(str(interrupt) or message, EXIT_INTERRUPTED))
    except (OSError, ValueError) as error:
        if _is_stdout_closed(error):
            sys.exit(EXIT_RUN_FAILED)
        if str(error) == "No trials are completed yet.":  # Optuna's error where no trial has an objective
            sys.exit(_print_error(ALL_TRIALS_FAILED, EXIT_RUN_FAILED))
        # Before `main`, an OSError means that Hydra could not write the run's folder.
        os_error = None if main_entered else next((link for link in causes(error) if isinstance(link, OSError)), None)
        if os_error is not None and (os_error.filename or os_error.strerror):
            reason = f"{os_error.filename}: {os_error.strerror}" if os_error.filename else os_error.strerror
            sys.exit(_print_error(NEW_FOLDER_UNWRITABLE.format(reason=reason)))
        if not is_user_error(error):
            raise
        sys.exit(_print_error(user_message(error)))


def escape_unencodable_characters() -> None:
    """Prints characters that an output's encoding lacks as escapes, also in child processes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"


def _quote_run_dir_list(word: str) -> str:
    """Rewrites `run_dir=A,B` as a Hydra list, since Hydra reads bare commas as a sweep."""
    match = re.fullmatch(r"run_dir=([^\[\]{}'\"]+,[^\[\]{}'\"]+)", word)
    if match is None:
        return word
    return "run_dir=[" + ",".join(f'"{name}"' for name in match[1].split(",")) + "]"


def _run_job(job: Job, composed_config: DictConfig, run_dir: Path) -> RunOutcome:
    """Runs the job and exits the process where the job fails with a known message."""
    on_start = partial(save_settings, run_dir, composed_config, HydraConfig.get())
    try:
        return job(to_config(composed_config), run_dir, on_start)
    except (ConfigError, OmegaConfBaseException) as error:
        raise SystemExit(_report_bad_input(user_message(error), run_dir)) from error
    except RunError as error:
        raise SystemExit(_report_error(str(error), EXIT_RUN_FAILED)) from error
    except KeyboardInterrupt as interrupt:
        remove_unused_folder(run_dir)
        if not (str(interrupt) or run_dir.exists()):  # the run has no results to lose
            raise KeyboardInterrupt(INTERRUPT_MESSAGE) from interrupt
        raise
    except Exception as error:
        if _is_stdout_closed(error):
            raise SystemExit(EXIT_RUN_FAILED) from error
        if is_disk_full(error):
            raise SystemExit(_report_error(DISK_FULL.format(run_dir=run_dir))) from error
        message = broken_package_message(error)
        if message is not None:
            raise SystemExit(_report_bad_input(message, run_dir)) from error
        reason = write_failure_reason(error, run_dir)
        if reason is not None:
            message = RUN_FOLDER_UNWRITABLE.format(run_dir=run_dir, reason=reason)
            raise SystemExit(_report_error(message)) from error
        log.exception("a fault")
        raise


def _report_bad_input(message: str, run_dir: Path) -> int:
    """Reports bad input and returns the exit code; removes the folder of an unstarted run."""
    if (run_dir / SETTINGS).exists():
        return _report_error(message)
    remove_unused_folder(run_dir)
    return _print_error(message)


def _report_error(message: str, code: int = EXIT_BAD_INPUT) -> int:
    """Writes the job's error to its log and to stderr; returns the exit code."""
    log.error(message)
    return _print_error(message, code)


def _print_error(message: str, code: int = EXIT_BAD_INPUT) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _is_stdout_closed(error: Exception) -> bool:
    """Whether the reader of stdout has exited, as `head` does.

    If so, redirects stdout to the null device, so that buffered output raises no further error.
    """
    if not isinstance(error, BrokenPipeError):
        return False
    output = select.poll()
    output.register(1, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):  # the error is of another pipe
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def typed_overrides() -> list[str]:
    """Returns the settings typed on the command line; none where other code runs a job."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def resume_command(run_dir: Path) -> str:
    """Returns the shell command that resumes the run in `run_dir`.

    Where the command line did not start the run, returns only the settings that resume it.
    """
    return " ".join([*_command_words(_START_OVERRIDES), _path_override("hydra.run.dir", run_dir), "train.resume=auto"])


def evaluate_command(model: Path, sets: str) -> str:
    """Returns the shell command that evaluates a model with this run's settings.

    sets: an override of `eval.sets`, or "".
    """
    excluded_pattern = re.compile(rf"{_START_OVERRIDES.pattern}|\+*(model\.name|run)=")
    overrides = ["run=eval", _path_override("model.name", model), *([shlex.quote(sets)] if sets else [])]
    return " ".join([*_command_words(excluded_pattern), *overrides])


def _path_override(key: str, path: Path) -> str:
    return f"{key}={path}" if re.fullmatch(r"[\w./:@-]+", str(path)) else quoted_override(key, str(path))


def _command_words(excluded_pattern: re.Pattern[str]) -> list[str]:
    """Returns the words of this run's command without the overrides that match `excluded_pattern`.

    The list is empty where the command line did not start the run.
    """
    if not HydraConfig.initialized():
        return []
    hydra_config = HydraConfig.get()
    interpreter = ["python"] if sys.argv[0].endswith(".py") else []  # the installed command needs none
    words = [*interpreter, sys.argv[0], "--config-name", str(hydra_config.job.config_name)]
    for source in hydra_config.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != CONFIG_DIR:
            words += ["--config-path", source.path]
    overrides = [*hydra_config.overrides.hydra, *hydra_config.overrides.task]
    words += [text for text in overrides if not excluded_pattern.match(text)]
    return [shlex.quote(word) for word in words]
