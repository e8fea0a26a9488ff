"""Evaluations of a run, logged: beside training, or alone (`run=eval`)."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from config.outcome import RunOutcome
from config.schema import Config
from evaluation.evaluation import Evaluation
from evaluation.sets import load_sets
from monitoring.monitor import Monitor
from monitoring.progress import Progress
from monitoring.trackers import make_tracker
from plan.plan import Plan
from rollout.loop import EngineLoop
from run.engines import build_engine
from run.groups import make_conversation, make_evaluation
from training.checkpoint import Saved
from training.model import load_tokenizer


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
    config: Config, run_dir: Path, plan: Plan, saved: Saved | None, begun: Callable[[], None]
) -> RunOutcome:
    """`run=eval`: engines with the weights of `model.name`, a tokenizer, and nothing that learns.

    saved: the checkpoint that these weights are of; its iteration, optimizer step and version name the evaluation.
    begun: called when everything is there.
    """
    tokenizer = load_tokenizer(config.model.name)
    sets = load_sets(config, tokenizer)
    conversation = make_conversation(config, tokenizer)
    iteration, steps, version = (0, 0, 0) if saved is None else saved.place
    outcome: RunOutcome = "failed"
    with ExitStack() as ending:  # from the last to the first, each even where another one fails
        if conversation is not None:
            ending.callback(conversation.close)
        engine = build_engine(config, tokenizer, plan, run_dir)
        ending.callback(engine.close)
        loop = EngineLoop(engine, config.inference_model.request_timeout_s, config.train.wait_timeout_s)
        ending.callback(loop.close)
        tracker = make_tracker(config.logging, run_dir, asdict(config))
        live = Progress(config.logging, total_steps=0)
        monitor = Monitor(run_dir, tracker, live, steps, rollouts_gb=config.logging.rollouts_gb)
        ending.callback(lambda: monitor.close(outcome))
        evaluation = make_evaluation(config, plan, sets, tokenizer, conversation, loop, monitor)
        begun()
        monitor.file.begin()
        monitor.ledger.begin(-1)
        try:
            tables = evaluate(evaluation, monitor, iteration, version + engine.policy_version, lambda: False)
            monitor.live.close()  # what it shows is no part of the result
            print("\n".join(tables), flush=True)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
    return outcome
