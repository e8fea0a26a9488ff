"""Tests of the sandbox's boundaries: sockets, other processes, the grader's files, the disk."""

import ast
import os
import socket
from pathlib import Path

import pytest

from envs.sandbox.sandbox import Sandbox
from tests.envs.sandbox_helpers import LIMITS, NEEDS_LINUX, ROOT, WORKING_LEVELS, assert_unharmed, parent_pids

pytestmark = NEEDS_LINUX


def test_sockets_reach_neither_this_machine_nor_another(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        run = sandbox.run(f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                        (socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET6, ("::1", 80))):
    try:
        with socket.socket(family) as made:
            made.settimeout(0.5)
            made.connect(address)
            print("connected")
    except OSError as error:
        print("refused")
try:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.sendto(b"x", ("192.0.2.1", 53))
        print("sent")
except OSError:
    print("refused")
""")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert run.stdout == b"refused\n" * 4


def test_others_cannot_be_killed(sandbox: Sandbox) -> None:
    run = sandbox.run("""
import os, resource, signal
for target in (os.getppid(), 1, -1, 0, os.getppid() or 2):
    if target == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(target, number if target else signal.SIGTERM)
        except OSError:
            pass
try:
    resource.prlimit(os.getppid() or 1, resource.RLIMIT_CPU, (0, 0))
except OSError:
    pass
print("done")
""")
    assert run.stdout == b"done\n"
    assert_unharmed(sandbox)


def test_graders_files_and_memory_are_out_of_sight(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "expected.json"
    secret.write_text("the expected output")
    for parent in (secret, *secret.parents):
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    run = sandbox.run(f"""
import os
wanted = [{str(secret)!r}, {str(ROOT / "pyproject.toml")!r}, "/etc/passwd", "/etc/shadow"]
for pid in {[os.getpid(), parent_pids()[os.getpid()]]} + [os.getppid(), 1]:
    wanted += [f"/proc/{{pid}}/{{name}}" for name in ("mem", "environ", "maps", "fd/0", "cwd/pyproject.toml")]
for path in wanted:
    try:
        with open(path, "rb") as file:
            file.read(1)
            print("read", path)
    except OSError:
        pass
for fd in range(3, 64):
    try:
        os.fstat(fd)
        if os.read(fd, 1): print("inherited", fd)
    except OSError:
        pass
print(sorted(os.environ))
""")
    allowed = {"HOME", "LC_CTYPE", "PWD", "PYTHONHASHSEED", "TMPDIR"}
    assert set(ast.literal_eval(run.stdout.decode())) <= allowed


def test_files_outside_the_private_directory_cannot_be_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    kept.write_text("kept")
    kept.chmod(0o666)
    run = sandbox.run(f"""
import os
for attempt in (lambda: open({str(kept)!r}, "w"), lambda: os.unlink({str(kept)!r}),
                lambda: os.mkdir({str(tmp_path / "made")!r}), lambda: open(os.__file__, "a"),
                lambda: open("/made", "w"), lambda: os.symlink("/etc", {str(tmp_path / "link")!r})):
    try:
        attempt()
        print("changed")
    except OSError:
        pass
""")
    assert run.stdout == b""
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "kept"


@pytest.mark.skipif("rlimits" not in WORKING_LEVELS, reason="level rlimits does not work here")
def test_without_landlock_no_file_can_be_changed_at_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("kept")
    program = f"""
import os
for attempt in (lambda: open("made", "w"), lambda: os.mkdir("made"), lambda: os.chmod(".", 0),
                lambda: os.unlink({str(tmp_path / "kept")!r}), lambda: os.open("made", os.O_CREAT | os.O_RDWR),
                lambda: os.rename({str(tmp_path / "kept")!r}, "taken"), lambda: os.utime(".")):
    try:
        attempt()
        print("changed")
    except PermissionError:
        print("refused")
import decimal
print(open(decimal.__file__).readline() != "")
"""
    with Sandbox("rlimits", LIMITS, ["landlock"]) as made:
        run = made.run(program)
    assert run.stdout == b"refused\n" * 7 + b"True\n"
    assert (tmp_path / "kept").read_text() == "kept"
