"""From a typed config to the parts of a run, and the run's life around the schedule.

    launch ─▶ Hydra ─▶ Config (checked) ─▶ build: task, tokenizer, model, engines, learner ─▶ train(config, parts)
                                                                                             └─▶ close, always

The only file that knows two rooms at once. The schedules themselves are grpo.py and grpo_async.py.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.command_line import command_line, resume_command
from config.folders import held, remove_if_unused
from config.outcome import INTERRUPTED, RunOutcome
from config.schema import Config
from run.parts import Parts
from run.resume import changed_settings, evaluated_model, find, with_model

if TYPE_CHECKING:
    from plan.plan import Plan


def launch(train: Callable[[Config, Parts], None], overlapped: bool = False) -> None:
    """The command line: compose, check, build, train, close; config/command_line.py says how it ends.

    overlapped: the schedule generates while it trains, so engines need devices of their own.
    """
    command_line(lambda config, run_dir, begun: run(config, run_dir, train, overlapped, begun))


def run(
    config: Config,
    run_dir: Path,
    train: Callable[[Config, Parts], None],
    overlapped: bool = False,
    begun: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """One job: what `run=` says.

    begun: called when a run or an evaluation is sure to begin; before, what an earlier one left is as it was.
    """
    if config.run in ALONE:
        return ALONE[config.run](config, run_dir, overlapped)
    with held(run_dir):
        if config.run == "eval":
            return run_evaluation(config, run_dir, overlapped, begun)
        config, told = with_model(config)
        parts = build(config, run_dir, overlapped)
        outcome: RunOutcome = "failed"
        try:
            begun()
            for line in told:
                parts.monitor.say(line)
            train(config, parts)
            if not parts.stop.requested:
                parts.watch.check(parts.monitor.optimizer_step)
            outcome = "interrupted" if parts.stop.requested else "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            parts.close(outcome)
        return outcome


def print_plan(config: Config, run_dir: Path, overlapped: bool) -> RunOutcome:
    """`run=plan`, for this machine or the one that `plan.*` describes: touches no device, leaves no folder. A plan that
    cannot work is printed whole all the same, and ends with 2."""
    from envs.options import option_problems
    from plan.machine import imagined_machine, this_machine
    from plan.problems import Problem, planned
    from plan.report import advice, report

    config, _ = with_model(config)
    machine = imagined_machine(config.plan, this_machine(run_dir))
    plan, found = planned(config, overlapped, machine, run_dir)
    found += [Problem("", text) for text in option_problems(config)]
    print(report(plan, found), flush=True)
    remove_if_unused(run_dir)
    if found:
        print(advice(plan, found, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"


def plan_run(config: Config, overlapped: bool, run_dir: Path) -> "Plan":
    """Who lives where; raises ConfigError for a plan that cannot work, before anything is loaded."""
    from plan.machine import this_machine
    from plan.plan import make_plan
    from plan.problems import check

    return check(make_plan(config, overlapped, this_machine(run_dir), run_dir))


def run_evaluation(config: Config, run_dir: Path, overlapped: bool, begun: Callable[[], None]) -> RunOutcome:
    """`run=eval`: neither learner nor training data; of `model.name`, or of the checkpoint of `train.resume`."""
    from run.evaluation import evaluate_alone

    with evaluated_model(config, run_dir, overlapped) as (evaluated, saved):
        plan = plan_run(evaluated, overlapped, run_dir)
        seed_everything(evaluated, plan)
        outcome = evaluate_alone(evaluated, run_dir, plan, None if saved is None else saved.state, begun)
    if outcome == "interrupted":
        sys.exit(INTERRUPTED)
    return outcome


def grade_samples(config: Config, run_dir: Path, overlapped: bool) -> RunOutcome:
    """`run=rewards`: judges saved completions; no model."""
    from run.grade import grade

    code = grade(config.env)
    remove_if_unused(run_dir)
    if code:
        sys.exit(code)
    return "finished"


def run_selftest(config: Config, run_dir: Path, overlapped: bool) -> RunOutcome:
    """`run=selftest`: what works on this machine, whatever the config says."""
    from selftest.main import selftest

    try:
        code = selftest(run_dir)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code:
        sys.exit(code)
    return "finished"


ALONE: dict[str, Callable[[Config, Path, bool], RunOutcome]] = {
    "plan": print_plan,
    "rewards": grade_samples,
    "selftest": run_selftest,
}


def build(config: Config, run_dir: Path, overlapped: bool = False) -> Parts:
    """The parts of a run; where one of them fails, those that are there already are closed."""
    with ExitStack() as built:
        parts = _build(config, run_dir, overlapped, built)
        built.pop_all()
    parts.stop.install(resume_command(run_dir))
    return parts


def _build(config: Config, run_dir: Path, overlapped: bool, built: ExitStack) -> Parts:
    """Cheap checks first: data and tokenizer before weights, weights before engines."""
    from monitoring.progress import Progress

    live = Progress(config.logging, config.total_optimizer_steps)
    built.callback(live.close)
    live.begin("starting")
    import torch

    from envs.chat import Encoder
    from envs.duplicates import distinct_examples
    from envs.group import Sampling
    from envs.judging.service import RewardService
    from envs.prompt_length import PromptLimit
    from envs.prompts import PromptQueue, PromptSource
    from envs.task import make_task
    from envs.turns import with_instructions
    from evaluation.sets import load_sets
    from monitoring.monitor import Monitor
    from monitoring.trackers import close_tracker, make_tracker
    from monitoring.watch import Watch
    from rollout.generate import Generation
    from rollout.loop import EngineLoop
    from run.engines import build_engine, build_weights, make_conversation
    from run.evaluation import make_evaluation
    from training.learner import Learner
    from training.model import eos_token_ids, load_model, load_tokenizer

    _keep_imports()
    saved, told = find(config, run_dir, overlapped)
    if saved is not None:
        told += changed_settings(saved, config, overlapped)
    plan = plan_run(config, overlapped, run_dir)
    seed_everything(config, plan)
    live.begin("reading data")
    task = make_task(config.env)
    tokenizer = load_tokenizer(config.model.name)
    limit = PromptLimit(tokenizer, config.env.max_prompt_tokens)
    prompts = PromptQueue(
        PromptSource(
            with_instructions(distinct_examples(task, config.env.split), config.env),
            seed=config.train.seed,
            keep=limit,
            difficulty=config.env.difficulty,
            told=limit.told,
        )
    )
    eval_sets = load_sets(config, tokenizer)
    conversation = make_conversation(config, tokenizer)
    if plan.devices.train:  # what works on "the" GPU of this process, as vLLM does, is to find the learner's
        torch.cuda.set_device(plan.devices.train[0])
    live.begin("loading the model")
    model = load_model(config.model, torch_devices(plan.devices.train))
    ends = eos_token_ids(model, tokenizer)
    live.begin("starting engines")
    engine = build_engine(config, model, tokenizer, plan, run_dir)
    built.callback(engine.close)
    model, scorer, reference = build_models(config, model, plan)
    learner = Learner(model, scorer, reference, config, run_dir, live.stage)
    inference = config.inference_model
    sampling = Sampling(inference.temperature, inference.top_p, inference.top_k, inference.max_tokens)
    rewards = RewardService(task, config.env)
    built.callback(rewards.close)
    members = tuple(task.members)
    loop = EngineLoop(engine, inference.request_timeout_s, config.train.wait_timeout_s)
    generation = Generation(
        loop,
        Encoder(tokenizer, ends),
        loop.judge(rewards),
        conversation,
        sampling,
        config.env.candidates,
        config.env.repeats,
        config.train.seed,
    )
    tracker = make_tracker(config.logging, run_dir, asdict(config))
    if tracker is not None:
        built.callback(close_tracker, tracker, "failed")
    first_step = saved.state["learner"]["optimizer_steps"] if saved else 0
    live.resume(first_step)
    monitor = Monitor(run_dir, tracker, config.env.repeats, live, first_step, members)
    generator = torch.Generator().manual_seed(config.train.seed)
    parts = Parts(
        config,
        run_dir,
        learner,
        engine,
        loop,
        generation,
        build_weights(config, model, engine, plan),
        prompts,
        rewards,
        monitor,
        Watch(config, plan.overlapped),
        generator,
        plan,
        conversation=conversation,
        members=members,
    )
    if eval_sets:
        parts.evaluation = make_evaluation(
            config, plan, eval_sets, tokenizer, conversation, loop, monitor, run_dir
        )
    told += parts.restore(saved) if saved is not None else parts.begin()
    for line in told:
        monitor.say(line)
    return parts


def _keep_imports() -> None:
    """What imports left behind stays: without this, looking for garbage in it costs 5% of a small run. Called before
    anything of the run is made, and after an earlier run's garbage is gone."""
    gc.collect()
    gc.freeze()


