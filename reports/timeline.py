"""Where the time went: when each side of a run was at work, the share of each phase, and what happened when."""

from typing import Any

import numpy as np

from reports.columns import Columns
from reports.curves import rounded
from reports.run_folder import Row, RunFolder

MOST_SEGMENTS = 8000
"""Of a lane. Of a longer run there are so many equal stretches, each with its share of work at its start."""
LANES = (
    ("generate", "Engines: generate", "a group is being drawn"),
    ("score", "Rewards: score", "a completion of a drawn group is being judged"),
    ("collect", "Learner: collect", "the learner has no batch yet"),
    ("optimize", "Learner: learn", "advantages, forward, backward, optimizer"),
    ("push", "Weights: push", "weights travel to the engines"),
    ("evaluate", "Engines: evaluate", "held-out sets"),
    ("checkpoint", "Disk: checkpoint", "the run waits for a checkpoint"),
)
"""Key, title, what being at work means."""


def timeline(run: RunFolder, columns: Columns) -> dict[str, Any] | None:
    """{"begun", "seconds", "lanes": [{"key", "title", "meaning", "segments", "seconds", "count"}]}.

    segments: start, length, start, ... in seconds since the first thing that is known of the run. None where no times
    are known.
    """
    spans = {name: _phases(run.events, name) for name, _, _ in LANES}
    spans["generate"] = np.stack([columns.groups["begun"], columns.groups["drawn"]], axis=1)
    spans["score"] = np.stack([columns.groups["drawn"], columns.groups["judged"]], axis=1)
    known = [each for each in spans.values() if len(each)]
    if not known:
        return None
    begun = min(float(each[:, 0].min()) for each in known)
    length = max(float(each[:, 1].max()) for each in known) - begun
    lanes = []
    for key, title, meaning in LANES:
        united = union(spans[key])
        if len(united):
            segments = drawn_segments(united - begun, length)
            lanes.append(
                {
                    "key": key,
                    "title": title,
                    "meaning": meaning,
                    "segments": [round(float(value), 4) for value in segments.ravel()],
                    "seconds": rounded(float((united[:, 1] - united[:, 0]).sum())),
                    "count": len(spans[key]),
                }
            )
    return {"begun": begun, "seconds": rounded(length), "lanes": lanes}


def _phases(events: list[Row], name: str) -> np.ndarray:
    """[phases, 2]: start and end, in seconds since 1970."""
    mine = [event for event in events if event["event"] == "phase" and event["name"] == name]
    spans = [(event["time"] - event["seconds"], event["time"]) for event in mine]
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def drawn_segments(united: np.ndarray, length: float) -> np.ndarray:
    """[n, 2] starts and lengths of intervals in 0..length that do not touch; of at most `MOST_SEGMENTS` of them.

    Where there are more, the time of work in each of so many equal stretches is kept, its place within is not.
    """
    if len(united) <= MOST_SEGMENTS:
        return np.stack([united[:, 0], united[:, 1] - united[:, 0]], axis=1)
    edges = np.linspace(0.0, length, MOST_SEGMENTS + 1)
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
            text = template.format_map(_Known(event))
            found.append({"kind": event["event"], "step": event["optimizer_step"], "text": text})
    return found


class _Known(dict[str, Any]):
    """The fields of an event; one that it lacks is a question mark."""

    def __missing__(self, key: str) -> str:
        return "?"
