"""The curves of a run: which metrics stand together, in which unit, and the values themselves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torchgrpo.monitoring.metric_table import meaning_of, pattern_of
from torchgrpo.reports.run_folder import Row

MOST_POINTS = 2000
"""Of a curve; a longer run shows means of equally many steps each."""
_NO_CURVES = ("optimizer_step", "iteration", "age/histogram/*")


@dataclass(frozen=True)
class Chart:
    """One picture. metrics: names or patterns, each that is logged is a line. unit: of the y axis."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""


class Section:
    """Charts that answer one question. how_to_read: one sentence."""

    def __init__(self, title: str, how_to_read: str, *charts: Chart) -> None:
        self.title, self.how_to_read, self.charts = title, how_to_read, charts


SECTIONS = (
    Section(
        "Learning",
        "Reward and evaluation should rise together; where only the reward rises, it is being gamed or overfitted.",
        Chart("Reward", ("reward/mean",), "mean of a completion"),
        Chart("Evaluation, pass@1", ("eval/*/pass@1",), "share of problems"),
        Chart("Parts of the reward", ("reward/PART",), "mean"),
        Chart("Groups with equal rewards", ("reward/zero_variance_groups",), "share, teach nothing"),
    ),
    Section(
        "Distance",
        "How far the policy is: from reference or teacher, from the policy that drew the tokens, and within one step.",
        Chart("KL", ("kl/ref", "kl/teacher", "kl/inference"), "nats a token"),
        Chart("Importance ratio", ("ratio/mean", "ratio/max"), "ratio"),
        Chart("Clipped", ("loss/clip_fraction_low", "loss/clip_fraction_high"), "share of tokens"),
        Chart("Effective sample size", ("ess", "ess/age_*"), "1 = on-policy"),
    ),
    Section(
        "Text",
        "Entropy near zero ends exploration; truncated completions mean that the limit of tokens is too low.",
        Chart("Entropy", ("entropy",), "nats a token"),
        Chart("Length", ("length/response_mean", "length/response_max"), "tokens"),
        Chart("Truncated", ("length/truncated",), "share of completions"),
        Chart("Could not be judged", ("reward/errors", "reward/invalid", "reward/control_tokens"), "share"),
    ),
    Section(
        "Curriculum",
        "A level opens when the success of the newest one passes the gate; solved prompts that are asked again should "
        "stay solved.",
        Chart("Newest open level", ("curriculum/level", "curriculum/level/*"), "1 = easiest"),
        Chart("Success by level or source", ("curriculum/success/*",), "newest groups"),
        Chart("Weights of the sources", ("curriculum/weight/*",), "share of the draws"),
        Chart("Solved prompts asked again", ("curriculum/replay", "curriculum/replay/*"), "success"),
    ),
    Section(
        "Optimisation",
        "A gradient norm that grows from step to step, or a loss that leaps, comes before most collapses.",
        Chart("Loss", ("loss/objective", "loss/kl", "loss/entropy"), "weighted terms"),
        Chart("Gradient norm", ("grad_norm",), "before clipping"),
        Chart("Learning rate", ("lr",), ""),
        Chart("Advantage", ("advantage/mean", "advantage/std"), "of the reward's"),
        Chart("Advantage by the teacher", ("distill/mean", "distill/size"), "nats a token"),
    ),
    Section(
        "Freshness",
        "Age counts policy versions between drawing a token and training on it; at age 0 engine and trainer agree.",
        Chart("Age", ("age/mean", "age/max"), "versions"),
        Chart("Engine against trainer", ("mismatch/p50", "mismatch/p99"), "nats a token"),
        Chart("Used of what was generated", ("sample_utilization",), "share of completions"),
        Chart(
            "Groups",
            ("groups/generated", "groups/in_flight", "groups/ready", "groups/dropped_stale"),
            "groups",
        ),
    ),
    Section(
        "Speed",
        "Seconds of each phase and what came out of them; the part that is idle shows which side waits.",
        Chart("Throughput", ("throughput/tokens_per_s",), "tokens a second"),
        Chart("Phases", ("time/collect_s", "time/optimize_s", "time/push_s"), "seconds a step"),
        Chart("Idle", ("idle/*",), "share of the time"),
        Chart("Judging", ("reward_latency/p50_s", "reward_latency/p99_s"), "seconds a completion"),
    ),
)


def layout(names: Sequence[str]) -> list[dict[str, Any]]:
    """The sections for these metrics: charts without any of them are left out, and what no chart names comes last."""
    left = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in _NO_CURVES)]
    sections: list[dict[str, Any]] = []
    for section in SECTIONS:
        charts = []
        for chart in section.charts:
            mine = [
                name
                for name in left
                if any(each == pattern_of(name) or fnmatchcase(name, each) for each in chart.metrics)
            ]
            left = [name for name in left if name not in mine]
            if mine:
                charts.append(_chart(chart.title, chart.unit, mine))
        if charts:
            sections.append({"title": section.title, "how": section.how_to_read, "charts": charts})
    left = [name for name in left if not name.startswith("eval/")]
    rest = [_chart(name, "", [name]) for name in left]
    how = "Everything else that was logged, one metric a picture, by its name in metrics.jsonl."
    if rest:
        sections.append({"title": "Other metrics", "how": how, "charts": rest, "folded": True})
    return sections


def _chart(title: str, unit: str, metrics: list[str]) -> dict[str, Any]:
    """about: the meaning of each metric, which the page shows where a pointer rests on its name."""
    about = {each: meaning_of(each) for each in metrics}
    return {"title": title, "unit": unit, "metrics": metrics, "about": about}


def curves(steps: Sequence[Row], evaluations: Sequence[Row], points: int = MOST_POINTS) -> dict[str, Any]:
    """{"stride", "x": {"step", "seconds", "tokens"}, "series": {name: values}, "eval": {name: [[step, value], ...]}}.

    points: of a curve at most. stride: optimizer steps that a point is the mean of.
    """
    stride = max(1, -(-len(steps) // points))
    names = sorted({name for row in steps for name, value in row.items() if _is_number(value)})
    series = {name: _thinned([row.get(name) for row in steps], stride) for name in names}
    empty = [None] * len(series.get("optimizer_step", []))
    evaluated: dict[str, list[list[float]]] = {}
    for row in evaluations:
        for name, value in row.items():
            if name.startswith("eval/") and _is_number(value) and math.isfinite(value):
                evaluated.setdefault(name, []).append([row["optimizer_step"], rounded(value)])
    x = {
        "step": series.get("optimizer_step", []),
        "seconds": series.get("time/elapsed_s", empty),
        "tokens": series.get("tokens/total", empty),
    }
    for name in ("optimizer_step", "iteration", "time/unix_s"):
        series.pop(name, None)
    return {"stride": stride, "x": x, "series": series, "eval": evaluated}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _thinned(values: Sequence[float | None], stride: int) -> list[float | None]:
    """Means of `stride` values each; None where none of them is finite."""
    means: list[float | None] = []
    for start in range(0, len(values), stride):
        finite = [
            value for value in values[start : start + stride] if value is not None and math.isfinite(value)
        ]
        means.append(rounded(sum(finite) / len(finite)) if finite else None)
    return means


def rounded(value: float) -> float:
    short = float(f"{value:.5g}")
    return int(short) if abs(short) < 1e15 and short == int(short) else short
