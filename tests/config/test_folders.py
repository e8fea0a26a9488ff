"""The folder of a run: one holder at a time, among real processes."""

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

from config.run_folder.files import written_whole
from config.run_folder.folders import LOCK, Owner, held, holder, remove_if_unused
from config.schema.errors import ConfigError
from tests.scripts import ROOT

HOLD = """
import sys
from pathlib import Path
from config.run_folder.folders import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another(folder: Path, script: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.communicate()


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """In Latin-1, or in any letters where the locale has none."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    with pytest.raises(
        ConfigError, match=r"hydra\.run\.dir=.*: bytes of this path are no UTF-8, or the locale"
    ):
        held(folder).__enter__()


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as process:
        with pytest.raises(
            ConfigError, match=rf"another run works in this folder \(process {process.pid} on "
        ):
            held(tmp_path).__enter__()
        owner = holder(tmp_path)
        assert owner is not None and owner.pid == process.pid
        remove_if_unused(tmp_path)
        assert (tmp_path / LOCK).exists()
    with held(tmp_path):
        assert holder(tmp_path) == Owner.this_process()
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_held_is_free_though_a_child_of_it_lives(tmp_path: Path) -> None:
    script = HOLD.replace(
        "    sys.stdin.read()", "    sys.stdout.flush()\n    EXTRA\n    sys.stdin.read()"
    ).replace("EXTRA", "import os; os.fork() or (os.setsid(), os.close(1), __import__('time').sleep(600))")
    with held_by_another(tmp_path, script) as process:
        while not (children := psutil.Process(process.pid).children()):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert children[0].is_running()
        with held(tmp_path):
            pass
        children[0].kill()


def test_one_process_holds_a_folder_once(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
            held(tmp_path).__enter__()
        assert (tmp_path / LOCK).exists()
        script = HOLD.replace("sys.stdin.read()", "")
        refused = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert f"process {os.getpid()} on " in refused.stderr


def leave(folder: Path, owner: Owner) -> None:
    (folder / LOCK).write_text(json.dumps(vars(owner)))


def test_a_lock_file_of_a_dead_process_is_in_nobodys_way(tmp_path: Path) -> None:
    here = Owner.this_process()
    for owner in (Owner(here.host, here.pid, here.began - 100), Owner("elsewhere", 1, 0.0)):
        leave(tmp_path, owner)
        with held(tmp_path):
            pass
    (tmp_path / LOCK).write_bytes(b"\0" * 100)
    with held(tmp_path):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with held(tmp_path):
        assert Owner.this_process().pid == json.loads((tmp_path / LOCK).read_text())["pid"]
    leave(tmp_path, Owner("elsewhere", 4242, 0.0))
    with pytest.raises(ConfigError, match="process 4242 on elsewhere"):
        held(tmp_path).__enter__()


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=.*no file can be written there"):
        held(tmp_path / "file" / "run").__enter__()


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    places = [tmp_path, tmp_path / "checkpoints"]
    places[1].mkdir()
    for place in places:
        (place / "summary.json.4242-0123abcd.tmp").touch()
        (place / "mine.tmp").touch()
    for name in (".checkpoint_000002.writing", ".checkpoint_000001.removed", "checkpoint_000001", ".mine"):
        (places[1] / name / "learner").mkdir(parents=True)
    with held(tmp_path):
        left = {path.name for place in places for path in place.iterdir()}
    assert left == {"checkpoints", "checkpoint_000001", ".mine", "mine.tmp", LOCK}


def test_two_writers_of_one_file_each_write_their_own(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    with written_whole(path) as one, written_whole(path) as other:
        one.write(b"one")
        other.write(b"the other")
        names = [found.name for found in tmp_path.iterdir()]
        assert len(names) == 2
        assert all(name.startswith(f"summary.json.{os.getpid()}-") for name in names)
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_never_began_takes_only_its_own_with_it(tmp_path: Path) -> None:
    empty, kept = tmp_path / "empty", tmp_path / "kept"
    for folder in (empty, kept):
        folder.mkdir()
        (folder / "grpo.log").touch()
    (kept / "thesis.tex").write_text("all my work")
    for folder in (empty, kept):
        remove_if_unused(folder)
    assert not empty.exists()
    assert [path.name for path in kept.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["grpo.log", "engine.log", "summary.json", "events.jsonl"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_run_that_never_began_leaves_files_of_others_with_these_names(
    name: str, alone: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("all my work")
    if alone:
        os.utime(tmp_path / name, (0, 0))
    else:
        (tmp_path / "thesis.tex").touch()
    remove_if_unused(tmp_path)
    assert (tmp_path / name).read_text() == "all my work"


def test_a_folder_directly_below_the_root_is_removed_too() -> None:
    """Where nobody may make one, there is nothing to remove."""
    with suppress(PermissionError):
        folder = Path(tempfile.mkdtemp(dir="/"))
        remove_if_unused(folder)
        assert not folder.exists()


def test_a_run_that_never_began_takes_the_folder_of_the_day_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no other run is in it, and a job beside it has its own."""
    monkeypatch.chdir(tmp_path)
    first, second, mine = (Path(name).absolute() for name in ("outputs/day/1", "outputs/day/2", "mine/run"))
    for folder in (first, second, mine):
        folder.mkdir(parents=True)
    remove_if_unused(first)
    assert second.is_dir()
    for folder in (second, mine):
        remove_if_unused(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
