"""From a typed config to a run that can begin: data, engines, learner, rewards, evaluation and monitor.

    config ─▶ plan ─▶ task, prompts, sets ─▶ engines ─▶ learner ─▶ Run ─▶ Lockstep | Overlapped

Where one of them fails, those that are there already are closed.
"""

import gc
import random
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from config.command_line import resume_command
from config.schema import Config
from run.resume import changed_settings, find
from run.run import Run
from run.schedule import Schedule, ScheduleType

if TYPE_CHECKING:
    from plan.plan import Plan


def plan_run(config: Config, schedule: type[Schedule], run_dir: Path) -> "Plan":
    """Who lives where; raises ConfigError for a plan that cannot work, before anything is loaded."""
    from plan.machine import this_machine
    from plan.plan import make_plan
    from plan.problems import check

    return check(make_plan(config, schedule.overlapped, this_machine(run_dir), run_dir))


def build(config: Config, run_dir: Path, schedule: type[ScheduleType]) -> ScheduleType:
    """What a script's loop works with, made for `config`, to be closed with `.run.close`."""
    with ExitStack() as built:
        run = _build(config, run_dir, schedule, built)
        working = schedule(run)
        built.pop_all()
    run.stop.install(resume_command(run_dir))
    return working


def _build(config: Config, run_dir: Path, schedule: type[Schedule], built: ExitStack) -> Run:
    """Cheap checks first: data and tokenizer before engines, engines before weights."""
    from monitoring.progress import Progress

    live = Progress(config.logging, config.total_optimizer_steps)
    built.callback(live.close)
    live.begin("starting")

    _keep_imports()
    saved, told = find(config, run_dir, schedule)
    if saved is not None:
        told += changed_settings(saved, config, schedule)
    plan = plan_run(config, schedule, run_dir)
    seed_everything(config, plan)
    live.begin("reading data")
    ...


def _keep_imports() -> None:
    """What imports left behind stays: without this, looking for garbage in it costs 5% of a small run. Called before
    anything of the run is made, and after an earlier run's garbage is gone."""
    gc.collect()
    gc.freeze()


def seed_everything(config: Config, plan: "Plan") -> None:
    """Seeds and determinism of this process, as `train.seed` and `train.deterministic` say."""
    import numpy as np
    import torch

    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    # Filling new memory, which nobody reads before it is written, costs 5% of a small run.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if plan.learner.num_threads is not None:
        torch.set_num_threads(plan.learner.num_threads)
