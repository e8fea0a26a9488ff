"""Where the time went: when each side of a run was at work, the share of each phase, and what happened when."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchgrpo.monitoring.events import learner_of
from torchgrpo.reports.columns import Columns
from torchgrpo.reports.curves import rounded
from torchgrpo.reports.run_folder import RunFolder

MOST_SEGMENTS = 8000
"""Of a lane, or of all engines together. Of a longer run there are so many equal stretches, each with its share of work
at its start."""
LEAST_SEGMENTS = 1000
"""Of an engine."""
MOST_ENGINES = 16
"""That have lanes of their own; more share one."""
LANES = (
    ("score", "rewards: score", "a completion of a drawn group is being judged"),
    ("collect", "{learner}: collect", "the learner has no batch yet"),
    ("optimize", "{learner}: learn", "advantages, forward, backward, optimizer"),
    ("push", "weights: push", "weights travel to the engines"),
    ("evaluate", "engines: evaluate", "held-out sets"),
    ("checkpoint", "disk: checkpoint", "the run waits for a checkpoint"),
)
"""Key, title, what being at work means."""


@dataclass(frozen=True)
class Lane:
    """One row of the timeline. spans: [n, 2], start and end of each time at work, in seconds since 1970."""

    key: str
    title: str
    meaning: str
    spans: np.ndarray
    most: int = MOST_SEGMENTS

    def drawn(self, begun: float, length: float) -> dict[str, Any]:
        """For the page. begun: of the run. length: seconds of it."""
        united = union(self.spans)
        segments = drawn_segments(united - begun, length, self.most)
        return {
            "key": self.key,
            "title": self.title,
            "meaning": self.meaning,
            "segments": [round(float(value), 4) for value in segments.ravel()],
            "seconds": rounded(float((united[:, 1] - united[:, 0]).sum())),
            "count": len(self.spans),
        }


def timeline(run: RunFolder, columns: Columns) -> dict[str, Any] | None:
    """{"begun", "seconds", "lanes": [{"key", "title", "meaning", "segments", "seconds", "count"}]}.

    There is a lane for each engine, then those of `LANES`. segments: start, length, start, ... in seconds since the
    first thing that is known of the run. None where no times are known.
    """
    lanes = [*_engines(columns)]
    judged = np.stack([columns.groups["drawn"], columns.groups["judged"]], axis=1)
    learner = learner_of(run.events)
    for key, title, meaning in LANES:
        mine = [event for event in run.events if event["event"] == "phase" and event["name"] == key]
        phases = [(event["time"] - event["seconds"], event["time"]) for event in mine]
        spans = judged if key == "score" else np.array(phases, dtype=np.float64).reshape(-1, 2)
        lanes.append(Lane(key, title.format(learner=learner), meaning, spans))
    lanes = [lane for lane in lanes if len(lane.spans)]
    if not lanes:
        return None
    begun = min(float(lane.spans[:, 0].min()) for lane in lanes)
    length = max(float(lane.spans[:, 1].max()) for lane in lanes) - begun
    return {
        "begun": begun,
        "seconds": rounded(length),
        "lanes": [lane.drawn(begun, length) for lane in lanes],
    }


def _engines(columns: Columns) -> Iterator[Lane]:
    """When each drew, for training and evaluation. What more than one engine drew counts for each of them."""
    spans = np.stack([columns.groups["begun"], columns.groups["drawn"]], axis=1)
    names = {name for team in columns.teams for name in team}
    engines = sorted(names, key=lambda name: (len(name), name))  # engine 2 before engine 10
    meaning = "a group is being drawn"
    if len(engines) > MOST_ENGINES:
        yield Lane("generate", f"{len(engines)} engines", meaning, spans)
        return
    for engine in engines:
        mine = [number for number, team in enumerate(columns.teams) if engine in team]
        drawn = spans[np.isin(columns.groups["team"], mine)]
        yield Lane("generate", engine, meaning, drawn, max(MOST_SEGMENTS // len(engines), LEAST_SEGMENTS))


def drawn_segments(united: np.ndarray, length: float, most: int) -> np.ndarray:
    """[n, 2] starts and lengths of intervals in 0..length that do not touch; of at most `most` of them.

    Where there are more, the time of work in each of so many equal stretches is kept, its place within is not.
    """
    if len(united) <= most:
        return np.stack([united[:, 0], united[:, 1] - united[:, 0]], axis=1)
    edges = np.linspace(0.0, length, most + 1)
    worked = np.concatenate(([0.0], np.cumsum(united[:, 1] - united[:, 0])))
    until = np.interp(edges, united.ravel(), np.stack([worked[:-1], worked[1:]], axis=1).ravel())
    return np.stack([edges[:-1], np.diff(until)], axis=1)


def union(spans: np.ndarray) -> np.ndarray:
    """[n, 2] intervals as those that do not touch, in order."""
    if not len(spans):
        return spans
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 1])
    starts_anew = np.flatnonzero(ordered[1:, 0] > ends[:-1]) + 1
    first = np.concatenate(([0], starts_anew))
    last = np.concatenate((starts_anew - 1, [len(ordered) - 1]))
    return np.stack([ordered[first, 0], ends[last]], axis=1)


_TEXTS = {
    "begun": "the run begins",
    "resumed": "resumed from {source}",
    "pushed": "weights pushed, version {version}",
    "evaluated": "evaluated",
    "skipped": "step skipped: not finite",
    "checkpoint": "checkpoint",
    "alarm": "{text}",
    "restarted": "restarted: {text}",
    "dropped": "{groups} groups dropped as too old",
    "ended": "{outcome}",
}


def marks(run: RunFolder) -> list[dict[str, Any]]:
    """What happened, for the curves: {"kind", "step", "text"}; phases are the timeline's."""
    found = []
    for event in run.events:
        template = _TEXTS.get(event["event"])
        if template is not None:
            text = template.format_map(defaultdict(lambda: "?", event))  # for what an event lacks
            found.append({"kind": event["event"], "step": event["optimizer_step"], "text": text})
    return found
