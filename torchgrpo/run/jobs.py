"""The jobs of the command line, by the name that `run=` gives them."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from config.cli.command_line import resume_command, typed
from config.cli.saved_settings import chosen_run
from config.run_folder.checkpoints import newest_checkpoint
from config.run_folder.folders import held, remove_if_unused
from config.schema.config import Config
from config.schema.errors import INTERRUPTED, ConfigError, RankLost, RunOutcome
from config.schema.models import RefModelConfig
from torchgrpo.run.checkpoint_model import evaluated_model, with_model
from torchgrpo.run.export import export
from torchgrpo.run.overlapped import ScheduleType


def run_job(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    begun: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """What `config.run` names, in the folder `run_dir`.

    train: the loop of a script. schedule: what that loop works with.
    begun: called when a run or an evaluation is sure to begin; before, what an earlier one left is as it was.
    """
    if config.run == "plan":
        return print_plan(config, run_dir, schedule)
    if config.run == "rehearse":
        return rehearse_step(config, run_dir, schedule)
    if config.run == "rewards":
        return grade_samples(config, run_dir)
    if config.run in LOOKING:
        return look(config, run_dir)
    if config.run == "export":
        return export(config, run_dir)
    with held(run_dir):
        if config.run == "eval":
            return evaluate(config, run_dir, schedule, begun)
        return run_training(config, run_dir, train, schedule, begun)


HAD_FINISHED = "interrupted when the run had finished: nothing of it is lost"
LOOKING = ("report", "doctor", "rollouts", "replay")
"""Jobs that look at the folders of runs, and leave none."""


def look(config: Config, run_dir: Path) -> RunOutcome:
    """Print what one of the jobs `LOOKING` finds in runs that are over, or that go on."""
    remove_if_unused(run_dir)
    print(_seen(config), flush=True)
    return "finished"


def _seen(config: Config) -> str:
    if config.run == "report":
        from torchgrpo.run.report import report

        return report(config)
    folder = chosen_run(config.run_dir)
    if config.run == "doctor":
        from torchgrpo.run.doctor import examine

        return examine(folder)
    if config.run == "replay":
        from torchgrpo.run.replay import replay

        return replay(folder, config.step, typed())
    from torchgrpo.run.rollouts import rollouts

    return rollouts(folder, config.rollouts)


def run_training(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    begun: Callable[[], None],
) -> RunOutcome:
    """`run=train`: build, train, close, always; from the newest checkpoint once more where `train.restarts` allows."""
    config, told = with_model(config)
    restarts = config.train.restarts
    lost: str | None = None
    for left in range(restarts, -1, -1):
        try:
            return _train_once(config, run_dir, train, schedule, begun, told, lost)
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
    begun: Callable[[], None],
    told: list[str],
    lost: str | None,
) -> RunOutcome:
    """lost: what ended the attempt before this one."""
    from torchgrpo.run.build import build

    run = build(config, run_dir, schedule)
    outcome: RunOutcome = "failed"
    try:
        begun()
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


def evaluate(
    config: Config, run_dir: Path, schedule: type[ScheduleType], begun: Callable[[], None]
) -> RunOutcome:
    """`run=eval`: no learner, no scorers, no training data; of `model.name`, or the checkpoint of `train.resume`."""
    from torchgrpo.run.build import plan_run, prepare
    from torchgrpo.run.evaluation import evaluate_alone

    with evaluated_model(config, run_dir, schedule) as (evaluated, saved):
        nothing_scored = replace(evaluated, ref_model=RefModelConfig())
        plan = plan_run(nothing_scored, schedule, run_dir)
        prepare(evaluated, plan)
        outcome = evaluate_alone(evaluated, run_dir, plan, saved, begun)
    if outcome == "interrupted":
        sys.exit(INTERRUPTED)
    return outcome


def print_plan(config: Config, run_dir: Path, schedule: type[ScheduleType]) -> RunOutcome:
    """`run=plan`, for this machine or the one that `plan.*` describes: touches no device, leaves no folder. A plan that
    cannot work is printed whole all the same, and ends with 2."""
    from envs.option_checks import hub_notes, option_problems
    from torchgrpo.plan.machine import imagined_machine, this_machine
    from torchgrpo.plan.problems import Problem, planned
    from torchgrpo.plan.report import advice, report, with_typed_names

    typed, (config, _) = config, with_model(config)
    machine = imagined_machine(config.plan, this_machine(run_dir))
    plan, found = planned(config, schedule.overlapped, machine, run_dir)
    of_data = option_problems(config) or _data_problems(config)
    found += [Problem("", text) for text in _token_problems(config)]
    if not of_data:
        plan = replace(plan, notes=(*plan.notes, *hub_notes(config)))
    found += [Problem("", text) for text in of_data]
    print(report(with_typed_names(plan, typed), found), flush=True)
    remove_if_unused(run_dir)
    if found:
        print(advice(plan, found, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"


def _data_problems(config: Config) -> list[str]:
    """Problems of the prompts where a tokenizer can make them of local rows, else of the rows."""
    from envs.option_checks import reads_local_rows, row_problems
    from torchgrpo.plan.model_shape import find_file

    if not reads_local_rows(config) or find_file(config.model.name) is None:
        return [*row_problems(config)]
    from torchgrpo.run.generation import prompt_problem

    problem = prompt_problem(config)
    return [] if problem is None else [problem]


def _token_problems(config: Config) -> list[str]:
    """Tokens of `ref_model.name` that are not the policy's, where both tokenizers are on this machine."""
    if config.ref_model.name is None:
        return []
    from torchgrpo.training.model_loading import load_saved_tokenizer
    from torchgrpo.training.teacher_files import check_same_tokens, has_tokenizer, scored_by_another

    both = (config.model.name, config.reference_model.name)
    if not scored_by_another(config) or not all(map(has_tokenizer, both)):
        return []
    try:
        check_same_tokens(load_saved_tokenizer(config.model), config)
    except ConfigError as error:
        return [str(error)]
    return []


def rehearse_step(config: Config, run_dir: Path, schedule: type[ScheduleType]) -> RunOutcome:
    """`run=rehearse`, for this machine or the one that `plan.*` describes: the learner's own code, without a device and
    without memory. Ends with 2 where it would not fit."""
    from torchgrpo.plan.machine import imagined_machine, this_machine
    from torchgrpo.plan.make_plan import make_plan
    from torchgrpo.plan.problems import model_limits, scorer_limits
    from torchgrpo.plan.report import advice
    from torchgrpo.run.rehearsal.report import report, too_large
    from torchgrpo.run.rehearsal.step import rehearse

    config, _ = with_model(config)
    machine = imagined_machine(config.plan, this_machine(run_dir))
    plan = make_plan(config, schedule.overlapped, machine, run_dir)
    remove_if_unused(run_dir)
    rehearsal = rehearse(plan)
    assert plan.shape is not None  # else there was no model to rehearse with
    print(report(plan, plan.shape, rehearsal), flush=True)
    found = [*model_limits(plan, plan.shape), *too_large(plan, rehearsal.peaks), *scorer_limits(plan)]
    if found:
        print(advice(plan, found, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"


def grade_samples(config: Config, run_dir: Path) -> RunOutcome:
    """`run=rewards`: judges saved completions; of the model only its chat template is read."""
    from torchgrpo.run.rewards import run_rewards

    code = run_rewards(config.env, model=config.model)
    remove_if_unused(run_dir)
    if code:
        sys.exit(code)
    return "finished"
