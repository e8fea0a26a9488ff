"""From a typed config to the parts of a run, and the run's life around the schedule.

    launch ─▶ Hydra ─▶ Config (checked) ─▶ build: task, tokenizer, model, engines, learner ─▶ train(config, parts)
                                                                                             └─▶ close, always

The only file that knows two rooms at once. The schedules themselves are grpo.py and grpo_async.py.
"""

import gc
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.errors import ConfigError
from config.files import disk_full
from config.messages import readable
from config.outcome import INTERRUPTED, RunOutcome
from config.schema import Config, register_schema, to_config
from grpo_parts import Parts

if TYPE_CHECKING:
    from plan.plan import Plan

PROJECT = Path(__file__).resolve().parent
DISK_FULL = (
    "no space is left to write {run_dir}, or a temporary file. What is there is whole. Make room and go on from the "
    "newest checkpoint with train.resume=auto, or write elsewhere with hydra.run.dir"
)


def launch(train: Callable[[Config, Parts], None], overlapped: bool = False) -> None:
    """The command line: compose, check, build, train, close. Exits with 2 and one message on bad input.

    overlapped: the schedule generates while it trains, so engines need devices of their own.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions reach us; we print the one readable message
    # Sums in the same order each time (train.deterministic); cuBLAS reads it when torch first uses a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    register_schema()

    @hydra.main(version_base=None, config_path=str(PROJECT / "config"), config_name="grpo_gsm8k")
    def main(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra_config = HydraConfig.get()
        run_dir = Path(hydra_config.runtime.output_dir)
        try:
            outcome = run(to_config(composed), run_dir, train, overlapped)
        except (ConfigError, OmegaConfBaseException) as error:
            _remove_if_unused(run_dir)
            sys.exit(_complain(readable(error)))
        except Exception as error:
            if not disk_full(error):
                raise
            sys.exit(_complain(DISK_FULL.format(run_dir=run_dir)))
        if outcome == "interrupted" and hydra_config.mode == RunMode.MULTIRUN:
            print("the sweep ends here; its other runs have not begun", file=sys.stderr)
            sys.exit(INTERRUPTED)

    try:
        main()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_complain(readable(error)))


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _remove_if_unused(run_dir: Path) -> None:
    """A run that never began leaves no folder behind."""
    if not (run_dir / "metrics.jsonl").exists() and not (run_dir / "checkpoints").exists():
        shutil.rmtree(run_dir, ignore_errors=True)


def run(
    config: Config, run_dir: Path, train: Callable[[Config, Parts], None], overlapped: bool = False
) -> RunOutcome:
    """One job: what `run=` says."""
    if config.run in ALONE:
        return ALONE[config.run](config, run_dir, overlapped)
    parts = build(config, run_dir, overlapped)
    outcome: RunOutcome = "failed"
    try:
        train(config, parts)
        if not parts.stop.requested:
            parts.watch.check(parts.monitor.optimizer_step)
        outcome = "interrupted" if parts.stop.requested else "finished"
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

    machine = imagined_machine(config.plan, this_machine(run_dir))
    plan, found = planned(config, overlapped, machine, run_dir)
    found += [Problem("", text) for text in option_problems(config)]
    print(report(plan, found), flush=True)
    _remove_if_unused(run_dir)
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


def run_evaluation(config: Config, run_dir: Path, overlapped: bool) -> RunOutcome:
    """`run=eval`: neither learner nor training data."""
    from grpo_eval import evaluate_alone

    plan = plan_run(config, overlapped, run_dir)
    seed_everything(config, plan)
    outcome = evaluate_alone(config, run_dir, plan)
    if outcome == "interrupted":
        sys.exit(INTERRUPTED)
    return outcome


def grade_samples(config: Config, run_dir: Path, overlapped: bool) -> RunOutcome:
    """`run=rewards`: judges saved completions; no model."""
    from envs.grade import grade

    code = grade(config.env)
    _remove_if_unused(run_dir)
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
    "eval": run_evaluation,
    "rewards": grade_samples,
    "selftest": run_selftest,
}


def find_checkpoint(config: Config, run_dir: Path, overlapped: bool) -> Path | None:
    """What `train.resume` means: a path, or with `auto` the newest checkpoint of this very run.

    `auto` looks in this run's own folder first (`hydra.run.dir=` names it), then in its sibling runs for the
    newest one of the same script with the same config. None: start from the beginning.

    Raises:
        ConfigError: checkpoints are in the way of a run that starts from the beginning.
    """
    from training.checkpoint import newest_checkpoint

    own = newest_checkpoint(run_dir)
    if config.train.resume is None:
        if own is not None:
            raise ConfigError(
                f"hydra.run.dir={run_dir} holds the checkpoints of an earlier run, which this one would replace; go "
                "on from them with train.resume=auto, or take another folder"
            )
        return None
    if config.train.resume != "auto":
        return Path(config.train.resume)
    if own is not None:
        return own
    others = sorted((PROJECT / "outputs").glob("*/*/checkpoints"), reverse=True)
    candidates = (newest_checkpoint(folder.parent) for folder in others)
    return next((path for path in candidates if path and _same_run(path, config, overlapped)), None)


def _same_run(path: Path, config: Config, overlapped: bool) -> bool:
    from training.checkpoint import origin

    found = origin(path)
    if found is None or found[1] != overlapped:
        return False
    saved, ours = found[0], asdict(config)
    for either in (saved, ours):
        either["train"].pop("resume")
        either["train"].pop("total_dialog_turns")
        either.pop("logging")
    return bool(saved == ours)


def build(config: Config, run_dir: Path, overlapped: bool = False) -> Parts:
    """The parts of a run; where one of them fails, those that are there already are closed."""
    with ExitStack() as built:
        parts = _build(config, run_dir, overlapped, built)
        built.pop_all()
    parts.stop.install()
    return parts


def _build(config: Config, run_dir: Path, overlapped: bool, built: ExitStack) -> Parts:
    """Cheap checks first: data and tokenizer before weights, weights before engines."""
    from monitoring.progress import Progress

    live = Progress(config.logging, config.total_optimizer_steps)
    built.callback(live.close)
    live.begin("starting")
    import torch

    from envs.duplicates import distinct_examples
    from envs.prompts import PromptSource
    from envs.reward_service import RewardService
    from envs.task import make_task
    from envs.token_env import TokenEnv, prompt_fits
    from envs.turns import with_instructions
    from grpo_engines import build_engine, build_weights, in_turns, make_conversation
    from grpo_eval import Evaluation, load_sets
    from monitoring.monitor import Monitor
    from monitoring.trackers import MetricsFile, close_tracker, make_tracker
    from monitoring.watch import Watch
    from rollout.collector import EnginePolicy, Rollouts
    from rollout.engine import Sampling
    from rollout.engine_views import SharedEngine
    from rollout.streaming import PromptQueue
    from training.checkpoint import load_checkpoint
    from training.learner import Learner
    from training.model import eos_token_ids, load_model, load_tokenizer

    _keep_imports()
    found = find_checkpoint(config, run_dir, overlapped)
    saved = load_checkpoint(found) if found else None
    if saved is not None and saved["overlapped"] != overlapped:
        ours, theirs = ("grpo_async.py", "grpo.py") if overlapped else ("grpo.py", "grpo_async.py")
        raise ConfigError(
            f"train.resume={found}: {theirs} wrote it, which counts other iterations than {ours}; go on with {theirs}"
        )
    plan = plan_run(config, overlapped, run_dir)
    seed_everything(config, plan)
    live.begin("reading data")
    task = make_task(config.env)
    tokenizer = load_tokenizer(config.model.name)
    limit = config.env.max_prompt_tokens
    prompts = PromptQueue(
        PromptSource(
            with_instructions(distinct_examples(task, config.env.split), config.env.tools),
            seed=config.train.seed,
            keep=lambda example: prompt_fits(tokenizer, example, limit),
            difficulty=config.env.difficulty,
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
    engine = build_engine(config, model, tokenizer, plan)
    built.callback(engine.close)
    model, scorer, reference = build_models(config, model, plan)
    learner = Learner(model, scorer, reference, config, run_dir, live.stage)
    inference = config.inference_model
    sampling = Sampling(inference.temperature, inference.top_p, inference.top_k, inference.max_tokens)
    rewards = RewardService(task, config.env)
    built.callback(rewards.close)
    candidates = config.env.candidates
    env = TokenEnv(prompts.draw, tokenizer, rewards, candidates, prompts.observe, ends)
    generating = in_turns(engine, conversation)
    shared = SharedEngine(generating)
    own = shared.view() if eval_sets else generating
    policy = EnginePolicy(own, sampling, candidates, config.train.seed, inference.request_timeout_s)
    tracker = make_tracker(config.logging, run_dir, asdict(config))
    if tracker is not None:
        built.callback(close_tracker, tracker, "failed")
    if saved is not None and found is not None:
        earlier = MetricsFile(found.parent.parent / "metrics.jsonl")
        MetricsFile(run_dir / "metrics.jsonl").continue_from(earlier, saved["learner"]["optimizer_steps"])
    first_step = saved["learner"]["optimizer_steps"] if saved else 0
    live.resume(first_step)
    monitor = Monitor(run_dir, tracker, config.env.repeats, live, first_step)
    generator = torch.Generator().manual_seed(config.train.seed)
    parts = Parts(
        config,
        run_dir,
        learner,
        Rollouts(env, policy, config.env.repeats, config.policy.filter_attempts, live.stage),
        build_weights(config, model, engine, plan),
        prompts,
        rewards,
        monitor,
        Watch(config, plan.overlapped),
        generator,
        plan,
    )
    if eval_sets:
        parts.evaluation = Evaluation(config, plan, eval_sets, tokenizer, shared.view(), monitor, run_dir)
    if saved is not None:
        parts.restore(saved)
        monitor.say(f"resumed from {found} at iteration {saved['iteration']}")
    elif config.train.resume == "auto":
        monitor.say("train.resume=auto: no checkpoint of this run, starting from the beginning")
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
