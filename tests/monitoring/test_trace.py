"""`trace.json` is whole JSON whose spans lie beside or after each other, with what the run's folder says."""

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from envs.example import Completion
from envs.group import ALONE, Times
from monitoring.events import Events
from monitoring.ledger import Ledger
from monitoring.trace import DRIVER, GENERATION, JUDGING, write_trace
from tests.groups import make_completion, make_group

Span = tuple[int, int]


def folder_of(
    run_dir: Path,
    events: Sequence[dict[str, Any]],
    times: Sequence[tuple[float, float, float]],
    engines: Sequence[str] = (ALONE,),
) -> Path:
    """A run's folder with these events, and a group of two tokens for each (begun, drawn, judged), by each engine in
    turn."""
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    groups = [make_group(number, [make_completion(2, 1.0)]) for number in range(len(times))]
    for group, (begun, drawn, judged) in zip(groups, times, strict=True):
        group.completions[0].shown = Completion("", 2, False)
        group.completions[0].engine = engines[group.group_id % len(engines)]
        group.times = Times(begun, drawn, judged)
    ledger = Ledger(run_dir, 1 << 30, pytest.fail)
    ledger.consumed(1, groups)
    ledger.close()
    return run_dir


def items_of(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads(write_trace(run_dir).read_text())["traceEvents"]


def phase(name: str, end: float, seconds: float) -> dict[str, Any]:
    return {
        "event": "phase",
        "time": end,
        "optimizer_step": 3,
        "iteration": 2,
        "name": name,
        "seconds": seconds,
    }


def spans(items: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[Span]]:
    """(begin, end) in microseconds by track, in the order of their beginnings."""
    found = defaultdict(list)
    for item in items:
        if item["ph"] == "X":
            assert item["ts"] >= 0 and item["dur"] >= 0, item
            found[item["pid"], item["tid"]].append((item["ts"], item["ts"] + item["dur"]))
    return {track: sorted(each) for track, each in found.items()}


def overlaps(each: Sequence[Span]) -> list[tuple[Span, Span]]:
    return [(one, other) for one, other in itertools.pairwise(each) if other[0] < one[1]]


def test_a_run_by_hand(tmp_path: Path) -> None:
    """Three groups: the second begins while the first is drawn, the third when the first is done."""
    events = [
        {"event": "begun", "time": 1000.0, "optimizer_step": 0, "learner": "GPU 0"},
        phase("collect", 1002.0, 1.5),
        phase("optimize", 1002.75, 0.75),
        {"event": "pushed", "time": 1003.0, "optimizer_step": 3, "iteration": 2, "version": 4},
        {"event": "restarted", "time": 1003.5, "optimizer_step": 3, "text": "rank 1 died"},
    ]
    times = [(1000.5, 1001.0, 1001.25), (1000.75, 1001.5, 1001.5), (1001.0, 1001.125, 1002.0)]
    items = items_of(folder_of(tmp_path, events, times))
    assert spans(items) == {
        (DRIVER, 1): [(500_000, 2_000_000), (2_000_000, 2_750_000)],
        (GENERATION, 1): [(500_000, 1_000_000), (1_000_000, 1_125_000)],
        (GENERATION, 2): [(750_000, 1_500_000)],
        (JUDGING, 1): [(1_000_000, 1_250_000), (1_500_000, 1_500_000)],
        (JUDGING, 2): [(1_125_000, 2_000_000)],
    }
    named = [(item["name"], item["ts"], item["args"]) for item in items if item["ph"] == "i"]
    assert named == [
        ("begun", 0, {"optimizer_step": 0, "learner": "GPU 0"}),
        ("pushed", 3_000_000, {"optimizer_step": 3, "iteration": 2, "version": 4}),
        ("restarted", 3_500_000, {"optimizer_step": 3, "text": "rank 1 died"}),
    ]
    third = next(item for item in items if item["name"] == "group 2" and item["pid"] == GENERATION)
    assert third["args"] == {"iteration": 1, "tokens": 2}
    assert processes(items) == {DRIVER: "driver, learner (GPU 0)", JUDGING: "judging", GENERATION: ALONE}


def processes(items: Sequence[dict[str, Any]]) -> dict[int, str]:
    return {item["pid"]: item["args"]["name"] for item in items if item["name"] == "process_name"}


def test_every_engine_is_a_process(tmp_path: Path) -> None:
    engines = ["engine 10 (GPU 3)", "engine 9 (GPU 2)"]
    times = [(1000.0 + second, 1001.0 + second, 1001.0 + second) for second in range(4)]
    items = items_of(folder_of(tmp_path, [], times, engines))
    assert [processes(items)[GENERATION + place] for place in (0, 1)] == engines[::-1]
    drawn = {process: each for (process, _), each in spans(items).items() if process != JUDGING}
    assert drawn == {
        GENERATION: [(1_000_000, 2_000_000), (3_000_000, 4_000_000)],
        GENERATION + 1: [(0, 1_000_000), (2_000_000, 3_000_000)],
    }


@pytest.mark.parametrize("seed", range(5))
def test_spans_of_one_track_never_overlap(seed: int, tmp_path: Path) -> None:
    """Groups in any order, phases whose clocks disagree; there are as many lanes as groups at one time."""
    chance = random.Random(seed)
    now, events = 1.7e9, []
    for _ in range(200):
        now += chance.expovariate(1.0)
        events.append(phase(chance.choice(["collect", "optimize"]), now, chance.expovariate(1.0)))
    times = []
    for _ in range(300):
        begun = 1.7e9 + chance.uniform(0, 100)
        drawn = begun + chance.expovariate(0.2)
        times.append((begun, drawn, drawn + chance.choice([0.0, 1e-7, 0.5])))
    tracks = spans(items_of(folder_of(tmp_path, events, times)))
    assert sum(len(each) for each in tracks.values()) == 200 + 2 * 300
    assert [found for each in tracks.values() for found in overlaps(each)] == []
    at_once = max(sum(one <= begun < drawn for one, drawn, _ in times) for begun, *_ in times)
    assert sum(process == GENERATION for process, _ in tracks) == at_once


def test_a_folder_with_nothing_in_it(tmp_path: Path) -> None:
    assert {item["ph"] for item in items_of(tmp_path)} == {"M"}


def test_an_event_with_any_text_is_whole_json(tmp_path: Path) -> None:
    Events(tmp_path, pytest.fail).tell("alarm", 1, rule="kl", text='"quoted"\n</script> \u2028')
    (alarm,) = (item for item in items_of(tmp_path) if item["ph"] == "i")
    assert alarm["args"]["text"] == '"quoted"\n</script> \u2028'
