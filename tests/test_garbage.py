"""What a run before left in the process is collected as the next one begins; imports are not looked through, then
or at the end."""

import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import garbage
from cluster.garbage import freeze_imports, imported_apart, spare_what_stays
from tests.scripts import ROOT


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as the collector goes."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(garbage, "_spared", False)
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


def test_what_was_dropped_before_is_collected_where_the_search_is_on(in_a_new_process: None) -> None:
    """The tensors of a learner that a notebook has dropped; a run has only imported till then."""
    dropped = weakref.ref(Cycle())
    freeze_imports()
    assert dropped() is not None
    gc.enable()
    freeze_imports()
    assert dropped() is None


KEEPS_WHAT_FAILED = """
try:
    import a_package_that_is_not_there
except ImportError as error:
    failed = error
"""


@pytest.mark.parametrize(("apart", "kept"), [(False, True), (True, False)], ids=["as usual", "apart"])
def test_an_import_apart_keeps_nothing_of_its_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool, kept: bool
) -> None:
    """vLLM keeps the exceptions of what it could not import, and these the frames of a run that imported it first."""
    name = f"keeps_what_failed_{apart}"
    (tmp_path / f"{name}.py").write_text(KEEPS_WHAT_FAILED)
    monkeypatch.syspath_prepend(tmp_path)

    def begin_a_run() -> weakref.ref[Cycle]:
        model = Cycle()
        module = imported_apart(name) if apart else importlib.import_module(name)
        assert module.failed.name == "a_package_that_is_not_there"
        return weakref.ref(model)

    model = begin_a_run()
    gc.collect()
    assert (model() is not None) == kept
    del sys.modules[name]


ENDING = """
import gc
import sys
import grpo

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("looked through")

gc.disable()
Cycle()
sys.argv = ["grpo.py", "--config-name", "grpo_quickstart", "run=plan", "hydra.run.dir=FOLDER"]
grpo.main()
"""


def test_a_script_ends_without_a_search(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING.replace("FOLDER", str(tmp_path / "run"))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.startswith("machine:\n")
    assert "looked through" not in ended.stdout
