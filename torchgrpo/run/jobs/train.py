"""The job `run=train`: build, train, close; once more from the newest checkpoint where `train.restarts` allows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from config.cli.command_line import resume_command
from config.run_folder.checkpoints import newest_checkpoint
from config.run_folder.folders import held
from config.schema.errors import RankLost, RunOutcome
from torchgrpo.run.checkpoint_model import with_model
from torchgrpo.run.job import Job

HAD_FINISHED = "interrupted when the run had finished: nothing of it is lost"


def run(job: Job[Any]) -> RunOutcome:
    restarts = job.config.train.restarts
    lost: str | None = None
    with held(job.run_dir):
        config, told = with_model(job.config)
        for left in range(restarts, -1, -1):
            try:
                return _train_once(replace(job, config=config), told, lost)
            except RankLost as error:
                newest = newest_checkpoint(job.run_dir)
                if not left:
                    raise RankLost(f"{error}\n{_way_on(job.run_dir, newest, restarts)}") from error
                lost = str(error)  # not the exception, which keeps the run's frames and so its model
                again = "from the beginning" if newest is None else f"from {newest}"
                told = [
                    lost,
                    f"restarting {again}; {left - 1} of {restarts} restarts are left (train.restarts)",
                ]
                resume = None if newest is None else str(job.run_dir)
                config = replace(config, train=replace(config.train, resume=resume))
    raise AssertionError("the last attempt returns or raises")


def _way_on(run_dir: Path, newest: Path | None, restarts: int) -> str:
    """What to do after a rank was lost for good."""
    by_itself = f"train.restarts={restarts + 1} would have gone on by itself"
    if newest is None:
        return f"There is no checkpoint yet (train.checkpoint_frequency); {by_itself}"
    return f"The newest checkpoint is {newest}; {by_itself}. To go on:\n  {resume_command(run_dir)}"


def _train_once(job: Job[Any], told: list[str], lost: str | None) -> RunOutcome:
    """told: for the log. lost: the end of the attempt before this one."""
    from torchgrpo.run.build import build

    run = build(job.config, job.run_dir, job.schedule)
    outcome: RunOutcome = "failed"
    try:
        job.on_start()
        for line in told:
            run.monitor.say(line)
        if lost is not None:
            run.monitor.event("restarted", text=lost)
        job.train(run)
        if not run.stop.requested:
            for callback in run.callbacks:
                callback.on_finish(run)
        outcome = "interrupted" if run.stop.requested else "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        run.close(outcome)
    if outcome == "finished" and run.stop.requested:
        raise KeyboardInterrupt(HAD_FINISHED)
    return outcome
