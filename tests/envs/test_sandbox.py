"""Tests of programs that exceed a limit: each ends and leaves no process or file."""

import errno

import pytest

from envs.sandbox.sandbox import Sandbox
from tests.envs.sandbox_helpers import LIMITS, NEEDS_LINUX, assert_unharmed

pytestmark = [NEEDS_LINUX, pytest.mark.long]


ENDLESS = {
    "infinite loop": "while True: pass",
    "ignored signals": """
import signal
for number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
    "caught signal of the limit": """
import signal, time
signal.signal(signal.SIGXCPU, lambda *_: None)
while time.process_time() < 1.5: pass
""",
}
SLOW_IN_C = {
    "catastrophic regex": "import re; print(re.match(r'(a+)+$', 'a' * 40 + 'b'))",
    "power tower": "print(len(str(9 ** 9 ** 9)))",
}


@pytest.mark.parametrize("name", SLOW_IN_C)
def test_what_holds_the_interpreter_is_ended_too(auto_sandbox: Sandbox, name: str) -> None:
    run = auto_sandbox.run(SLOW_IN_C[name])
    assert (run.status, run.stdout) == ("time", b"")
    assert_unharmed(auto_sandbox)


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_programs_are_ended(sandbox: Sandbox, name: str) -> None:
    run = sandbox.run(ENDLESS[name])
    assert (run.status, run.stdout) == ("time", b"")
    assert_unharmed(sandbox)


def test_sleepers_are_ended(sandbox: Sandbox) -> None:
    run = sandbox.run("import os, time\nos.closerange(0, 64)\ntime.sleep(1000)", wall_seconds=1.0)
    assert run.status == "time"
    assert_unharmed(sandbox)


def test_a_limit_that_leaves_no_time_to_begin_is_a_limit_all_the_same(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass", wall_seconds=1e-6).status == "time"


def test_a_fork_bomb_starts_few_processes_and_all_end(sandbox: Sandbox) -> None:
    run = sandbox.run("""
import os
made = 0
for _ in range(100000):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        while True:
            try: os.fork()
            except OSError: pass
    made += 1
print(made)
""")
    if "filter" in sandbox.disabled_layers:
        assert run.status == "time" or int(run.stdout) <= LIMITS.threads
    else:
        assert run.stdout == b"0\n"
    assert_unharmed(sandbox)


def test_a_daemon_does_not_outlive_its_test(sandbox: Sandbox) -> None:
    run = sandbox.run("""
import os, signal, time
try:
    pid = os.fork()
except PermissionError:
    print("refused")
    raise SystemExit
if pid == 0:
    os.setsid()
    if os.fork() == 0:
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    os._exit(0)
os.waitpid(pid, 0)
print("started")
""")
    assert run.stdout == (b"started\n" if "filter" in sandbox.disabled_layers else b"refused\n")
    assert_unharmed(sandbox)


def test_other_programs_cannot_be_started(sandbox: Sandbox) -> None:
    run = sandbox.run("import subprocess; print(subprocess.run(['/bin/sh', '-c', 'echo out']))")
    assert b"out" not in run.stdout
    assert run.code == 1
    assert_unharmed(sandbox)


@pytest.mark.parametrize("program", [
    "data = bytearray(10 ** 10)", "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "held = [0] * 10 ** 9", "import mmap\nheld = [mmap.mmap(-1, 1 << 20) for _ in range(10 ** 5)]",
])  # fmt: skip
def test_memory_is_limited(sandbox: Sandbox, program: str) -> None:
    run = sandbox.run(program + "\nprint('allocated')")
    assert run.stdout == b""
    assert not run.is_success
    assert_unharmed(sandbox)


def test_five_gigabytes_of_output_are_cut_short(sandbox: Sandbox) -> None:
    run = sandbox.run("line = '3' * (1 << 20)\nfor _ in range(5000): print(line)")
    assert run.status == "output"
    assert len(run.stdout) <= LIMITS.output_mib << 20
    assert_unharmed(sandbox)


def test_errors_are_kept_in_part(sandbox: Sandbox) -> None:
    run = sandbox.run("import sys\nfor _ in range(5000): sys.stderr.write('e' * 1000)\nprint('end')")
    assert run.stdout == b"end\n"
    assert 0 < len(run.stderr) <= 8192


FILL_DISK = """
import os
total = 0
try:
    for index in range(10 ** 6):
        with open(f"file{index}", "wb") as file:
            for _ in range(SIZE):
                total += file.write(b"x" * 65536)
except OSError as error:
    print(total, error.errno)
"""


@pytest.mark.parametrize("blocks", [1, 10**6], ids=["many files", "one file"])
def test_the_disk_cannot_be_filled(sandbox: Sandbox, blocks: int) -> None:
    run = sandbox.run(FILL_DISK.replace("SIZE", str(blocks)))
    if run.status == "finished":
        total, reason = map(int, run.stdout.split())
        assert total <= LIMITS.disk_mib << 20
        assert reason in (errno.ENOSPC, errno.EFBIG, errno.EMFILE)
    else:
        assert run.status == "disk"
    assert_unharmed(sandbox)


@pytest.mark.parametrize("name", ["'d'", "'d' * 255"], ids=["short names", "long names"])
def test_deep_and_locked_directories_are_removed(sandbox: Sandbox, name: str) -> None:
    run = sandbox.run(
        """
import os, time
try:
    for depth in range(900):
        os.mkdir(NAME)
        open("f", "w").close()
        os.chdir(NAME)
        os.chmod("..", 0)
except OSError as error:
    print(error)
time.sleep(0.3)
""".replace("NAME", name)
    )
    assert run.status in ("finished", "disk")
    assert_unharmed(sandbox)


def test_deep_recursion_ends(sandbox: Sandbox) -> None:
    run = sandbox.run("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1) + 1\nprint(f(0))")
    assert run.stdout == b""
    assert not run.is_success
    assert_unharmed(sandbox)
