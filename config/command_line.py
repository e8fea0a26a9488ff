"""The command line: Hydra composes, one job runs, and however it ends there is one message and an exit code.

2    bad input, or no room to write: nothing was begun, or what is there is whole
1    the run cannot go on (RunError), or a fault of ours, with its traceback
130  an interrupt left no result
"""

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from config.composition import CONFIG_DIR, register_schema, to_config
from config.errors import ConfigError, RunError, causes
from config.files import disk_full
from config.folders import SUMMARY, register_unused_folder, remove_if_unused, save_settings
from config.messages import is_readable, quoted, readable
from config.outcome import INTERRUPTED, RunOutcome
from config.schema import Config

log = logging.getLogger("grpo")
"""Goes to `grpo.log` in the run's folder alone (config/base.yaml)."""

BAD_INPUT, CANNOT_GO_ON = 2, 1
DISK_FULL = (
    "no space is left to write {run_dir}, or a temporary file. What is there is whole. Make room and go on from the "
    "newest checkpoint with train.resume=auto, or write elsewhere with hydra.run.dir"
)
UNWRITABLE = (
    "the run's folder cannot be written: {why}; make it writable, or choose another: hydra.run.dir=FOLDER"
)
ENDED = "interrupted: ended at once; what came after the newest checkpoint is lost"
_OF_THE_START = re.compile(
    r"\+*(hydra\.(run|sweep|mode|sweeper|launcher)\b|hydra/(sweeper|launcher)=|train\.resume=)"
)


Job = Callable[[Config, Path, Callable[[], None]], RunOutcome]
"""Given the config, the run's folder, and what it calls once it is sure to begin."""


def command_line(job: Job) -> None:
    """Run `job` with the composed and checked config in the run's folder, once for each run of a sweep."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions reach us; we print the one readable message
    # Sums in the same order each time (train.deterministic); cuBLAS reads it when torch first uses a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    register_schema()
    register_unused_folder()
    sys.argv[1:] = [_with_list(word) for word in sys.argv[1:]]
    logging.raiseExceptions = False  # a log on a full disk does not stand in the way of the message
    began = False

    @hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name="grpo_gsm8k")
    def main(composed: DictConfig) -> float | None:
        nonlocal began
        began = True
        chosen = HydraConfig.get()
        run_dir = Path(chosen.runtime.output_dir)
        outcome = _outcome(job, composed, run_dir)
        if outcome == "interrupted" and chosen.mode == RunMode.MULTIRUN:
            print("the sweep ends here; its other runs have not begun", file=sys.stderr)
            sys.exit(INTERRUPTED)
        return last_reward(run_dir)

    try:
        main()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_complain(readable(error)))
    except KeyboardInterrupt:
        sys.exit(_complain(ENDED, INTERRUPTED))
    except (OSError, ValueError) as error:
        why = None if began else _from_the_system(error)
        if why is None and not is_readable(error):
            raise
        sys.exit(_complain(UNWRITABLE.format(why=why) if why else readable(error)))


def _with_list(word: str) -> str:
    """`run_dir=A,B` as Hydra writes a list; to it commas are a sweep."""
    match = re.fullmatch(r"run_dir=([^\[\]{}'\"]+,[^\[\]{}'\"]+)", word)
    if match is None:
        return word
    return "run_dir=[" + ",".join(f'"{name}"' for name in match[1].split(",")) + "]"


def _outcome(job: Job, composed: DictConfig, run_dir: Path) -> RunOutcome:
    """How the job ended; the process ends here where it ended with a message."""
    try:
        return job(to_config(composed), run_dir, partial(save_settings, run_dir, composed, HydraConfig.get()))
    except (ConfigError, OmegaConfBaseException) as error:
        code = _ended_with(readable(error))
        remove_if_unused(run_dir)
        sys.exit(code)
    except RunError as error:
        sys.exit(_ended_with(str(error), CANNOT_GO_ON))
    except KeyboardInterrupt:
        remove_if_unused(run_dir)
        raise
    except Exception as error:
        if disk_full(error):
            sys.exit(_ended_with(DISK_FULL.format(run_dir=run_dir)))
        log.exception("a fault")
        raise


def _ended_with(message: str, code: int = BAD_INPUT) -> int:
    """The job's message, in its log too."""
    log.error(message)
    return _complain(message, code)


def _complain(message: str, code: int = BAD_INPUT) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _from_the_system(error: BaseException | None) -> str | None:
    """What kept Hydra from writing the run's folder before the job began."""
    found = next((link for link in causes(error) if isinstance(link, OSError)), None)
    if found is None:
        return None
    return f"{found.filename}: {found.strerror}" if found.filename else found.strerror


def last_reward(run_dir: Path) -> float | None:
    """What a sweeper such as Optuna's maximises; None where nothing was trained."""
    summary = run_dir / SUMMARY
    if not summary.is_file():
        return None
    reward: float | None = json.loads(summary.read_text()).get("last_reward")
    return reward


def typed() -> list[str]:
    """The settings of the command line as they were typed; none where other code runs a job."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def resume_command(run_dir: Path) -> str:
    """The command that goes on with the run in this folder, as it is typed in a shell.

    Run by other code than the command line, the settings alone that it takes.
    """
    plain = re.fullmatch(r"[\w./:@-]+", str(run_dir))
    folder = f"hydra.run.dir={run_dir}" if plain else quoted("hydra.run.dir", str(run_dir))
    ours = [folder, "train.resume=auto"]
    if not HydraConfig.initialized():
        return " ".join(ours)
    chosen = HydraConfig.get()
    interpreter = ["python"] if sys.argv[0].endswith(".py") else []  # the installed command needs none
    words = [*interpreter, sys.argv[0], "--config-name", str(chosen.job.config_name)]
    for source in chosen.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != CONFIG_DIR:
            words += ["--config-path", source.path]
    given = [*chosen.overrides.hydra, *chosen.overrides.task]
    words += [text for text in given if not _OF_THE_START.match(text)]
    return " ".join([*(shlex.quote(word) for word in words), *ours])
