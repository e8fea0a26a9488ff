"""What a run tells: one row of metrics per optimizer step, a live line, a sample now and then, a summary."""

import json
import logging as python_logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.record.loggers import Logger
from tqdm import tqdm

from config.files import written_whole
from config.outcome import RunOutcome
from config.schema import LoggingConfig
from monitoring.metrics import rollout_metrics
from monitoring.trackers import MetricsFile, close_tracker

log = python_logging.getLogger("grpo")
"""Goes to `grpo.log` in the run's folder alone (config/base.yaml)."""


class Monitor:
    """Collects timings between two optimizer steps and writes everything out at each.

    Args:
        total_steps: optimizer steps of the whole run.
        first_step: steps already done by an earlier part of the run.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: LoggingConfig,
        tracker: Logger | None,
        repeats: int,
        total_steps: int,
        first_step: int = 0,
    ) -> None:
        self.run_dir = run_dir
        self.logging = logging
        self.tracker = tracker
        self.repeats = repeats
        self.file = MetricsFile(run_dir / "metrics.jsonl")
        self.optimizer_step = first_step
        self.seconds = {"collect": 0.0, "optimize": 0.0, "push": 0.0}
        self.extra: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}
        self.tokens = 0
        self.began = self.since = time.perf_counter()
        live = sys.stderr.isatty()
        self.bar = tqdm(
            total=total_steps,
            initial=first_step,
            desc="grpo",
            unit="step",
            mininterval=0.5 if live else 10.0,
            disable=not logging.progress or not total_steps,
            dynamic_ncols=live,
        )

    def progress(self, total: int, name: str, unit: str) -> "tqdm[Any]":
        """A second bar, for what happens between two optimizer steps. To be used in a `with` statement."""
        live = sys.stderr.isatty()
        return tqdm(
            total=total,
            desc=name,
            unit=unit,
            position=1,
            leave=False,
            mininterval=0.5 if live else 10.0,
            disable=not self.logging.progress,
            dynamic_ncols=live,
        )

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block to `time/PHASE_s` of the next row."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began

    def note(self, metrics: dict[str, float]) -> None:
        """Metrics of something that is not an optimizer step (a push): in the next row."""
        self.extra |= metrics

    def optimized(self, batch: TensorDictBase, step: dict[str, float], policy_version: int) -> dict[str, Any]:
        """Write the row of one optimizer step. `policy_version` is that of the weights before the step."""
        self.optimizer_step += 1
        row: dict[str, Any] = {"optimizer_step": self.optimizer_step}
        row |= rollout_metrics(batch, self.repeats, policy_version) | step | self.extra
        row |= self._throughput(batch)
        self.extra = {}
        self.file.append(row)
        self._track(row)
        self.bar.set_postfix_str(
            f"reward {row['reward/mean']:.3f}, length {row['length/response_mean']:.1f}", refresh=False
        )
        self.bar.update()
        return row

    def evaluated(
        self, metrics: dict[str, float], iteration: int, policy_version: int, seconds: float
    ) -> None:
        """A row of its own for an evaluation; its seconds count in no optimizer step's throughput."""
        row: dict[str, Any] = {"optimizer_step": self.optimizer_step, "iteration": iteration, **metrics}
        row["policy_version"] = float(policy_version)
        self.file.append(row)
        self._track(row)
        self.evaluation = metrics
        self.since += seconds

    def _track(self, row: dict[str, Any]) -> None:
        if self.tracker is not None:
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            self.tracker.log_metrics(numbers, step=self.optimizer_step)

    def _throughput(self, batch: TensorDictBase) -> dict[str, float]:
        """Seconds per phase and per second figures since the last row; all phases start again at 0.

        `idle/learner` is the share of that time in which the learner had no batch to work on.
        """
        now = time.perf_counter()
        elapsed, self.since = now - self.since, now
        tokens = int(batch["tokens", "response_mask"].sum())
        self.tokens += tokens
        row = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        row["idle/learner"] = self.seconds["collect"] / elapsed
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return row | {
            "throughput/tokens_per_s": tokens / elapsed,
            "throughput/completions_per_s": batch.batch_size[0] / elapsed,
        }

    def sample(self, prompt: str, texts: list[str], rewards: list[float]) -> None:
        """Print one prompt with the best and the worst answer of its group."""
        lines = [f"sample at step {self.optimizer_step}: {_short(prompt)}"]
        for index in dict.fromkeys((rewards.index(max(rewards)), rewards.index(min(rewards)))):
            lines.append(f"  reward {rewards[index]:.2f}: {_short(texts[index])}")
        self.say("\n".join(lines))

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self.bar.write(text, file=sys.stderr)
        log.info(text)

    def close(self, outcome: RunOutcome) -> None:
        """Write `summary.json`, end the tracker."""
        self.bar.close()
        rows = self.file.rows()
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        summary = {
            "outcome": outcome,
            "optimizer_steps": self.optimizer_step,
            "first_reward": rewards[0] if rewards else None,
            "last_reward": rewards[-1] if rewards else None,
            "best_reward": max(rewards, default=None),
            "wall_time_s": round(time.perf_counter() - self.began, 3),
            "response_tokens": self.tokens,
            "evaluation": self.evaluation,
        }
        with written_whole(self.run_dir / "summary.json") as file:
            file.write((json.dumps(summary, indent=2) + "\n").encode())
        steps = f"{self.optimizer_step} optimizer steps, " if rewards else ""
        change = f"reward {rewards[0]} -> {rewards[-1]}; metrics and checkpoints" if rewards else "metrics"
        where = f"{steps}{change} in {self.run_dir}" if rows else "nothing was measured"
        self.say(f"{outcome}: {where}")
        if self.tracker is not None:
            close_tracker(self.tracker, outcome)


def _short(text: str, limit: int = 300) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[:limit]} …"
