"""The job `run=eval`: evaluates `model.name`, or the checkpoint of `train.resume`.

There is no learner, no scorer and no training data.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from config.run_folder.folders import held
from config.schema.config import Config
from config.schema.errors import INTERRUPTED, RunOutcome
from config.schema.models import RefModelConfig
from torchgrpo.evaluation.sets import load_sets
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.monitoring.progress import Progress
from torchgrpo.monitoring.tracking import make_tracker
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.build import build_engine
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.run.build import plan_run, prepare
from torchgrpo.run.build_rollout import make_conversation, make_evaluation
from torchgrpo.run.callbacks import evaluate
from torchgrpo.run.checkpoint_model import evaluated_model
from torchgrpo.run.job import Job
from torchgrpo.run.report_writer import ReportWriter
from torchgrpo.training.checkpoint import Saved
from torchgrpo.training.model_files import load_checked_tokenizer


def run(job: Job[Any]) -> RunOutcome:
    with held(job.run_dir):
        with evaluated_model(job.config, job.run_dir, job.schedule) as (evaluated, saved):
            nothing_scored = replace(evaluated, ref_model=RefModelConfig())
            plan = plan_run(nothing_scored, job.schedule, job.run_dir)
            prepare(evaluated, plan)
            outcome = evaluate_alone(evaluated, job.run_dir, plan, saved, job.on_start)
        if outcome == "interrupted":
            sys.exit(INTERRUPTED)
        return outcome


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
