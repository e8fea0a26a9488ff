"""The history of a run: every event a line, whatever else happens."""

from pathlib import Path

from config.run_folder.folders import EVENTS
from torchgrpo.monitoring.events import Events, read_events


def test_events_come_back_in_order(tmp_path: Path) -> None:
    said: list[str] = []
    for step in range(2):
        Events(tmp_path, said.append).tell("pushed", step, version=step + 1)
    assert [
        (event["event"], event["optimizer_step"], event["version"]) for event in read_events(tmp_path)
    ] == [("pushed", 0, 1), ("pushed", 1, 2)]
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"event": "pus')
    assert len(read_events(tmp_path)) == 2
    assert not said


def test_what_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    events = Events(tmp_path / "gone", said.append)
    events.tell("pushed", 1)
    events.tell("pushed", 2)
    assert len(said) == 1 and "cannot be written (No such file or directory)" in said[0]
    assert read_events(tmp_path / "gone") == []
