"""What a run before left in the process is collected as the next one begins; imports are not looked through."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from run.garbage import spare_what_stays
from tests.scripts import ROOT


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def in_a_new_process() -> Iterator[None]:
    """As far as the collector goes."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.disable()
    yield
    gc.enable()
    gc.set_threshold(*before)


def test_the_second_run_of_a_process_begins_without_the_garbage_of_the_first(in_a_new_process: None) -> None:
    of_imports = weakref.ref(Cycle())
    spare_what_stays()
    assert of_imports() is not None, "looked through before the first run"
    of_the_first = weakref.ref(Cycle())
    spare_what_stays()
    assert of_the_first() is None


ENDING = """
import gc
import run.garbage

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("looked through")

Cycle()
gc.disable()
END
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [("", "looked through\n"), ("run.garbage.end_without_a_search(); gc.freeze(); gc.unfreeze()", "")],
)
def test_a_script_ends_without_a_search(end: str, said: str) -> None:
    """Although vLLM thaws what was frozen; Python's own end looks through all."""
    command = [sys.executable, "-c", ENDING.replace("END", end)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == said
