"""What happened in a run and when: `events.jsonl`, one JSON object a line, the history of every part of the run.

A resumed run goes on in the same file; nothing is ever cut from it, so that what was done twice shows as such.
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


@dataclass(eq=False)
class Events:
    """Appends to the history of a run. Where it cannot, `say` is told once, and the run goes on without.

    The file is opened with the first event, for a run that never begins leaves none, and stays open.
    """

    run_dir: Path
    say: Callable[[str], None]
    writes: bool = True
    _file: FileIO | None = None

    def tell(self, event: str, optimizer_step: int, **fields: Any) -> None:
        """One line, in one write. fields: what JSON knows."""
        if not self.writes:
            return
        line = {"event": event, "time": time.time(), "optimizer_step": optimizer_step, **fields}
        try:
            if self._file is None:
                self._file = (self.run_dir / EVENTS).open("ab", buffering=0)
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
        except OSError as error:
            self.writes = False
            self.say(
                f"warning: {self.run_dir / EVENTS} cannot be written ({error.strerror}); the run goes on without"
            )

    def close(self) -> None:
        self.writes = False
        if self._file is not None:
            self._file.close()


def learner_of(events: Iterable[dict[str, Any]]) -> str:
    """The learner with its devices, as the newest part of a run has told: `learner (GPU 0)`."""
    places = [event["learner"] for event in events if "learner" in event]
    return f"learner ({places[-1]})" if places else "learner"


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's history, the oldest first."""
    path = run_dir / EVENTS
    if not path.is_file():
        return []
    events = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(orjson.JSONDecodeError):  # a full disk took half of it
            event = orjson.loads(line)
            if isinstance(event, dict) and "event" in event:
                events.append(event)
    return events