def seed_everything(config: Config, plan: "Plan") -> None:
    import random

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


def torch_devices(indices: Sequence[int]) -> list[Any]:
    """GPUs by index; the CPU where there are none."""
    import torch

    return [torch.device("cuda", index) for index in indices] or [torch.device("cpu")]


def build_models(config: Config, model: Any, plan: "Plan") -> tuple[Any, Any, Any]:
    """The policy, its scorer, and the reference or None.

    The reference is the model that the run began from, whatever `model` becomes or a checkpoint holds.
    """
    import torch

    from training.forward import ResponseScorer
    from training.model import add_lora, load_frozen
    from training.reference import AdapterOff, HostMemory, Reference

    autocast = None if plan.learner.autocast is None else getattr(torch, plan.learner.autocast)
    inference = config.inference_model

    def scorer(scored: Any) -> ResponseScorer:
        return ResponseScorer(
            scored,
            config.env.repeats,
            share_prompt=plan.learner.share_prompt,
            chunk_size=plan.learner.chunk_size,
            temperature=inference.temperature if inference.temperature_end is None else None,
            top_p=inference.top_p,
            top_k=inference.top_k,
            autocast_dtype=autocast,
        )

    rows = plan.learner.microbatch_rows
    home = plan.reference.home
    reference: Reference | AdapterOff | None = None
    if home == "host memory" and not plan.devices.on_cpu:
        frozen = load_frozen(config.model, torch_devices(()), autocast)
        visitor = HostMemory(frozen, torch_devices(plan.devices.train)[0])
        reference = Reference(scorer(frozen), rows, visit=visitor.visit)
    elif home in ("own devices", "training GPU", "host memory"):
        places = torch_devices(plan.reference.devices or plan.devices.train[:1])
        reference = Reference(
            scorer(load_frozen(config.model, places, autocast)), rows, beside=home == "own devices"
        )
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    policy = add_lora(model, config.train_model.lora) if config.train_model.lora.enabled else model
    if home == "base of the LoRA policy":
        reference = AdapterOff(scorer(policy), rows)
    return policy, scorer(policy), reference
