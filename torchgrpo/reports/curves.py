"""Curves of a run: layout of the charts, units, and values of the metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torchgrpo.monitoring.metric_table import meaning_of, pattern_of
from torchgrpo.reports.run_folder import Row

MAX_POINTS = 2000
"""Maximum points of a curve; a point of a longer run is a mean of several steps."""
_METRICS_WITHOUT_CURVE = ("optimizer_step", "iteration", "age/histogram/*")


@dataclass(frozen=True)
class Chart:
    """One chart with a line for each logged metric.

    metrics: names or patterns of metrics. unit: unit of the y axis.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""


class Section:
    """Section of related charts. how_to_read: explanation for the reader, one sentence."""

    def __init__(self, title: str, how_to_read: str, *charts: Chart) -> None:
        self.title, self.how_to_read, self.charts = title, how_to_read, charts


SECTIONS = (
    Section(
        "Learning",
        "Reward and evaluation should rise together; if only the reward rises, suspect reward hacking or overfitting.",
        Chart("Reward", ("reward/mean",), "mean per completion"),
        Chart("Evaluation, pass@1", ("eval/*/pass@1",), "share of problems"),
        Chart("Reward components", ("reward/COMPONENT",), "mean"),
        Chart("Groups with equal rewards", ("reward/zero_variance_groups",), "share, no gradient"),
    ),
    Section(
        "Distance",
        "Distance of the policy to the reference or teacher, to the policy that sampled the tokens, and within a step.",
        Chart("KL", ("kl/ref", "kl/teacher", "kl/inference"), "nats per token"),
        Chart("Importance ratio", ("ratio/mean", "ratio/max"), "ratio"),
        Chart("Clip fraction", ("loss/clip_fraction_low", "loss/clip_fraction_high"), "share of tokens"),
        Chart("Effective sample size", ("ess", "ess/age_*"), "1 = on-policy"),
    ),
    Section(
        "Text",
        "Entropy near zero ends exploration; many truncated completions mean that the token limit is too low.",
        Chart("Entropy", ("entropy",), "nats per token"),
        Chart("Length", ("length/response_mean", "length/response_max"), "tokens"),
        Chart("Truncated", ("length/truncated",), "share of completions"),
        Chart("Without a score", ("reward/errors", "reward/invalid", "reward/control_tokens"), "share"),
    ),
    Section(
        "Episodes",
        "Turns in an environment. Deadlines, errors and malformed calls should be rare; several sequences of an "
        "episode cost time.",
        Chart("Turns", ("turns/mean", "turns/max"), "per episode"),
        Chart("Reward by turn", ("reward/turn/K",), "mean per turn"),
        Chart("Ends", ("agent/end/*",), "share of episodes"),
        Chart("Seconds", ("agent/seconds/*",), "per episode"),
        Chart("Tool calls", ("tools/calls",), "per episode"),
        Chart("Failed tool calls", ("tools/*",), "share of calls"),
        Chart("Sequences", ("agent/sequences",), "per episode"),
        Chart("Unfinished episodes", ("episodes/alive",), "episodes"),
    ),
    Section(
        "Curriculum",
        "A level opens when the success rate of the newest level passes the gate; replayed prompts should stay solved.",
        Chart("Newest open level", ("curriculum/level", "curriculum/level/*"), "1 = easiest"),
        Chart("Success by level or source", ("curriculum/success/*",), "success rate, newest groups"),
        Chart("Weights of the sources", ("curriculum/weight/*",), "share of sampled prompts"),
        Chart("Replayed solved prompts", ("curriculum/replay", "curriculum/replay/*"), "success rate"),
    ),
    Section(
        "Optimisation",
        "A growing gradient norm or a jump of the loss precedes most collapses.",
        Chart("Loss", ("loss/objective", "loss/kl", "loss/entropy"), "weighted terms"),
        Chart("Gradient norm", ("grad_norm",), "before clipping"),
        Chart("Learning rate", ("lr",), ""),
        Chart("Advantage", ("advantage/mean", "advantage/std"), "from rewards"),
        Chart("Advantage from the teacher", ("distill/mean", "distill/abs_mean"), "nats per token"),
    ),
    Section(
        "Freshness",
        "Age: policy versions between sampling a token and training on it. At age 0 engine and trainer should agree.",
        Chart("Age", ("age/mean", "age/max"), "versions"),
        Chart("Engine against trainer", ("logprob_diff/p50", "logprob_diff/p99"), "nats per token"),
        Chart("Completions in the loss", ("sample_utilization",), "share of generated completions"),
        Chart("Groups", ("groups/generated", "groups/in_flight", "groups/ready", "groups/dropped_stale"), "groups"),
    ),
    Section(
        "Speed",
        "Seconds of each phase, and throughput; the idle shares show which side waits.",
        Chart("Throughput", ("throughput/tokens_per_s",), "tokens per second"),
        Chart("Phases", ("time/collect_s", "time/optimize_s", "time/push_s"), "seconds per step"),
        Chart("Idle", ("idle/*",), "share of the time"),
        Chart("Reward latency", ("reward_latency/p50_s", "reward_latency/p99_s"), "seconds per completion"),
        Chart("Judge and reward model", ("judge/seconds", "reward_model/seconds"), "seconds per request or batch"),
    ),
)


