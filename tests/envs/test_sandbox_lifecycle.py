"""Tests of the sandbox's life cycle: ordinary programs, start, replacement, end, leftover files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config.schema.errors import ConfigError
from envs.sandbox import sandbox as sandbox_module
from envs.sandbox.sandbox import Sandbox, choose_level, unavailable_reason
from envs.sandbox.supervisor import empty_directory
from tests.envs.sandbox_helpers import NEEDS_LINUX, ROOT, WORKING_LEVELS, descendants, supervisor_pid
from tests.processes import is_alive, wait_for_exit

pytestmark = NEEDS_LINUX


def test_exit_is_what_it_is(auto_sandbox: Sandbox) -> None:
    assert auto_sandbox.run("import os; print(3, flush=True); os._exit(0)").stdout == b"3\n"
    assert auto_sandbox.run("import os; os._exit(0)").is_success
    assert auto_sandbox.run("import sys; sys.exit(7)").code == 7
    assert auto_sandbox.run("import sys; sys.exit('why')").code == 1
    assert auto_sandbox.run("import sys; sys.exit = print; print(3)").stdout == b"3\n"
    assert auto_sandbox.run("import os; os.abort()").code == -signal.SIGABRT
    assert b"SyntaxError" in auto_sandbox.run("def f(:").stderr
    assert auto_sandbox.run("import os; os.close(1); print(3)").code == 120
    assert auto_sandbox.run("import atexit; atexit.register(print, 'late')").stdout == b"late\n"


def test_ordinary_programs_run(auto_sandbox: Sandbox) -> None:
    echoed = auto_sandbox.run("import sys; sys.stdout.write(sys.stdin.read()[::-1])", b"a\n" * 400_000)
    assert echoed.stdout == b"\na" * 400_000
    assert auto_sandbox.run("print(open(0).read())", b"x").stdout == b"x\n"
    threaded = """
import sys, threading
sys.setrecursionlimit(10 ** 6)
threading.stack_size(64 << 20)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
threading.Thread(target=lambda: print(depth(50000))).start()
"""
    assert auto_sandbox.run(threaded).stdout == b"50000\n"
    imports = "import decimal, fractions, zoneinfo, hashlib, sqlite3, numbers, queue"
    run = auto_sandbox.run(imports + "\nprint(decimal.Decimal('0.1') * 3)")
    assert run.stdout == b"0.3\n", run
    kept = "with open('a', 'w') as f: f.write('1')\nprint(open('a').read(), __name__)"
    assert auto_sandbox.run(kept).stdout == b"1 __main__\n"
    assert auto_sandbox.run("print('\\u00e4\\U0001f600')").stdout == "ä😀\n".encode()


def test_what_the_filter_lets_pass(sandbox: Sandbox) -> None:
    program = """
import asyncio, fcntl, os, tempfile
from concurrent.futures import ThreadPoolExecutor
async def later(): await asyncio.sleep(0.001); return 6
print(asyncio.run(later()), list(ThreadPoolExecutor(2).map(abs, [-7])))
print(os.isatty(0), fcntl.fcntl(0, fcntl.F_GETFD))
with tempfile.TemporaryFile("w+") as file:
    file.write("abc")
    file.truncate(1)
    file.seek(0)
    print(file.read())
with open("a", "w") as file: file.write("1")
os.rename("a", "b")
with open("b", "r+") as file: fcntl.lockf(file, fcntl.LOCK_EX); print(file.read())
os.mkdir("c"); os.rmdir("c"); os.unlink("b")
"""
    run = sandbox.run(program)
    assert run.stdout == b"6 [7]\nFalse 0\na\n1\n", run


def test_same_program_same_output(auto_sandbox: Sandbox) -> None:
    program = "print({str(i) for i in range(50)}, hash('a'))"
    first = auto_sandbox.run(program)
    auto_sandbox.close()
    assert auto_sandbox.run(program).stdout == first.stdout


def test_functions_are_called_and_answer_in_json(auto_sandbox: Sandbox) -> None:
    source = """
