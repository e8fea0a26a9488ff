"""Monitor of a run: writes metrics, events, printed samples and the summary."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from config.run_folder.atomic_files import atomic_file
from config.run_folder.folders import SUMMARY
from config.schema.errors import RunOutcome
from envs.group import Group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.diagnostics.diagnostics import Finding
from torchgrpo.monitoring.episode_text import format_turns
from torchgrpo.monitoring.events import Events
from torchgrpo.monitoring.ledger import Ledger
from torchgrpo.monitoring.ledger_record import format_question, token_values
from torchgrpo.monitoring.metrics import rollout_metrics
from torchgrpo.monitoring.metrics_file import MetricsFile
from torchgrpo.monitoring.progress import Progress
from torchgrpo.monitoring.repetition import Repetition
from torchgrpo.monitoring.rows_by_completion import mean_advantages
from torchgrpo.monitoring.tracker_interface import CompletionRow
from torchgrpo.monitoring.tracker_threads import Trackers

log = logging.getLogger("grpo")
"""Logger of `grpo.log` in the run's folder (config/base.yaml)."""
LONGEST_TEXT, LONGEST_REFERENCE = 4000, 200
"""Maximum characters of a printed text, and of a printed reference answer."""
TRACKED_COMPLETIONS = 32
"""Maximum completions of an optimizer step in the table that trackers get."""