def chart_layout(names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the sections of charts for these metrics.

    Charts without a metric are left out. Metrics that no chart names form the last section.
    """
    remaining = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in _METRICS_WITHOUT_CURVE)]
    sections: list[dict[str, Any]] = []
    for section in SECTIONS:
        charts = []
        for chart in section.charts:
            matching = [
                name
                for name in remaining
                if any(each == pattern_of(name) or fnmatchcase(name, each) for each in chart.metrics)
            ]
            remaining = [name for name in remaining if name not in matching]
            if matching:
                charts.append(_chart_data(chart.title, chart.unit, matching))
        if charts:
            sections.append({"title": section.title, "how": section.how_to_read, "charts": charts})
    remaining = [name for name in remaining if not name.startswith("eval/")]
    charts = [_chart_data(name, "", [name]) for name in remaining]
    how = "All other metrics, one chart each, by their names in metrics.jsonl."
    if charts:
        sections.append({"title": "Other metrics", "how": how, "charts": charts, "folded": True})
    return sections


def _chart_data(title: str, unit: str, metrics: list[str]) -> dict[str, Any]:
    """Returns the data of a chart.

    "about": meaning of each metric, which the page shows as a tooltip.
    """
    about = {each: meaning_of(each) for each in metrics}
    return {"title": title, "unit": unit, "metrics": metrics, "about": about}


def curve_data(steps: Sequence[Row], evaluations: Sequence[Row], points: int = MAX_POINTS) -> dict[str, Any]:
    """Returns the values of all curves.

    The keys are "stride", "x": {"step", "seconds", "tokens"}, "series": {name: values} and
    "eval": {name: [[step, value], ...]}. "x" and "series" have at most `points` points, each the mean of the
    finite values of "stride" optimizer steps. "eval" has every finite value of an evaluation.
    """
    stride = max(1, -(-len(steps) // points))
    names = sorted({name for row in steps for name, value in row.items() if _is_number(value)})
    series = {name: _mean_in_strides([row.get(name) for row in steps], stride) for name in names}
    empty = [None] * len(series.get("optimizer_step", []))
    evaluation_series: dict[str, list[list[float]]] = {}
    for row in evaluations:
        for name, value in row.items():
            if name.startswith("eval/") and _is_number(value) and math.isfinite(value):
                evaluation_series.setdefault(name, []).append([row["optimizer_step"], round_number(value)])
    x = {
        "step": series.get("optimizer_step", []),
        "seconds": series.get("time/elapsed_s", empty),
        "tokens": series.get("tokens/total", empty),
    }
    for name in ("optimizer_step", "iteration", "time/unix_s"):
        series.pop(name, None)
    return {"stride": stride, "x": x, "series": series, "eval": evaluation_series}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean_in_strides(values: Sequence[float | None], stride: int) -> list[float | None]:
    """Returns means of `stride` values each; None if none of the values is finite."""
    means: list[float | None] = []
    for start in range(0, len(values), stride):
        finite = [value for value in values[start : start + stride] if value is not None and math.isfinite(value)]
        means.append(round_number(sum(finite) / len(finite)) if finite else None)
    return means


def round_number(value: float) -> float:
    """Rounds to five significant digits; whole numbers become integers."""
    short = float(f"{value:.5g}")
    return int(short) if abs(short) < 1e15 and short == int(short) else short
