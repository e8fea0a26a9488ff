"""Tests of the event log of a run."""

from pathlib import Path

from config.run_folder.folders import EVENTS
from torchgrpo.monitoring.events import Events, read_events


def test_events_are_read_in_order(tmp_path: Path) -> None:
    warnings: list[str] = []
    for step in range(2):
        Events(tmp_path, warnings.append).append("weight_push", step, version=step + 1)
    assert [(event["event"], event["optimizer_step"], event["version"]) for event in read_events(tmp_path)] == [
        ("weight_push", 0, 1),
        ("weight_push", 1, 2),
    ]
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"event": "pus')
    assert len(read_events(tmp_path)) == 2
    assert not warnings


def test_unwritable_file_is_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    events = Events(tmp_path / "missing", warnings.append)
    events.append("weight_push", 1)
    events.append("weight_push", 2)
    assert len(warnings) == 1 and "cannot be written (No such file or directory)" in warnings[0]
    assert read_events(tmp_path / "missing") == []
