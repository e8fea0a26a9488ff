"""Plans a run's devices, prepares the process, and builds the run with all its components.

    config ─▶ plan ─▶ task, prompts, sets ─▶ engines ─▶ learner ─▶ LockstepRun | OverlappedRun

An error in one of these steps closes the components that were built before it.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from config.cli.command_line import resume_command
from config.schema.config import Config
from torchgrpo.run.overlapped_run import ScheduleType
from torchgrpo.run.resume import check_data, resolve_resume

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from envs.reward_workers.service import RewardService
    from envs.task import Task
    from torchgrpo.monitoring.monitor import Monitor
    from torchgrpo.monitoring.progress import Progress
    from torchgrpo.plan.plan import Plan
    from torchgrpo.training.checkpoint import Checkpoint


def plan_run(config: Config, schedule: type[ScheduleType], run_dir: Path) -> "Plan":
    """Plans the devices of learner and engines on this machine, before anything is loaded.

    Raises:
        ConfigError: the plan cannot work.
    """
    from torchgrpo.plan.machine import this_machine
    from torchgrpo.plan.make_plan import make_plan
    from torchgrpo.plan.problems import check_plan

    return check_plan(make_plan(config, schedule.is_overlapped, this_machine(run_dir), run_dir))


def build_run(config: Config, run_dir: Path, schedule: type[ScheduleType]) -> ScheduleType:
    """Builds the run that a script's loop drives; the caller closes the run with `close`."""
    gc.collect()  # frees the model of an earlier run in this process, which may fill a GPU
    with ExitStack() as exit_stack:
        run = _build(config, run_dir, schedule, exit_stack)
        exit_stack.pop_all()
    run.stop.install(resume_command(run_dir), run.monitor.progress.erase_sequence)
    return run


def _build(config: Config, run_dir: Path, schedule: type[ScheduleType], exit_stack: ExitStack) -> ScheduleType:
    """Builds the run; data and tokenizer come first, because their checks are cheap."""
    from torchgrpo.monitoring.progress import Progress

    progress = exit_stack.enter_context(closing(Progress(config.logging, config.total_optimizer_steps)))
    progress.start_stage("starting")
    import torch

    from envs.task import make_task
    from torchgrpo.evaluation.eval_sets import load_eval_sets
    from torchgrpo.rollout.engine_loop import EngineLoop
    from torchgrpo.rollout.engines.build_engines import adapter_shape, build_engine, build_weight_pusher
    from torchgrpo.rollout.model_rewards.model_rewards import make_model_rewards
    from torchgrpo.rollout.rollout_components import RolloutComponents
    from torchgrpo.run import build_rollout
    from torchgrpo.run.callbacks import make_callbacks
    from torchgrpo.training.learner import make_learner

    checkpoint, notices = resolve_resume(config, run_dir, schedule)
    plan = plan_run(config, schedule, run_dir)
    prepare(config, plan)
    progress.start_stage("reading data")
    task = make_task(config.env)
    tokenizer = _load_tokenizer(config)
    environments = build_rollout.make_environments(config, tokenizer)
    exit_stack.callback(build_rollout.close_environments, environments)
    prompts = check_data(checkpoint, build_rollout.make_prompts(config, task, tokenizer, environments))
    eval_sets = load_eval_sets(config, tokenizer, environments, prompts.source.examples)
    model_rewards = make_model_rewards(config.env, config.reward_names)
    exit_stack.callback(build_rollout.close_model_rewards, model_rewards)
    progress.start_stage("starting engines")
    engine = exit_stack.enter_context(closing(build_engine(config, tokenizer, plan, run_dir, adapter_shape(config))))
    progress.start_stage("loading the model")
    learner = exit_stack.enter_context(closing(make_learner(config, plan, run_dir, progress.set_stage)))
    rewards, group_rewards = _start_rewards(config, task, lambda: learner.optimizer_steps, exit_stack)
    loop = exit_stack.enter_context(
        closing(EngineLoop(engine, config.inference_model.request_timeout_s, config.train.wait_timeout_s))
    )
    loop.on_close.push_async_callback(model_rewards.close)
    monitor = _make_monitor(config, run_dir, progress, checkpoint, tuple(task.members), exit_stack)
    player = build_rollout.make_player(config, plan, tokenizer, environments, loop)
    group_rollout = build_rollout.make_group_rollout(
        config, tokenizer, player, loop, rewards, model_rewards, group_rewards
    )
    weight_pusher = build_weight_pusher(config, learner, engine, plan)
    evaluation = build_rollout.make_evaluation(config, plan, eval_sets, tokenizer, player, loop, model_rewards, monitor)
    run = schedule(
        config,
        run_dir,
        plan,
        learner,
        RolloutComponents(engine, loop, group_rollout, prompts, rewards, model_rewards, weight_pusher, group_rewards),
        monitor,
        torch.Generator().manual_seed(config.train.seed),
        make_callbacks(config, run_dir, evaluation, monitor),
    )
    run.begin(checkpoint, notices)
    return run


def _start_rewards(
    config: Config, task: "Task", step: Callable[[], int], exit_stack: ExitStack
) -> tuple["RewardService", "RewardService | None"]:
    """Returns the reward service, and the service of `env.group_reward` if that is set.

    step: returns the number of finished optimizer steps.
    """
    from envs.reward_workers.group_reward import GroupRewardTask
    from envs.reward_workers.service import RewardService

    service = RewardService(task, config.env, step, config.total_optimizer_steps)
    rewards = exit_stack.enter_context(closing(service))
    if config.env.group_reward is None:
        return rewards, None
    return rewards, exit_stack.enter_context(closing(RewardService(GroupRewardTask(config.env), config.env)))


def _load_tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    """Loads the policy's tokenizer, and checks the files of all models."""
    from torchgrpo.training.model_files import load_checked_tokenizer
    from torchgrpo.training.reference_model_files import check_reference_files

    tokenizer = load_checked_tokenizer(config.model, config.max_model_len)
    check_reference_files(tokenizer, config)
    return tokenizer


def _make_monitor(
    config: Config,
    run_dir: Path,
    progress: "Progress",
    checkpoint: "Checkpoint | None",
    members: tuple[str, ...],
    exit_stack: ExitStack,
) -> "Monitor":
    """Builds the monitor of a run, with its trackers.

    members: the data sets of a mixture.
    """
    from torchgrpo.monitoring.monitor import Monitor
    from torchgrpo.monitoring.tracker_threads import make_tracker

    tracker = make_tracker(config.logging, run_dir, asdict(config))
    if tracker is not None:
        exit_stack.callback(tracker.close, "failed")
    _, first_step, _ = (0, 0, 0) if checkpoint is None else checkpoint.counters
    progress.resume(first_step)
    return Monitor(run_dir, tracker, progress, first_step, members, config.logging.rollouts_gb)


def prepare(config: Config, plan: "Plan") -> None:
    """Sets seeds, determinism, threads and the current GPU of this process."""
    import torch

    from torchgrpo.training.process_setup import prepare_process

    # Code that uses the current GPU of this process, such as vLLM, must find the learner's.
    device = torch.device(plan.devices.train_device) if plan.devices.ranks == 1 else None
    prepare_process(config, plan.learner.num_threads, device, shares_gpu_memory=plan.transport == "ipc")
