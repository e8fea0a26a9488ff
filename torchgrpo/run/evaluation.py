"""Evaluations of a run, logged: beside training, or alone (`run=eval`)."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.schema.config import Config
from config.schema.errors import RunOutcome
from torchgrpo.evaluation.evaluation import Evaluation
from torchgrpo.evaluation.sets import load_sets
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.monitoring.progress import Progress
from torchgrpo.monitoring.tracking import make_tracker
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.sampler import Engine
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.run.engines import build_engine
from torchgrpo.run.generation import make_conversation, make_evaluation
from torchgrpo.run.report import ReportWriter
from torchgrpo.training.checkpoint import Saved
from torchgrpo.training.model_files import load_checked_tokenizer


def evaluate(
    evaluation: Evaluation, monitor: Monitor, iteration: int, version: int, stopped: Callable[[], bool]
) -> tuple[dict[str, Any], list[str]] | None:
    """Evaluate every set and log it: the row of metrics, and a table for each set. None if it was given up."""
    began = time.perf_counter()
    found = evaluation.run(iteration, stopped)
    if found is None:
        return None
    metrics, tables = found
    return monitor.evaluated(metrics, iteration, version, time.perf_counter() - began), tables


class _OwnScores:
    """An engine's scores in the place of a learner's, where nobody learns."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return next(iter(self.engine.score(sequences).values())).log_probs


def evaluate_alone(
    config: Config, run_dir: Path, plan: Plan, saved: Saved | None, begun: Callable[[], None]
) -> RunOutcome:
    """`run=eval`: engines with the weights of `model.name`, a tokenizer, and nothing that learns.

    saved: the checkpoint that these weights are of; its iteration, optimizer step and version name the evaluation.
    begun: called when everything is there.
    """
    tokenizer = load_checked_tokenizer(config.model, config.max_model_len)
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
        monitor = Monitor(run_dir, tracker, live, steps, (), config.logging.rollouts_gb)
        ending.callback(ReportWriter(run_dir, monitor.say).finish)
        ending.callback(lambda: monitor.close(outcome))
        evaluation = make_evaluation(config, plan, sets, tokenizer, conversation, loop, monitor)
        known = len(tokenizer) if plan.shape is None else min(len(tokenizer), plan.shape.vocab_size)
        own, timeout = _OwnScores(engine, known), config.train.wait_timeout_s
        WeightCheck(plan.weight_check, engine, own, timeout_s=timeout).compare_decoding()
        begun()
        monitor.file.begin()
        monitor.ledger.begin(after=-1)
        try:
            found = evaluate(evaluation, monitor, iteration, version + engine.policy_version, lambda: False)
            assert found is not None  # nothing stops it
            monitor.live.close()  # what it shows is no part of the result
            print("\n".join(found[1]), flush=True)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
    return outcome