class Monitor:
    """Collects timings between optimizer steps and writes a row of metrics at each step.

    Args:
        trackers: services that get a copy of the metrics; None: no service.
        progress: progress display of the run.
        first_step: number of optimizer steps that a resumed run has already done.
        members: names of the data sets of a mixture; each has metrics of its own.
        rollouts_gb: maximum size of the ledger in GB.
    """

    def __init__(
        self,
        run_dir: Path,
        trackers: Trackers | None,
        progress: Progress,
        first_step: int = 0,
        members: Sequence[str] = (),
        rollouts_gb: float = 0.0,
    ) -> None:
        self.run_dir = run_dir
        self.trackers = trackers
        self.progress = progress
        self.members = members
        self.metrics_file = MetricsFile(run_dir / "metrics.jsonl")
        self.ledger = Ledger(run_dir, int(rollouts_gb * 1e9), self.log)
        self.events = Events(run_dir, self.log)
        self.repetition = Repetition()
        self.optimizer_step = first_step
        self.iteration = 0
        self.seconds = {"collect": 0.0, "optimize": 0.0, "push": 0.0}
        self.extra_metrics: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}
        self.completion_rows: list[CompletionRow] = []
        self.tokens = 0
        self.start_time = self.step_start_time = time.perf_counter()
        self.seconds_before = 0.0
        self.tokens_before = 0

    def load_totals(self) -> None:
        """Adds the seconds and tokens before a resume to the totals."""
        *_, last = [{}, *self.step_rows()]
        self.seconds_before = float(last.get("time/elapsed_s", 0.0))
        self.tokens_before = int(last.get("tokens/total", 0))

    def step_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of optimizer steps in the run folder."""
        return [row for row in self.metrics_file.read_rows() if "reward/mean" in row]

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Shows the phase and adds the seconds of the block to its `time/PHASE_s`."""
        self.progress.set_stage(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[phase] += seconds
            self.log_event("phase", name=phase, seconds=seconds)

    def log_event(self, event: str, **fields: Any) -> None:
        """Writes an event with the present optimizer step and iteration to `events.jsonl`."""
        self.events.append(event, self.optimizer_step, iteration=self.iteration, **fields)

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Adds metrics, for example of a weight push, to the next row."""
        self.extra_metrics |= metrics

    def write_step_row(self, rollout: Rollout, step_metrics: dict[str, float], policy_version: int) -> dict[str, Any]:
        """Writes and returns the row of metrics of one optimizer step.

        policy_version: version of the weights before the step.
        """
        groups = rollout.groups
        self.optimizer_step += 1
        row: dict[str, Any] = {"optimizer_step": self.optimizer_step}
        row |= rollout_metrics(rollout, policy_version, self.members) | step_metrics | self.extra_metrics
        row |= self.repetition.metrics([one for group in groups for one in group.replacement_chain()])
        row |= {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        now = time.perf_counter()
        elapsed, self.step_start_time = now - self.step_start_time, now
        lengths = [len(one.token_ids) for group in groups for one in group.completions]
        self.tokens += sum(lengths)
        row |= {
            "idle/learner": self.seconds["collect"] / elapsed,
            "throughput/tokens_per_s": sum(lengths) / elapsed,
            "throughput/completions_per_s": len(lengths) / elapsed,
            "time/elapsed_s": self.seconds_before + now - self.start_time,
            "tokens/total": float(self.tokens_before + self.tokens),
            "time/unix_s": time.time(),
        }
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.extra_metrics = {}
        self.metrics_file.append(row)
        self._send_to_trackers(row)
        self.progress.count_step(row["reward/mean"], row["length/response_mean"])
        return row

    def record_token_values(self, rollout: Rollout, advantage: Tensor, log_ratio: Tensor, entropy: Tensor) -> None:
        """Records advantages, log-ratios and entropies of the newest optimizer step in the ledger.

        advantage, log_ratio, entropy: as in `StepReport`.
        """
        if self.trackers is not None:
            self.completion_rows = completion_rows(rollout, advantage)
        values_of_groups = token_values(rollout, advantage, log_ratio, entropy)
        for group, values in zip(rollout.groups, values_of_groups, strict=True):
            self.ledger.record_training(group, self.optimizer_step, values, rollout.trained_at)

    def finish_iteration(self, iteration: int, groups: Sequence[Group], stale_groups: Sequence[Group]) -> None:
        """Writes the groups of an iteration to the ledger.

        stale_groups: groups that were dropped because they were too old.
        """
        self.ledger.write_iteration(iteration, groups, stale_groups)
        if stale_groups:
            self.log_event("stale_groups", groups=len(stale_groups))

    def write_evaluation_row(
        self, metrics: dict[str, float], iteration: int, policy_version: int, seconds: float
    ) -> dict[str, Any]:
        """Writes and returns the row of an evaluation.

        The seconds of an evaluation do not count in the throughput of an optimizer step.
        """
        row: dict[str, Any] = {"optimizer_step": self.optimizer_step, "iteration": iteration, **metrics}
        row["policy_version"] = float(policy_version)
        row["time/unix_s"] = time.time()
        self.metrics_file.append(row)
        self._send_to_trackers(row)
        self.log_event("phase", name="evaluate", seconds=seconds)
        self.log_event("evaluation", after=iteration, policy_version=policy_version, metrics=metrics)
        self.evaluation = metrics
        self.step_start_time += seconds
        return row

    def _send_to_trackers(self, row: dict[str, Any]) -> None:
        if self.trackers is not None:
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            self.trackers.metrics(numbers, self.optimizer_step)
            self._log_tracker_messages(self.trackers)

    def _log_tracker_messages(self, trackers: Trackers) -> None:
        for line in trackers.take_messages():
            self.log(line)

    def log(self, text: str) -> None:
        """Prints a text above the progress bar and writes it to `grpo.log`."""
        self.progress.print_text(text)
        log.info(text)

    def log_finding(self, finding: Finding) -> None:
        """Logs a finding of the diagnostics and writes it as an event."""
        self.log(finding.line)
        self.log_event("alarm", rule=finding.rule, severity=finding.severity, text=finding.line)

    def log_sample(self, group: Group) -> None:
        """Logs a sample of a group and sends the table of completions to the trackers."""
        self.log(format_sample(self.optimizer_step, group))
        if self.trackers is not None:
            self.trackers.completions(self.completion_rows, self.optimizer_step)

    def close(self, outcome: RunOutcome) -> None:
        """Writes `summary.json` and closes the ledger, the events and the trackers.

        The trackers are closed even if the run's folder cannot be written.
        """
        self.progress.close()
        try:
            self.ledger.close()
            rows = self.step_rows()
            rewards = [row["reward/mean"] for row in rows]
            summary = {
                "outcome": outcome,
                "optimizer_steps": self.optimizer_step,
                "first_reward": rewards[0] if rewards else None,
                "last_reward": rewards[-1] if rewards else None,
                "best_reward": max(rewards, default=None),
                "wall_time_s": round(self.seconds_before + time.perf_counter() - self.start_time, 3),
                "response_tokens": self.tokens_before + self.tokens,
                "evaluation": self.evaluation,
            }
            with atomic_file(self.run_dir / SUMMARY) as file:
                file.write((json.dumps(summary, indent=2) + "\n").encode())
            result = "nothing was measured"
            if rewards:
                change = f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"
                if "kl/teacher" in rows[-1]:
                    change += f", kl/teacher {rows[0]['kl/teacher']:.3f} -> {rows[-1]['kl/teacher']:.3f}"
                result = f"{self.optimizer_step} optimizer steps, {change}; "
                result += f"metrics and checkpoints in {self.run_dir}"
            elif self.metrics_file.path.exists():  # without metrics the folder may be removed
                result = f"metrics in {self.run_dir}"
            self.log(f"{outcome}: {result}")
            if self.metrics_file.path.exists():
                self.log_event("end", outcome=outcome)
        finally:
            self.events.close()
            if self.trackers is not None:
                self.trackers.close(outcome)
                self._log_tracker_messages(self.trackers)


def completion_rows(rollout: Rollout, advantage: Tensor) -> list[CompletionRow]:
    """Returns the first `TRACKED_COMPLETIONS` completions of a rollout as rows of a table.

    advantage: [N, 1] or [N, R]. A row has the mean advantage of the completion's tokens in the loss.
    """
    assert rollout.batch.mask is not None
    completions = [(group, one) for group in rollout.groups for one in group.completions][:TRACKED_COMPLETIONS]
    rows = slice(sum(one.num_sequences for _, one in completions))
    advantages = mean_advantages([one for _, one in completions], advantage[rows], rollout.batch.mask[rows])
    return [
        CompletionRow(
            _short(format_question(group.example.messages), LONGEST_TEXT),
            _short(one.text, LONGEST_TEXT),
            0.0 if one.verdict is None else one.verdict.score,
            advantage,
        )
        for (group, one), advantage in zip(completions, advantages, strict=True)
    ]


def format_sample(step: int, group: Group) -> str:
    """Returns a prompt with its best and worst completion as text."""
    lines = [f"sample at step {step}", _indent(format_question(group.example.messages), 2)]
    scores = [verdict.score for verdict in group.verdicts]
    scored = [index for index, verdict in enumerate(group.verdicts) if verdict.has_score] or range(len(scores))
    best, worst = (choose(scored, key=scores.__getitem__) for choose in (max, min))
    reference = _short(" ".join(str(group.example.answer).split()), LONGEST_REFERENCE)
    for index in dict.fromkeys((best, worst)):
        one, verdict = group.completions[index], group.verdicts[index]
        components = ", ".join(f"{name} {value:.3g}" for name, value in verdict.components.items())
        outcome = "" if verdict.outcome == "scored" else f", {verdict.outcome}"
        lines += [
            f"  reward {verdict.score:.2f}{f' ({components})' if components else ''}{outcome}, "
            f"{one.num_sampled_tokens} tokens, {one.finish_reason}; reference answer {reference}",
        ]
        if one.turns:
            lines += format_turns(one.turns, one.sequence_starts, lambda text, width: [_indent(text, width + 4)])
        else:
            lines.append(_indent(one.text, 4))
        lines += [_indent(f"error: {one.error}", 4)] if one.error else []
    return "\n".join(lines)


def _indent(text: str, width: int) -> str:
    return "\n".join(" " * width + line for line in _short(text, LONGEST_TEXT).splitlines() or [""])


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."
