"""Unix sockets below a TMPDIR whose path is too long for them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from config.schema.errors import ConfigError
from tests.scripts import ENVIRONMENT, ROOT, finish, start
from torchgrpo.cluster import sockets
from torchgrpo.cluster.sockets import make_room_for_sockets

pytestmark = pytest.mark.long


@pytest.fixture
def long(tmp_path: Path) -> Path:
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    return folder


def names_left(folder: Path) -> list[Path]:
    """Short names of a folder that are still there."""
    return [
        link for link in Path("/tmp").glob("grpo-*/tmp") if link.is_symlink() and link.readlink() == folder
    ]


def ended(code: str, folder: Path) -> str:
    """What Python says of this in a process whose TMPDIR is the folder."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**ENVIRONMENT, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_long_folder_has_a_short_name_until_the_process_ends(long: Path) -> None:
    code = """
import os, socket, subprocess, sys, tempfile
from torchgrpo.cluster.sockets import make_room_for_sockets
make_room_for_sockets()
make_room_for_sockets()
print(tempfile.gettempdir() == os.environ["TMPDIR"])
socket.socket(socket.AF_UNIX).bind(os.path.join(tempfile.mkdtemp(), "x" * 60))
print(subprocess.run([sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"], capture_output=True).stdout)
"""
    same, below = ended(code, long).splitlines()
    assert same == "True" and "/tmp/grpo-" in below
    assert len(list(long.iterdir())) == 2, "files are where the user wants them"
    assert not names_left(long)


def test_short_folders_stay_and_one_that_cannot_be_used_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    make_room_for_sockets()
    assert (os.environ["TMPDIR"], tempfile.tempdir, os.environ.get("RAY_TMPDIR")) == ("/tmp", "/tmp", None)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_where_no_short_name_can_be_made_the_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long: Path, variable: str
) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(long) if variable == "TMPDIR" else "/tmp")
    monkeypatch.setenv(variable, str(long))
    monkeypatch.setattr(sockets, "_SHORT", str(tmp_path / "absent"))
    with pytest.raises(
        ConfigError,
        match=rf"{variable}={long}: its path has {len(str(long))} bytes, .*set {variable} to a folder",
    ):
        make_room_for_sockets()


def test_ray_starts(long: Path, tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "TMPDIR": str(long)}
    few = ("train.total_dialog_turns=32", "env.num_envs=4", "env.repeats=4", "ray.enabled=true")
    process = start("grpo.py", tmp_path / "run", *few, environment=environment)
    output = finish(process)
    assert process.returncode == 0, output
    assert (long / "ray").is_dir(), "its session is where the user wants it"
    assert not names_left(long)
