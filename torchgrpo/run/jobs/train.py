"""Job `run=train`: builds, trains and closes a run, and restarts it after a lost rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from config.cli.command_line import resume_command
from config.run_folder.checkpoints import newest_checkpoint
from config.run_folder.folders import lock_folder
from config.schema.errors import RankLost, RunOutcome
from torchgrpo.run.checkpoint_model import resolve_checkpoint_models
from torchgrpo.run.job import Job

HAD_FINISHED = "interrupted after the run had finished: nothing is lost"


def run(job: Job[Any]) -> RunOutcome:
    """Trains; after a lost rank up to `train.restarts` times again, from the newest checkpoint."""
    restarts = job.config.train.restarts
    failure: str | None = None
    with lock_folder(job.run_dir):
        config, notices = resolve_checkpoint_models(job.config)
        for left in range(restarts, -1, -1):
            try:
                return _train_once(replace(job, config=config), notices, failure)
            except RankLost as error:
                newest = newest_checkpoint(job.run_dir)
                if not left:
                    raise RankLost(f"{error}\n{_resume_advice(job.run_dir, newest, restarts)}") from error
                failure = str(error)  # the exception itself would keep the run's frames and its model alive
                again = "from the beginning" if newest is None else f"from {newest}"
                notices = [failure, f"restarting {again}; {left - 1} of {restarts} restarts are left (train.restarts)"]
                resume = None if newest is None else str(job.run_dir)
                config = replace(config, train=replace(config.train, resume=resume))
    raise AssertionError("the last attempt returns or raises")


def _resume_advice(run_dir: Path, newest: Path | None, restarts: int) -> str:
    """Returns advice for the error message after a lost rank without a restart."""
    hint = f"set train.restarts={restarts + 1} to restart automatically"
    if newest is None:
        return f"There is no checkpoint yet (train.checkpoint_frequency); {hint}"
    return f"The newest checkpoint is {newest}; {hint}. To resume:\n  {resume_command(run_dir)}"


def _train_once(job: Job[Any], notices: list[str], failure: str | None) -> RunOutcome:
    """Builds the run, trains and closes the run.

    notices: lines for the log. failure: the error that ended the attempt before this one.
    """
    from torchgrpo.run.build_run import build_run

    run = build_run(job.config, job.run_dir, job.schedule)
    outcome: RunOutcome = "failed"
    try:
        job.on_start()
        for line in notices:
            run.monitor.log(line)
        if failure is not None:
            run.monitor.log_event("restart", text=failure)
        job.train(run)
        if not run.stop.is_requested:
            for callback in run.callbacks:
                callback.on_finish(run)
        outcome = "interrupted" if run.stop.is_requested else "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        run.close(outcome)
    if outcome == "finished" and run.stop.is_requested:
        raise KeyboardInterrupt(HAD_FINISHED)
    return outcome
