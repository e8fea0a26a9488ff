"""What all tests of the sandbox share: its limits, its levels that work here, and a look at what is left of it."""

import os
import sys
from pathlib import Path

import pytest

from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import LEVELS, Sandbox, why_not

NEEDS_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(
    wall_seconds=10.0, cpu_seconds=1, memory_mib=256, threads=16, file_mib=2, disk_mib=4, output_mib=1,
    open_files=32,
)  # fmt: skip
WORKING = [level for level in LEVELS if sys.platform.startswith("linux") and why_not(level) is None]
SHUT_IN = [(level, ()) for level in WORKING] + [
    # what is beneath the filter must hold by itself where a process-number namespace ends all
    (level, ("filter",))
    for level in WORKING
    if level != "rlimits"
]


def parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def descendants(pid: int) -> set[int]:
    known = parents()
    found = {pid}
    while more := {child for child, parent in known.items() if parent in found} - found:
        found |= more
    return found - {pid}


def supervisor(sandbox: Sandbox) -> int:
    assert sandbox._session is not None
    return sandbox._session.process.pid


def assert_unharmed(sandbox: Sandbox) -> None:
    """The next program runs as if nothing had happened, alone and in an empty directory."""
    pid = supervisor(sandbox)
    run = sandbox.run("import os; print(6 * 7, os.listdir('.'))")
    assert run.stdout == b"42 []\n"
    assert supervisor(sandbox) == pid, "the supervisor had to be replaced"
    assert len(descendants(pid)) <= 2, "processes are left over"
    if sandbox._session is not None and sandbox._session.directory is not None:
        assert os.listdir(sandbox._session.directory) == []
