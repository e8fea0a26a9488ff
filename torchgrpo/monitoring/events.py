"""Writer and reader of `events.jsonl`, the event log of a run.

The file has one JSON object per line. A resumed run appends to the same file. No event is ever removed, so
steps that a resumed run repeats are in the file twice.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from config.run_folder.folders import EVENTS
from config.schema.former_names import EVENTS as NEW_EVENTS


@dataclass(eq=False)
class Events:
    """Appends events to the event log of a run.

    The first event opens the file, so a run without events leaves no file; the file stays open. If the file
    cannot be written, `on_warning` is called once and later events are dropped.
    """

    run_dir: Path
    on_warning: Callable[[str], None]
    enabled: bool = True
    _file: FileIO | None = None

    def append(self, event: str, optimizer_step: int, **fields: Any) -> None:
        """Writes one event in a single write. fields: values that JSON supports."""
        if not self.enabled:
            return
        line = {"event": event, "time": time.time(), "optimizer_step": optimizer_step, **fields}
        try:
            if self._file is None:
                self._file = (self.run_dir / EVENTS).open("ab", buffering=0)
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
        except OSError as error:
            self.enabled = False
            self.on_warning(
                f"warning: {self.run_dir / EVENTS} cannot be written ({error.strerror}); the run "
                "continues without events"
            )

    def close(self) -> None:
        self.enabled = False
        if self._file is not None:
            self._file.close()


def learner_title(events: Iterable[dict[str, Any]]) -> str:
    """Returns the learner with its devices from the newest start event: `learner (GPU 0)`."""
    devices = [event["learner"] for event in events if "learner" in event]
    return f"learner ({devices[-1]})" if devices else "learner"


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns all readable events of a run, oldest first, under their present names."""
    path = run_dir / EVENTS
    if not path.is_file():
        return []
    events = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(orjson.JSONDecodeError):  # a full disk may leave a partial line
            event = orjson.loads(line)
            if isinstance(event, dict) and "event" in event:
                event["event"] = NEW_EVENTS.get(event["event"], event["event"])
                events.append(event)
    return events
