"""Tests of the lock of a run's folder with real processes, and of its cleanup."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from config.run_folder.atomic_files import atomic_file
from config.run_folder.folders import LOCK, Owner, lock_folder, lock_owner, remove_unused_folder
from config.schema.errors import ConfigError
from tests.script_runner import ROOT

LOCK_SCRIPT = """
import sys
from pathlib import Path
from config.run_folder.folders import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def locked_by_another_process(folder: Path, script: str = LOCK_SCRIPT) -> Iterator[subprocess.Popen[str]]:
    """Runs a process that locks `folder` until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.communicate()


def test_an_undecodable_folder_name_is_rejected(tmp_path: Path) -> None:
    """The name is Latin-1, or has letters that the locale lacks."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=.*: the path is not valid UTF-8, or the locale"):
        lock_folder(folder).__enter__()


def test_a_second_process_is_rejected_with_the_name_of_the_owner(tmp_path: Path) -> None:
    with locked_by_another_process(tmp_path) as process:
        with pytest.raises(ConfigError, match=rf"another run uses this folder \(process {process.pid} on "):
            lock_folder(tmp_path).__enter__()
        owner = lock_owner(tmp_path)
        assert owner is not None and owner.pid == process.pid
        remove_unused_folder(tmp_path)
        assert (tmp_path / LOCK).exists()
    with lock_folder(tmp_path):
        assert lock_owner(tmp_path) == Owner.this_process()
    assert lock_owner(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_free_while_its_child_lives(tmp_path: Path) -> None:
    script = LOCK_SCRIPT.replace(
        "    sys.stdin.read()", "    sys.stdout.flush()\n    EXTRA\n    sys.stdin.read()"
    ).replace("EXTRA", "import os; os.fork() or (os.setsid(), os.close(1), __import__('time').sleep(600))")
    with locked_by_another_process(tmp_path, script) as process:
        while not (children := psutil.Process(process.pid).children()):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert children[0].is_running()
        with lock_folder(tmp_path):
            pass
        children[0].kill()


def test_a_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
            lock_folder(tmp_path).__enter__()
        assert (tmp_path / LOCK).exists()
        script = LOCK_SCRIPT.replace("sys.stdin.read()", "")
        refused = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        assert f"process {os.getpid()} on " in refused.stderr


def write_lock_file(folder: Path, owner: Owner) -> None:
    (folder / LOCK).write_text(json.dumps(vars(owner)))


def test_the_lock_file_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    here = Owner.this_process()
    for owner in (Owner(here.host, here.pid, here.began - 100), Owner("elsewhere", 1, 0.0)):
        write_lock_file(tmp_path, owner)
        with lock_folder(tmp_path):
            pass
    (tmp_path / LOCK).write_bytes(b"\0" * 100)
    with lock_folder(tmp_path):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with lock_folder(tmp_path):
        assert Owner.this_process().pid == json.loads((tmp_path / LOCK).read_text())["pid"]
    write_lock_file(tmp_path, Owner("elsewhere", 4242, 0.0))
    with pytest.raises(ConfigError, match="process 4242 on elsewhere"):
        lock_folder(tmp_path).__enter__()


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=.*the folder cannot be written"):
        lock_folder(tmp_path / "file" / "run").__enter__()


def test_only_temporary_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    places = [tmp_path, tmp_path / "checkpoints"]
    places[1].mkdir()
    for place in places:
        (place / "summary.json.4242-0123abcd.tmp").touch()
        (place / "mine.tmp").touch()
    for name in (".checkpoint_000002.writing", ".checkpoint_000001.removed", "checkpoint_000001", ".mine"):
        (places[1] / name / "learner").mkdir(parents=True)
    with lock_folder(tmp_path):
        remaining = {path.name for place in places for path in place.iterdir()}
    assert remaining == {"checkpoints", "checkpoint_000001", ".mine", "mine.tmp", LOCK}


def test_two_writers_of_a_file_use_separate_temporary_files(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write(b"one")
        other.write(b"the other")
        names = [found.name for found in tmp_path.iterdir()]
        assert len(names) == 2
        assert all(name.startswith(f"summary.json.{os.getpid()}-") for name in names)
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unstarted_run_removes_only_its_own_files(tmp_path: Path) -> None:
    empty, kept = tmp_path / "empty", tmp_path / "kept"
    for folder in (empty, kept):
        folder.mkdir()
        (folder / "grpo.log").touch()
    (kept / "thesis.tex").write_text("all my work")
    for folder in (empty, kept):
        remove_unused_folder(folder)
    assert not empty.exists()
    assert [path.name for path in kept.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["grpo.log", "engine.log", "summary.json", "events.jsonl"])
@pytest.mark.parametrize("alone", [True, False])
def test_an_unstarted_run_keeps_files_of_others_with_these_names(name: str, alone: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text("all my work")
    if alone:
        os.utime(tmp_path / name, (0, 0))
    else:
        (tmp_path / "thesis.tex").touch()
    remove_unused_folder(tmp_path)
    assert (tmp_path / name).read_text() == "all my work"


def test_a_folder_directly_below_the_root_is_removed_too() -> None:
    """Without permission to create such a folder, the test checks nothing."""
    with suppress(PermissionError):
        folder = Path(tempfile.mkdtemp(dir="/"))
        remove_unused_folder(folder)
        assert not folder.exists()


def test_an_unstarted_run_removes_the_empty_folder_of_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the day stays while another run is in it."""
    monkeypatch.chdir(tmp_path)
    first, second, mine = (Path(name).absolute() for name in ("outputs/day/1", "outputs/day/2", "mine/run"))
    for folder in (first, second, mine):
        folder.mkdir(parents=True)
    remove_unused_folder(first)
    assert second.is_dir()
    for folder in (second, mine):
        remove_unused_folder(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
