"""Who did what when, as a trace that ui.perfetto.dev and chrome://tracing open: `trace.json` in a run's folder.

    events.jsonl ──▶ driver: collect, optimize, push, evaluate, checkpoint; pushes, skips, restarts as marks
    rollouts/    ──▶ judging, and each engine: a span for each group, on lanes that hold one at a time

The format is Chrome's: {"traceEvents": [...]}, a complete span ("X") has `ts` and `dur` in microseconds.
"""

import heapq
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from config.files import written_whole
from monitoring.engines_of_group import Team, engine_names, team_of
from monitoring.events import learner_of, read_events
from monitoring.ledger_storage import read_records

TRACE = "trace.json"
DRIVER, JUDGING, GENERATION = 1, 2, 3
"""Process numbers of the trace, in the order in which they are shown; every engine has one, from the last on."""
_NUMBERS = 7
"""Of a group: begun, drawn, judged, group id, iteration, tokens, team."""
Item = dict[str, Any]


def write_trace(run_dir: Path) -> Path:
    """Write `trace.json` of what the folder holds; 56 bytes of memory a group, and the events."""
    events, (groups, teams) = read_events(run_dir), _groups(run_dir)
    times = [event["time"] - event.get("seconds", 0.0) for event in events] + groups[0::_NUMBERS].tolist()
    zero = min(times, default=0.0)
    path = run_dir / TRACE
    with written_whole(path) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = b""
        for item in _items(events, groups, teams, zero):
            file.write(separator + json.dumps(item).encode())
            separator = b",\n"
        file.write(b"\n]}\n")
    return path


def _items(
    events: Sequence[Item], groups: "array[float]", teams: Sequence[Team], zero: float
) -> Iterator[Item]:
    engines = engine_names(teams)
    named = [(DRIVER, f"driver, {learner_of(events)}"), (JUDGING, "judging"), *enumerate(engines, GENERATION)]
    for process, name in named:
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": process,
            "tid": 0,
            "name": "process_sort_index",
            "args": {"sort_index": process},
        }
    yield {"ph": "M", "pid": DRIVER, "tid": 1, "name": "thread_name", "args": {"name": "phases"}}
    yield from _driver(events, zero)
    drawn_by = groups[6::_NUMBERS]
    for process, engine in enumerate(engines, GENERATION):
        mine = {float(number) for number, team in enumerate(teams) if engine in team}
        drawn = [place for place, number in enumerate(drawn_by) if number in mine]
        yield from _lanes(groups, drawn, zero, process, 0)
    yield from _lanes(groups, range(len(drawn_by)), zero, JUDGING, 1)


def _groups(run_dir: Path) -> "tuple[array[float], list[Team]]":
    """`_NUMBERS` of each group, one group after another; the teams, whose places are their numbers."""
    numbers = array("d")
    teams: dict[Team, int] = {}
    for record in read_records(run_dir):
        tokens = sum(len(one["token_ids"]) for one in record["completions"])
        times = (record["begun"], record["drawn"], record["judged"])
        team = teams.setdefault(team_of(record), len(teams))
        numbers.extend((*times, record["group_id"], record["iteration"], tokens, team))
    return numbers, list(teams)


def _driver(events: Iterable[Item], zero: float) -> Iterator[Item]:
    """Phases one after another, and marks. A phase's length is of another clock than its end: it begins no earlier
    than the one before has ended."""
    free = 0
    for event in events:
        end = _microseconds(event["time"] - zero)
        about = {
            key: value for key, value in event.items() if key not in ("event", "time", "name", "seconds")
        }
        track: Item = {"pid": DRIVER, "tid": 1, "args": about}
        if event["event"] == "phase":
            begin = max(end - _microseconds(event["seconds"]), free)
            free = max(begin, end)
            yield {"ph": "X", "name": event["name"], "ts": begin, "dur": free - begin, **track}
        else:
            yield {"ph": "i", "s": "p", "name": event["event"], "ts": end, **track}


def _lanes(
    groups: "array[float]", places: Iterable[int], zero: float, process: int, first: int
) -> Iterator[Item]:
    """A span of each group from its time `first` to the next one, on the lowest lane that is free then.

    places: of the groups. first: 0: from begun to drawn; 1: from drawn to judged.
    """
    starts = groups[first::_NUMBERS]
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    lanes = 0
    for place in sorted(places, key=starts.__getitem__):
        values = groups[place * _NUMBERS : (place + 1) * _NUMBERS]
        begin, end = (_microseconds(time - zero) for time in values[first : first + 2])
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            lanes += 1
            free.append(lanes)
            name = {"name": f"lane {lanes}"}
            yield {"ph": "M", "pid": process, "tid": lanes, "name": "thread_name", "args": name}
        lane = heapq.heappop(free)
        end = max(end, begin)
        heapq.heappush(busy, (end, lane))
        group_id, iteration, tokens = map(int, values[3:6])
        args = {"iteration": iteration, "tokens": tokens}
        track: Item = {"pid": process, "tid": lane, "args": args}
        yield {"ph": "X", "name": f"group {group_id}", "ts": begin, "dur": end - begin, **track}


def _microseconds(seconds: float) -> int:
    """Whole ones, whose sums are exact: spans that touch do not overlap."""
    return round(seconds * 1e6)
