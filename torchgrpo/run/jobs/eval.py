"""Job `run=eval`: evaluates `model.name`, or the checkpoint of `train.resume`.

The job has no learner, no scorer and no training data.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from config.run_folder.folders import lock_folder
from config.schema.config import Config
from config.schema.errors import EXIT_INTERRUPTED, RunOutcome
from config.schema.models import RefModelConfig
from torchgrpo.evaluation.eval_sets import load_eval_sets
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.monitoring.progress import Progress
from torchgrpo.monitoring.tracker_threads import make_tracker
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.build_engines import build_engine
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.model_rewards.model_rewards import make_model_rewards
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.run.build_rollout import (
    close_environments,
    close_model_rewards,
    make_environments,
    make_evaluation,
    make_player,
)
from torchgrpo.run.build_run import plan_run, prepare
from torchgrpo.run.callbacks import evaluate
from torchgrpo.run.checkpoint_model import model_to_evaluate
from torchgrpo.run.job import Job
from torchgrpo.run.report_writer import ReportWriter
from torchgrpo.training.checkpoint import Checkpoint
from torchgrpo.training.model_files import load_checked_tokenizer


def run(job: Job[Any]) -> RunOutcome:
    with lock_folder(job.run_dir):
        with model_to_evaluate(job.config, job.run_dir, job.schedule) as (evaluated, checkpoint):
            nothing_scored = replace(evaluated, ref_model=RefModelConfig())
            plan = plan_run(nothing_scored, job.schedule, job.run_dir)
            prepare(evaluated, plan)
            outcome = evaluate_model(evaluated, job.run_dir, plan, checkpoint, job.on_start)
        if outcome == "interrupted":
            sys.exit(EXIT_INTERRUPTED)
        return outcome


class _EngineScorer:
    """Scores sequences with the engine itself, in place of the learner that `WeightCheck` expects."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return next(iter(self.engine.score(sequences).values())).log_probs


def evaluate_model(
    config: Config, run_dir: Path, plan: Plan, checkpoint: Checkpoint | None, on_ready: Callable[[], None]
) -> RunOutcome:
    """Starts engines with the weights of `model.name`, and evaluates every set of `eval.sets`.

    checkpoint: the origin of the weights; its iteration, optimizer step and policy version go into the row of metrics.
    on_ready: called when all components have started.
    """
    tokenizer = load_checked_tokenizer(config.model, config.max_model_len)
    environments = make_environments(config, tokenizer)
    with ExitStack() as on_error:
        on_error.callback(close_environments, environments)
        sets = load_eval_sets(config, tokenizer, environments)
        model_rewards = make_model_rewards(config.env, config.reward_names)
        on_error.callback(close_model_rewards, model_rewards)
        engine = build_engine(config, tokenizer, plan, run_dir)
        on_error.pop_all()
    iteration, steps, version = (0, 0, 0) if checkpoint is None else checkpoint.counters
    outcome: RunOutcome = "failed"
    with ExitStack() as ending:  # runs in reverse order, each callback even after an error of another
        ending.callback(engine.close)
        loop = EngineLoop(engine, config.inference_model.request_timeout_s, config.train.wait_timeout_s)
        ending.callback(loop.close)
        loop.on_close.push_async_callback(model_rewards.close)
        player = make_player(config, plan, tokenizer, environments, loop)
        tracker = make_tracker(config.logging, run_dir, asdict(config))
        progress = Progress(config.logging, total_steps=0)
        monitor = Monitor(run_dir, tracker, progress, steps, (), config.logging.rollouts_gb)
        ending.callback(ReportWriter(run_dir, monitor.log).finish)
        ending.callback(lambda: monitor.close(outcome))
        evaluation = make_evaluation(config, plan, sets, tokenizer, player, loop, model_rewards, monitor)
        vocab_size = len(tokenizer) if plan.shape is None else min(len(tokenizer), plan.shape.vocab_size)
        scorer, timeout = _EngineScorer(engine, vocab_size), config.train.wait_timeout_s
        WeightCheck(plan.weight_check, engine, scorer, timeout_s=timeout).compare_decoding()
        on_ready()
        monitor.metrics_file.clear()
        monitor.ledger.truncate_after(-1)
        try:
            result = evaluate(evaluation, monitor, iteration, version + engine.policy_version, lambda: False)
            assert result is not None  # `is_stopped` above is never true
            monitor.progress.close()  # removes the progress bar before the result is printed
            print("\n".join(result[1]), flush=True)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
    return outcome
