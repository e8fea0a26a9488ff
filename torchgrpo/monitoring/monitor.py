"""The monitor of a run: rows of metrics, progress, samples, summary."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from config.run_folder.files import written_whole
from config.run_folder.folders import SUMMARY
from config.schema.errors import RunOutcome
from envs.group import Group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.doctor.doctor import Finding
from torchgrpo.monitoring.events import Events
from torchgrpo.monitoring.ledger import Ledger
from torchgrpo.monitoring.ledger_line import question, token_values
from torchgrpo.monitoring.metrics import rollout_metrics
from torchgrpo.monitoring.metrics_file import MetricsFile
from torchgrpo.monitoring.progress import Progress
from torchgrpo.monitoring.repetition import Repetition
from torchgrpo.monitoring.tracker_interface import ShownCompletion
from torchgrpo.monitoring.tracking import Trackers

log = logging.getLogger("grpo")
"""Goes to `grpo.log` in the run's folder alone (config/base.yaml)."""
LONGEST_TEXT, LONGEST_GOLD = 4000, 200
"""Characters of a sample that are shown."""
SHOWN = 32
"""Completions of a step that a tracker gets, whole groups first."""


class Monitor:
    """Collects timings between two optimizer steps and writes everything out at each.

    Args:
        live: shows how far the run is.
        first_step: steps already done by an earlier part of the run.
        members: of a mixture, its data sets, which have metrics of their own.
        rollouts_gb: that the ledger may take.
    """

    def __init__(
        self,
        run_dir: Path,
        tracker: Trackers | None,
        live: Progress,
        first_step: int = 0,
        members: Sequence[str] = (),
        rollouts_gb: float = 0.0,
    ) -> None:
        self.run_dir = run_dir
        self.tracker = tracker
        self.live = live
        self.members = members
        self.file = MetricsFile(run_dir / "metrics.jsonl")
        self.ledger = Ledger(run_dir, int(rollouts_gb * 1e9), self.say)
        self.events = Events(run_dir, self.say)
        self.repetition = Repetition()
        self.optimizer_step = first_step
        self.iteration = 0
        self.seconds = {"collect": 0.0, "optimize": 0.0, "push": 0.0}
        self.extra: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}
        self.shown: list[ShownCompletion] = []
        self.tokens = 0
        self.began = self.since = time.perf_counter()
        self.seconds_before = 0.0
        self.tokens_before = 0

    def resumed(self) -> None:
        """The run folder holds the rows of an earlier part of the run: its seconds and tokens count."""
        *_, last = [{}, *self.rows()]
        self.seconds_before = float(last.get("time/elapsed_s", 0.0))
        self.tokens_before = int(last.get("tokens/total", 0))

    def rows(self) -> list[dict[str, Any]]:
        """Rows of optimizer steps in the run folder."""
        return [row for row in self.file.rows() if "reward/mean" in row]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block to `time/PHASE_s` of the next row, and shows the phase."""
        self.live.stage(phase)
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.seconds[phase] += seconds
            self.event("phase", name=phase, seconds=seconds)

    def event(self, event: str, **fields: Any) -> None:
        """A line of the run's history, at this optimizer step of this iteration."""
        self.events.tell(event, self.optimizer_step, iteration=self.iteration, **fields)

    def note(self, metrics: dict[str, float]) -> None:
        """Metrics of something that is not an optimizer step (a push): in the next row."""
        self.extra |= metrics

    def optimized(self, rollout: Rollout, step: dict[str, float], policy_version: int) -> dict[str, Any]:
        """Write the row of one optimizer step. policy_version: of the weights before the step."""
        groups = rollout.groups
        self.optimizer_step += 1
        row: dict[str, Any] = {"optimizer_step": self.optimizer_step}
        row |= rollout_metrics(rollout, policy_version, self.members) | step | self.extra
        row |= self.repetition.metrics([one for group in groups for one in group.chain()])
        row |= {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        now = time.perf_counter()
        elapsed, self.since = now - self.since, now
        lengths = [len(one.token_ids) for group in groups for one in group.completions]
        self.tokens += sum(lengths)
        row |= {
            "idle/learner": self.seconds["collect"] / elapsed,
            "throughput/tokens_per_s": sum(lengths) / elapsed,
            "throughput/completions_per_s": len(lengths) / elapsed,
            "time/elapsed_s": self.seconds_before + now - self.began,
            "tokens/total": float(self.tokens_before + self.tokens),
            "time/unix_s": time.time(),
        }
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.extra = {}
        self.file.append(row)
        self._track(row)
        self.live.step(row["reward/mean"], row["length/response_mean"])
        return row

    def learned(self, rollout: Rollout, advantage: Tensor, log_ratio: Tensor, entropy: Tensor) -> None:
        """Tell the ledger what the step that `optimized` wrote made of each group.

        advantage, log_ratio, entropy: as `StepReport`.
        """
        if self.tracker is not None:
            self.shown = shown_completions(rollout, advantage)
        each = token_values(rollout, advantage, log_ratio, entropy)
        for group, values in zip(rollout.groups, each, strict=True):
            self.ledger.learned(group, self.optimizer_step, values, rollout.trained_at)

    def consumed(self, iteration: int, groups: Sequence[Group], stale: Sequence[Group]) -> None:
        """The end of an iteration: its groups go to the ledger. stale: those that were too old for it."""
        self.ledger.consumed(iteration, groups, stale)
        if stale:
            self.event("dropped", groups=len(stale))

    def evaluated(
        self, metrics: dict[str, float], iteration: int, policy_version: int, seconds: float
    ) -> dict[str, Any]:
        """A row of its own for an evaluation; its seconds count in no optimizer step's throughput."""
        row: dict[str, Any] = {"optimizer_step": self.optimizer_step, "iteration": iteration, **metrics}
        row["policy_version"] = float(policy_version)
        row["time/unix_s"] = time.time()
        self.file.append(row)
        self._track(row)
        self.event("phase", name="evaluate", seconds=seconds)
        self.event("evaluated", after=iteration, policy_version=policy_version, metrics=metrics)
        self.evaluation = metrics
        self.since += seconds
        return row

    def _track(self, row: dict[str, Any]) -> None:
        if self.tracker is not None:
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            self.tracker.metrics(numbers, self.optimizer_step)
            self._tell_of_trackers(self.tracker)

    def _tell_of_trackers(self, trackers: Trackers) -> None:
        for line in trackers.told():
            self.say(line)

    def say(self, text: str) -> None:
        """A line above the bar, and in `grpo.log`."""
        self.live.say(text)
        log.info(text)

    def alarm(self, finding: Finding) -> None:
        """Say what the doctor has found, and write an event of it."""
        self.say(finding.line)
        self.event("alarm", rule=finding.rule, severity=finding.severity, text=finding.line)

    def show(self, group: Group) -> None:
        """A question with the best and the worst of its answers; a table of the step's completions to the trackers."""
        self.say(sample_text(self.optimizer_step, group))
        if self.tracker is not None:
            self.tracker.completions(self.shown, self.optimizer_step)

    def close(self, outcome: RunOutcome) -> None:
        """Write `summary.json`; end the ledger and, also where nothing can be written, the trackers."""
        self.live.close()
        try:
            self.ledger.close()
            rows = self.rows()
            rewards = [row["reward/mean"] for row in rows]
            summary = {
                "outcome": outcome,
                "optimizer_steps": self.optimizer_step,
                "first_reward": rewards[0] if rewards else None,
                "last_reward": rewards[-1] if rewards else None,
                "best_reward": max(rewards, default=None),
                "wall_time_s": round(self.seconds_before + time.perf_counter() - self.began, 3),
                "response_tokens": self.tokens_before + self.tokens,
                "evaluation": self.evaluation,
            }
            with written_whole(self.run_dir / SUMMARY) as file:
                file.write((json.dumps(summary, indent=2) + "\n").encode())
            told = "nothing was measured"
            if rewards:
                change = f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"
                if "kl/teacher" in rows[-1]:
                    change += f", kl/teacher {rows[0]['kl/teacher']:.3f} -> {rows[-1]['kl/teacher']:.3f}"
                told = f"{self.optimizer_step} optimizer steps, {change}; "
                told += f"metrics and checkpoints in {self.run_dir}"
            elif self.file.path.exists():  # else the folder may not stay
                told = f"metrics in {self.run_dir}"
            self.say(f"{outcome}: {told}")
            if self.file.path.exists():
                self.event("ended", outcome=outcome)
        finally:
            self.events.close()
            if self.tracker is not None:
                self.tracker.close(outcome)
                self._tell_of_trackers(self.tracker)


def shown_completions(rollout: Rollout, advantage: Tensor) -> list[ShownCompletion]:
    """The first `SHOWN` completions of a credited rollout, for a table.

    advantage: [N, 1] or [N, R], shown as the mean of a completion's tokens in the loss.
    """
    assert rollout.batch.mask is not None
    completions = [(group, one) for group in rollout.groups for one in group.completions][:SHOWN]
    tokens = rollout.batch.mask[: len(completions)]
    worth = advantage[: len(completions)].expand(tokens.shape).where(tokens, 0.0)
    advantages = (worth.sum(1) / tokens.sum(1).clamp(min=1)).tolist()
    return [
        ShownCompletion(
            _short(question(group.example.messages), LONGEST_TEXT),
            _short(one.text, LONGEST_TEXT),
            0.0 if one.verdict is None else one.verdict.score,
            advantage,
        )
        for (group, one), advantage in zip(completions, advantages, strict=True)
    ]


def sample_text(step: int, group: Group) -> str:
    """A question with the best and the worst of its answers, for a person to read."""
    lines = [f"sample at step {step}", _indented(question(group.example.messages), 2)]
    scores = [verdict.score for verdict in group.verdicts]
    judged = [index for index, verdict in enumerate(group.verdicts) if verdict.judged] or range(len(scores))
    best, worst = (choose(judged, key=scores.__getitem__) for choose in (max, min))
    gold = _short(" ".join(str(group.example.answer).split()), LONGEST_GOLD)
    for index in dict.fromkeys((best, worst)):
        one, verdict = group.completions[index], group.verdicts[index]
        parts = ", ".join(f"{name} {value:.3g}" for name, value in verdict.parts.items())
        outcome = "" if verdict.outcome == "scored" else f", {verdict.outcome}"
        lines += [
            f"  reward {verdict.score:.2f}{f' ({parts})' if parts else ''}{outcome}, {one.num_drawn} tokens, "
            f"{one.finish_reason}; gold {gold}",
            _indented(one.text, 4),
        ]
    return "\n".join(lines)


def _indented(text: str, width: int) -> str:
    return "\n".join(" " * width + line for line in _short(text, LONGEST_TEXT).splitlines() or [""])


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."
