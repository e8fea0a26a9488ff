"""Evaluation put together: on the engines of training, or alone (`run=eval`)."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.outcome import RunOutcome
from config.schema import Config
from envs.chat import Encoder
from envs.group import Sampling
from envs.judging.service import RewardService
from envs.turns import Conversation
from evaluation.evaluation import Evaluation
from evaluation.sets import EvalSet, load_sets
from monitoring.monitor import Monitor
from monitoring.progress import Progress
from monitoring.trackers import make_tracker
from plan.plan import Plan
from rollout.generate import Generation
from rollout.loop import EngineLoop
from run.engines import build_engine, make_conversation
from training.model import load_tokenizer, saved_eos_token_ids


def make_evaluation(
    config: Config,
    plan: Plan,
    sets: list[EvalSet],
    tokenizer: Any,
    conversation: Conversation | None,
    loop: EngineLoop,
    monitor: Monitor,
    run_dir: Path,
) -> Evaluation:
    """An evaluation of these sets, whose groups are made in the loop."""
    encoder = Encoder(tokenizer, saved_eos_token_ids(config.model.name, tokenizer))

    def make_groups(chosen: EvalSet, rewards: RewardService, seed: int) -> Generation:
        own = chosen.settings
        max_tokens = own.max_tokens or config.inference_model.max_tokens
        sampling = Sampling(own.temperature, own.top_p, own.top_k, max_tokens)
        return Generation(loop, encoder, loop.judge(rewards), conversation, sampling, own.n, own.n, seed)

    return Evaluation(
        config,
        plan,
        sets,
        loop,
        make_groups,
        lambda total, name: monitor.live.second(total, f"eval {name}", "problem"),
        monitor.say,
        run_dir,
    )


def evaluate(
    evaluation: Evaluation, monitor: Monitor, iteration: int, version: int, stopped: Callable[[], bool]
) -> list[str]:
    """Evaluate every set and log it; a table for each, none if it was given up."""
    began = time.perf_counter()
    found = evaluation.run(iteration, stopped)
    if found is None:
        return []
    metrics, tables = found
    monitor.evaluated(metrics, iteration, version, time.perf_counter() - began)
    return tables


def evaluate_alone(
    config: Config,
    run_dir: Path,
    plan: Plan,
    saved: dict[str, Any] | None,
    begun: Callable[[], None],
) -> RunOutcome:
    """`run=eval`: engines with the weights of `model.name`, a tokenizer, and nothing that learns.

    saved: the checkpoint that these weights are of; its iteration, optimizer step and version name the evaluation.
    begun: called when everything is there.
    """
    tokenizer = load_tokenizer(config.model.name)
    sets = load_sets(config, tokenizer)
    conversation = make_conversation(config, tokenizer)
    iteration, version = (0, 0) if saved is None else (saved["iteration"], saved["policy_version"])
    steps = 0 if saved is None else saved["learner"]["optimizer_steps"]
    inference = config.inference_model
    outcome: RunOutcome = "failed"
    with ExitStack() as ending:  # from the last to the first, each even where another one fails
        engine = build_engine(config, None, tokenizer, plan, run_dir)
        ending.callback(engine.close)
        if conversation is not None:
            ending.callback(conversation.close)
        loop = EngineLoop(engine, inference.request_timeout_s, config.train.wait_timeout_s)
        ending.callback(loop.close)
        tracker = make_tracker(config.logging, run_dir, asdict(config))
        monitor = Monitor(
            run_dir, tracker, repeats=1, live=Progress(config.logging, total_steps=0), first_step=steps
        )
        ending.callback(lambda: monitor.close(outcome))
        begun()
        monitor.file.begin()
        try:
            evaluation = make_evaluation(config, plan, sets, tokenizer, conversation, loop, monitor, run_dir)
            version += engine.policy_version
            tables = evaluate(evaluation, monitor, iteration, version, lambda: False)
            print("\n".join(tables), flush=True)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
    return outcome
