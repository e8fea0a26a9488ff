"""The job `run=train`: build, train, close; once more from the newest checkpoint where `train.restarts` allows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from config.cli.command_line import resume_command
from config.run_folder.checkpoints import newest_checkpoint
from config.run_folder.folders import held
from config.schema.config import Config
from config.schema.errors import RankLost, RunOutcome
from torchgrpo.run.checkpoint_model import with_model
from torchgrpo.run.overlapped import ScheduleType

HAD_FINISHED = "interrupted when the run had finished: nothing of it is lost"


def run_job(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None],
) -> RunOutcome:
    with held(run_dir):
        return _run_training(config, run_dir, train, schedule, on_start)


def _run_training(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None],
) -> RunOutcome:
    config, told = with_model(config)
    restarts = config.train.restarts
    lost: str | None = None
    for left in range(restarts, -1, -1):
        try:
            return _train_once(config, run_dir, train, schedule, on_start, told, lost)
        except RankLost as error:
            newest = newest_checkpoint(run_dir)
            if not left:
                raise RankLost(f"{error}\n{_way_on(run_dir, newest, restarts)}") from error
            lost = str(error)  # not the exception, which keeps the run's frames and so its model
            again = "from the beginning" if newest is None else f"from {newest}"
            told = [lost, f"restarting {again}; {left - 1} of {restarts} restarts are left (train.restarts)"]
            resume = None if newest is None else str(run_dir)
            config = replace(config, train=replace(config.train, resume=resume))
    raise AssertionError("the last attempt returns or raises")


def _way_on(run_dir: Path, newest: Path | None, restarts: int) -> str:
    """What to do after a rank was lost for good."""
    by_itself = f"train.restarts={restarts + 1} would have gone on by itself"
    if newest is None:
        return f"There is no checkpoint yet (train.checkpoint_frequency); {by_itself}"
    return f"The newest checkpoint is {newest}; {by_itself}. To go on:\n  {resume_command(run_dir)}"


def _train_once(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None],
    told: list[str],
    lost: str | None,
) -> RunOutcome:
    """lost: what ended the attempt before this one."""
    from torchgrpo.run.build import build

    run = build(config, run_dir, schedule)
    outcome: RunOutcome = "failed"
    try:
        on_start()
        for line in told:
            run.monitor.say(line)
        if lost is not None:
            run.monitor.event("restarted", text=lost)
        train(run)
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
