"""From a typed config to a run that can begin: data, engines, learner, rewards, evaluation and monitor.

    config ─▶ plan ─▶ task, prompts, sets ─▶ engines ─▶ learner ─▶ Lockstep | Overlapped

Where one of them fails, those that are there already are closed.
"""

import gc
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from config.cli.command_line import resume_command
from config.schema.config import Config
from torchgrpo.run.overlapped import ScheduleType
from torchgrpo.run.resume import check_data, starting_point

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchgrpo.monitoring.monitor import Monitor
    from torchgrpo.monitoring.progress import Progress
    from torchgrpo.plan.plan import Plan
    from torchgrpo.training.checkpoint import Saved


def plan_run(config: Config, schedule: type[ScheduleType], run_dir: Path) -> "Plan":
    """Who lives where; raises ConfigError for a plan that cannot work, before anything is loaded."""
    from torchgrpo.plan.machine import this_machine
    from torchgrpo.plan.make_plan import make_plan
    from torchgrpo.plan.problems import check

    return check(make_plan(config, schedule.overlapped, this_machine(run_dir), run_dir))


def build(config: Config, run_dir: Path, schedule: type[ScheduleType]) -> ScheduleType:
    """The run of a script's loop, to be closed with `close`."""
    gc.collect()  # a run before this one that nobody holds any longer: its model may fill a GPU
    with ExitStack() as built:
        run = _build(config, run_dir, schedule, built)
        built.pop_all()
    run.stop.install(resume_command(run_dir), run.monitor.live.erase)
    return run


def _build(config: Config, run_dir: Path, schedule: type[ScheduleType], built: ExitStack) -> ScheduleType:
    """Cheap checks first: data and tokenizer before engines and weights."""
    from torchgrpo.monitoring.progress import Progress

    live = Progress(config.logging, config.total_optimizer_steps)
    built.callback(live.close)
    live.begin("starting")
    import torch

    from envs.judging.service import RewardService
    from envs.task import make_task
    from torchgrpo.evaluation.sets import load_sets
    from torchgrpo.rollout.collector import Collector
    from torchgrpo.rollout.engine_loop import EngineLoop
    from torchgrpo.rollout.engines.build import adapter_shape, build_engine, build_weights
    from torchgrpo.run.build_rollout import make_conversation, make_evaluation, make_generation, make_prompts
    from torchgrpo.run.callbacks import make_callbacks
    from torchgrpo.training.learner import make_learner

    saved, told = starting_point(config, run_dir, schedule)
    plan = plan_run(config, schedule, run_dir)
    prepare(config, plan)
    live.begin("reading data")
    task = make_task(config.env)
    tokenizer = _tokenizer(config)
    prompts = check_data(saved, make_prompts(config, task, tokenizer))
    eval_sets = load_sets(config, tokenizer, prompts.source.examples)
    conversation = make_conversation(config, tokenizer)
    if conversation is not None:
        built.callback(conversation.close)
    live.begin("starting engines")
    engine = build_engine(config, tokenizer, plan, run_dir, adapter_shape(config))
    built.callback(engine.close)
    live.begin("loading the model")
    learner = make_learner(config, plan, run_dir, live.stage)
    built.callback(learner.close)
    rewards = RewardService(task, config.env, lambda: learner.optimizer_steps, config.total_optimizer_steps)
    built.callback(rewards.close)
    loop = EngineLoop(engine, config.inference_model.request_timeout_s, config.train.wait_timeout_s)
    built.callback(loop.close)
    monitor = _monitor(config, run_dir, live, saved, tuple(task.members), built)
    generation = make_generation(config, tokenizer, conversation, loop, rewards)
    weights = build_weights(config, learner, engine, plan)
    evaluation = make_evaluation(config, plan, eval_sets, tokenizer, conversation, loop, monitor)
    run = schedule(
        config,
        run_dir,
        plan,
        learner,
        Collector(engine, loop, generation, prompts, rewards, weights),
        monitor,
        torch.Generator().manual_seed(config.train.seed),
        make_callbacks(config, run_dir, evaluation, monitor),
    )
    run.begin(saved, told)
    return run


def _tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    """The policy's tokenizer, once the files of all models are checked."""
    from torchgrpo.training.model_files import load_checked_tokenizer
    from torchgrpo.training.teacher_files import check_reference_files

    tokenizer = load_checked_tokenizer(config.model, config.max_model_len)
    check_reference_files(tokenizer, config)
    return tokenizer


def _monitor(
    config: Config,
    run_dir: Path,
    live: "Progress",
    saved: "Saved | None",
    members: tuple[str, ...],
    built: ExitStack,
) -> "Monitor":
    """members: the data sets of a mixture."""
    from torchgrpo.monitoring.monitor import Monitor
    from torchgrpo.monitoring.tracking import make_tracker

    tracker = make_tracker(config.logging, run_dir, asdict(config))
    if tracker is not None:
        built.callback(tracker.close, "failed")
    _, first_step, _ = (0, 0, 0) if saved is None else saved.place
    live.resume(first_step)
    return Monitor(run_dir, tracker, live, first_step, members, config.logging.rollouts_gb)


def prepare(config: Config, plan: "Plan") -> None:
    """Seeds, determinism, threads and the current GPU of this process."""
    import torch

    from torchgrpo.training.process import prepare_process

    # What works on "the" GPU of this process, as vLLM does, is to find the learner's.
    device = torch.device(plan.devices.train_device) if plan.devices.ranks == 1 else None
    prepare_process(config, plan.learner.num_threads, device)
