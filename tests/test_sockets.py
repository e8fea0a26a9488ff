"""Tests of Unix sockets in a temporary folder whose path is too long for them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from config.schema.errors import ConfigError
from tests.script_runner import ENVIRONMENT, ROOT, start_script, wait_for_output
from torchgrpo.cluster import socket_paths
from torchgrpo.cluster.socket_paths import shorten_temporary_folders

pytestmark = pytest.mark.long


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    return folder


def remaining_links(folder: Path) -> list[Path]:
    """Returns the symbolic links to a folder that still exist."""
    return [link for link in Path("/tmp").glob("grpo-*/tmp") if link.is_symlink() and link.readlink() == folder]


def run_code(code: str, folder: Path) -> str:
    """Returns the output of code in a Python process whose TMPDIR is the folder."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**ENVIRONMENT, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_long_folder_has_a_short_link_until_the_process_ends(long_folder: Path) -> None:
    code = """
import os, socket, subprocess, sys, tempfile
from torchgrpo.cluster.socket_paths import shorten_temporary_folders
shorten_temporary_folders()
shorten_temporary_folders()
print(tempfile.gettempdir() == os.environ["TMPDIR"])
socket.socket(socket.AF_UNIX).bind(os.path.join(tempfile.mkdtemp(), "x" * 60))
print(subprocess.run([sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"], capture_output=True).stdout)
"""
    is_unchanged, child_folder = run_code(code, long_folder).splitlines()
    assert is_unchanged == "True" and "/tmp/grpo-" in child_folder
    assert len(list(long_folder.iterdir())) == 2, "files lie in the user's folder"
    assert not remaining_links(long_folder)


def test_short_folders_stay_and_unusable_ones_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    shorten_temporary_folders()
    assert (os.environ["TMPDIR"], tempfile.tempdir, os.environ.get("RAY_TMPDIR")) == ("/tmp", "/tmp", None)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_an_error_names_the_variable_if_no_link_can_be_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long_folder: Path, variable: str
) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder) if variable == "TMPDIR" else "/tmp")
    monkeypatch.setenv(variable, str(long_folder))
    monkeypatch.setattr(socket_paths, "_LINK_FOLDER", str(tmp_path / "absent"))
    with pytest.raises(
        ConfigError,
        match=rf"{variable}={long_folder}: its path has {len(str(long_folder))} bytes, .*set {variable} to a folder",
    ):
        shorten_temporary_folders()


def test_ray_starts_in_a_long_folder(long_folder: Path, tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "TMPDIR": str(long_folder)}
    settings = ("train.total_dialog_turns=32", "env.num_envs=4", "env.repeats=4", "ray.enabled=true")
    process = start_script("grpo.py", tmp_path / "run", *settings, environment=environment)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert (long_folder / "ray").is_dir(), "its session lies in the user's folder"
    assert not remaining_links(long_folder)
