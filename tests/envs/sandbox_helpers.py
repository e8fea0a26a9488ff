"""Helpers of the sandbox tests: limits, isolation levels of this machine, checks of leftover processes."""

import os
import sys
from pathlib import Path

import pytest

from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import LEVELS, Sandbox, unavailable_reason

NEEDS_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(
    wall_seconds=10.0, cpu_seconds=1, memory_mib=256, threads=16, file_mib=2, disk_mib=4, output_mib=1,
    open_files=32,
)  # fmt: skip
WORKING_LEVELS = [level for level in LEVELS if sys.platform.startswith("linux") and unavailable_reason(level) is None]
SANDBOX_CASES = [(level, ()) for level in WORKING_LEVELS] + [
    # the layers below the filter must hold by themselves where a process-number namespace ends all processes
    (level, ("filter",))
    for level in WORKING_LEVELS
    if level != "rlimits"
]


def parent_pids() -> dict[int, int]:
    """Returns the parent of each process of this machine."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return parents


def descendants(pid: int) -> set[int]:
    """Returns all processes below a process."""
    parents = parent_pids()
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree - {pid}


def supervisor_pid(sandbox: Sandbox) -> int:
    assert sandbox._supervisor is not None
    return sandbox._supervisor.process.pid


def assert_unharmed(sandbox: Sandbox) -> None:
    """Asserts that the sandbox runs the next program alone and in an empty directory."""
    pid = supervisor_pid(sandbox)
    run = sandbox.run("import os; print(6 * 7, os.listdir('.'))")
    assert run.stdout == b"42 []\n"
    assert supervisor_pid(sandbox) == pid, "the supervisor had to be replaced"
    assert len(descendants(pid)) <= 2, "processes are left over"
    if sandbox._supervisor is not None and sandbox._supervisor.directory is not None:
        assert os.listdir(sandbox._supervisor.directory) == []