print("noise")
class Solution:
    def add(self, a, b): return (a + b, [None])
if __name__ == "__main__": 1 / 0
"""
    assert auto_sandbox.call_function(source, "add", [1, 2]).value == b"[3, [null]]"
    assert auto_sandbox.call_function("def add(a, b): return a + b", "add", ["x", "y"]).value == b'"xy"'
    for broken in ("def other(): pass", "def add(a, b): return object()", "def add(a): return a", "1 / 0"):
        run = auto_sandbox.call_function(broken, "add", [1, 2])
        assert run.code == 1
        assert run.value == b""
    assert auto_sandbox.call_function("def add(a, b): return '3' * 10 ** 7", "add", [1, 2]).status == "output"


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_nothing_is_left_when_the_grader_is_killed(level: str, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import Sandbox
sandbox = Sandbox({level!r}, Limits(wall_seconds=100.0))
sandbox.run("print()")
print("ready", flush=True)
sandbox.run("import time; time.sleep(1000)")
"""
    grader = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert grader.stdout is not None
    assert grader.stdout.readline() == b"ready\n"
    left = descendants(grader.pid)
    assert left
    grader.kill()
    grader.wait()
    grader.stdout.close()
    deadline = time.monotonic() + 600
    while any(is_alive(pid) for pid in left) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, "waited 600 s for the sandbox to end after its grader"
        time.sleep(0.02)


def test_closing_leaves_nothing(sandbox: Sandbox) -> None:
    sandbox.run("open('left', 'w').close()")
    assert sandbox._supervisor is not None
    pids = {supervisor_pid(sandbox), *descendants(supervisor_pid(sandbox))}
    directory = sandbox._supervisor.directory
    sandbox.close()
    for pid in pids:
        wait_for_exit(pid)
    assert directory is None or not Path(directory).exists()


def test_a_killed_supervisor_is_replaced(auto_sandbox: Sandbox) -> None:
    auto_sandbox.run("print()")
    os.kill(supervisor_pid(auto_sandbox), signal.SIGKILL)
    assert auto_sandbox.run("print(6 * 7)").stdout == b"42\n"


def test_a_forked_grader_starts_its_own_supervisor(auto_sandbox: Sandbox) -> None:
    auto_sandbox.run("print()")
    first = supervisor_pid(auto_sandbox)
    pid = os.fork()
    if pid == 0:
        own = auto_sandbox.run("print(6 * 7)").stdout == b"42\n" and supervisor_pid(auto_sandbox) != first
        auto_sandbox.close()
        os._exit(0 if own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert auto_sandbox.run("print(6 * 7)").stdout == b"42\n"
    assert supervisor_pid(auto_sandbox) == first


def test_levels_that_do_not_work_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="choose one of auto, bubblewrap, namespaces, rlimits"):
        choose_level("chroot")
    monkeypatch.setenv("PATH", "")
    assert unavailable_reason.__wrapped__("bubblewrap") == "bwrap is not installed"
    monkeypatch.setattr(sandbox_module, "unavailable_reason", lambda level: "not here")
    with pytest.raises(ConfigError, match=r"env\.sandbox=namespaces: .*not here\); install bubblewrap"):
        choose_level.__wrapped__("namespaces")
    monkeypatch.setattr(sandbox_module, "unavailable_reason", lambda level: None if level == "rlimits" else "not here")
    assert choose_level.__wrapped__("auto") == "rlimits"


def test_directories_are_emptied_however_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for depth in range(300):
        os.mkdir("nested-directory")
        os.chdir("nested-directory")
        Path("file").write_text("x")
        os.chmod("..", 0o700 if depth == 0 else 0o300)
    (tmp_path / "link").symlink_to(ROOT)
    empty_directory(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert (ROOT / "pyproject.toml").exists()
