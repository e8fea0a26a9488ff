"""Timeline of a run: busy intervals of engines, rewards and learner, and event marks."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchgrpo.monitoring.events import learner_title
from torchgrpo.reports.curves import round_number
from torchgrpo.reports.ledger_columns import Columns
from torchgrpo.reports.run_folder import RunFolder

MAX_SEGMENTS = 8000
"""Maximum segments of a row, or of all engine rows together.

A longer run is divided into that many equal intervals; each has its busy time at its start.
"""
MIN_ENGINE_SEGMENTS = 1000
"""Minimum of the maximum number of segments of an engine row."""
MAX_ENGINE_ROWS = 16
"""Maximum number of engines with a row each; more engines share one row."""
PHASE_ROWS = (
    ("score", "rewards: score", "completions of a group are being scored"),
    ("collect", "{learner}: collect", "the learner waits for a batch"),
    ("optimize", "{learner}: optimize", "advantages, forward, backward, optimizer"),
    ("push", "weights: push", "weights are sent to the engines"),
    ("evaluate", "engines: evaluate", "evaluation sets are sampled and scored"),
    ("checkpoint", "disk: checkpoint", "the run waits for a checkpoint"),
)
"""Rows after those of the engines: key, title, meaning of a busy interval."""


@dataclass(frozen=True)
class TimelineRow:
    """Row of the timeline with its busy intervals.

    spans: [n, 2], start and end of each interval in seconds since 1970. max_segments: maximum number of segments.
    """

    key: str
    title: str
    meaning: str
    spans: np.ndarray
    max_segments: int = MAX_SEGMENTS

    def page_data(self, start_time: float, length: float) -> dict[str, Any]:
        """Returns the data of the row for the page.

        start_time: start of the run. length: seconds of the run.
        """
        busy = merge_intervals(self.spans)
        segments = limit_segments(busy - start_time, length, self.max_segments)
        return {
            "key": self.key,
            "title": self.title,
            "meaning": self.meaning,
            "segments": [round(float(value), 4) for value in segments.ravel()],
            "seconds": round_number(float((busy[:, 1] - busy[:, 0]).sum())),
            "count": len(self.spans),
        }


def timeline_data(run: RunFolder, columns: Columns) -> dict[str, Any] | None:
    """Returns the data of the timeline, or None if no times are known.

    The keys are "start_time", "seconds", "rows": [{"key", "title", "meaning", "segments", "seconds", "count"}].
    The rows are those of the engines, then `PHASE_ROWS`. segments: start, length, start, ... in seconds since
    the first interval.
    """
    rows = [*_engine_rows(columns)]
    scoring_spans = np.stack([columns.groups["sampled_at"], columns.groups["scored_at"]], axis=1)
    learner = learner_title(run.events)
    for key, title, meaning in PHASE_ROWS:
        events = [event for event in run.events if event["event"] == "phase" and event["name"] == key]
        phases = [(event["time"] - event["seconds"], event["time"]) for event in events]
        spans = scoring_spans if key == "score" else np.array(phases, dtype=np.float64).reshape(-1, 2)
        rows.append(TimelineRow(key, title.format(learner=learner), meaning, spans))
    rows = [row for row in rows if len(row.spans)]
    if not rows:
        return None
    start_time = min(float(row.spans[:, 0].min()) for row in rows)
    length = max(float(row.spans[:, 1].max()) for row in rows) - start_time
    return {
        "start_time": start_time,
        "seconds": round_number(length),
        "rows": [row.page_data(start_time, length) for row in rows],
    }


def _engine_rows(columns: Columns) -> Iterator[TimelineRow]:
    """Yields the rows of the engines, with their groups of training and evaluation.

    A group that several engines sampled counts for each of them.
    """
    spans = np.stack([columns.groups["started_at"], columns.groups["sampled_at"]], axis=1)
    names = {name for engine_set in columns.engine_sets for name in engine_set}
    engines = sorted(names, key=lambda name: (len(name), name))  # engine 2 before engine 10
    meaning = "a group is being sampled, with its environments or agents"
    if len(engines) > MAX_ENGINE_ROWS:
        yield TimelineRow("generate", f"{len(engines)} engines", meaning, spans)
        return
    for engine in engines:
        indices = [index for index, engine_set in enumerate(columns.engine_sets) if engine in engine_set]
        engine_spans = spans[np.isin(columns.groups["engine_set"], indices)]
        max_segments = max(MAX_SEGMENTS // len(engines), MIN_ENGINE_SEGMENTS)
        yield TimelineRow("generate", engine, meaning, engine_spans, max_segments)


def limit_segments(intervals: np.ndarray, length: float, max_segments: int) -> np.ndarray:
    """Returns starts and lengths of at most `max_segments` segments: [n, 2].

    intervals: [n, 2], sorted, disjoint and within 0..length. If there are too many intervals, `length` is
    divided into equal segments. The busy time of each segment is exact, its position within the segment is not.
    """
    if len(intervals) <= max_segments:
        return np.stack([intervals[:, 0], intervals[:, 1] - intervals[:, 0]], axis=1)
    edges = np.linspace(0.0, length, max_segments + 1)
    busy_time = np.concatenate(([0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])))
    busy_before_edge = np.interp(edges, intervals.ravel(), np.stack([busy_time[:-1], busy_time[1:]], axis=1).ravel())
    return np.stack([edges[:-1], np.diff(busy_before_edge)], axis=1)


def merge_intervals(spans: np.ndarray) -> np.ndarray:
    """Merges touching and overlapping intervals [n, 2]; returns them sorted."""
    if not len(spans):
        return spans
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 1])
    gap_indices = np.flatnonzero(ordered[1:, 0] > ends[:-1]) + 1
    first = np.concatenate(([0], gap_indices))
    last = np.concatenate((gap_indices - 1, [len(ordered) - 1]))
    return np.stack([ordered[first, 0], ends[last]], axis=1)


_EVENT_TEXTS = {
    "resume": "resumed from {source}",
    "weight_push": "weights pushed, version {version}",
    "evaluation": "evaluation",
    "skipped_step": "step skipped: loss or gradient not finite",
    "checkpoint": "checkpoint",
    "alarm": "{text}",
    "restart": "restarted: {text}",
    "stale_groups": "{groups} stale groups dropped",
}


def event_marks(run: RunFolder) -> list[dict[str, Any]]:
    """Returns the events that the curves mark: {"kind", "step", "text"}."""
    marks = []
    for event in run.events:
        template = _EVENT_TEXTS.get(event["event"])
        if template is not None:
            text = template.format_map(defaultdict(lambda: "?", event))  # "?" for missing fields
            marks.append({"kind": event["event"], "step": event["optimizer_step"], "text": text})
    return marks
