"""Programs that try to harm: each ends within its limits, learns nothing, and leaves no process and no file."""

import ast
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.errors import ConfigError
from envs import sandbox as sandbox_module
from envs import sandbox_filter
from envs.sandbox import LEVELS, Limits, Sandbox, choose_level, why_not
from envs.sandbox_runner import empty

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(
    wall_seconds=10.0,
    cpu_seconds=1,
    memory_mib=256,
    threads=16,
    file_mib=2,
    disk_mib=4,
    output_mib=1,
    open_files=32,
)
WORKING = [level for level in LEVELS if sys.platform.startswith("linux") and why_not(level) is None]
SHUT_IN = [(level, ()) for level in WORKING] + [
    # what is beneath the filter must hold by itself where a process-number namespace ends all
    (level, ("filter",))
    for level in WORKING
    if level != "rlimits"
]


def _name(case: tuple[str, tuple[str, ...]]) -> str:
    return "-without-".join([case[0], *case[1]])


@pytest.fixture(scope="module", params=SHUT_IN, ids=_name)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    level, without = request.param
    with Sandbox(level, LIMITS, without) as made:
        yield made


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    with Sandbox("auto", LIMITS) as made:
        yield made


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _descendants(pid: int) -> set[int]:
    parents = _parents()
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def _supervisor(sandbox: Sandbox) -> int:
    assert sandbox._session is not None
    return sandbox._session.process.pid


def _assert_unharmed(sandbox: Sandbox) -> None:
    """The next program runs as if nothing had happened, alone and in an empty directory."""
    pid = _supervisor(sandbox)
    run = sandbox.run("import os; print(6 * 7, os.listdir('.'))")
    assert run.stdout == b"42 []\n"
    assert _supervisor(sandbox) == pid, "the supervisor had to be replaced"
    assert len(_descendants(pid)) <= 2, "processes are left over"
    if sandbox._session is not None and sandbox._session.directory is not None:
        assert os.listdir(sandbox._session.directory) == []


ENDLESS = {
    "infinite loop": "while True: pass",
    "ignored signals": """
import signal
for number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
}


SLOW_IN_C = {
    "catastrophic regex": "import re; print(re.match(r'(a+)+$', 'a' * 40 + 'b'))",
    "power tower": "print(len(str(9 ** 9 ** 9)))",
}


@pytest.mark.parametrize("name", SLOW_IN_C)
def test_what_holds_the_interpreter_is_ended_too(strongest: Sandbox, name: str) -> None:
    run = strongest.run(SLOW_IN_C[name])
    assert (run.status, run.stdout) == ("time", b"")
    _assert_unharmed(strongest)


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_programs_are_ended(sandbox: Sandbox, name: str) -> None:
    run = sandbox.run(ENDLESS[name])
    assert run.status == "time"
    assert run.stdout == b""
    _assert_unharmed(sandbox)


def test_sleepers_are_ended(sandbox: Sandbox) -> None:
    run = sandbox.run("import os, time\nos.closerange(0, 64)\ntime.sleep(1000)", wall_seconds=0.3)
    assert run.status == "time"
    _assert_unharmed(sandbox)


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
    if "filter" in sandbox.without:
        assert run.status == "time" or int(run.stdout) <= LIMITS.threads
    else:
        assert run.stdout == b"0\n"
    _assert_unharmed(sandbox)


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
    assert run.stdout == (b"started\n" if "filter" in sandbox.without else b"refused\n")
    _assert_unharmed(sandbox)


def test_other_programs_cannot_be_started(sandbox: Sandbox) -> None:
    run = sandbox.run("import subprocess; print(subprocess.run(['/bin/sh', '-c', 'echo out']))")
    assert b"out" not in run.stdout
    assert run.code == 1
    _assert_unharmed(sandbox)


@pytest.mark.parametrize(
    "program",
    [
        "data = bytearray(10 ** 10)",
        "held = []\nwhile True: held.append(bytearray(1 << 20))",
        "held = [0] * 10 ** 9",
        "import mmap\nheld = [mmap.mmap(-1, 1 << 20) for _ in range(10 ** 5)]",
    ],
)
def test_memory_is_limited(sandbox: Sandbox, program: str) -> None:
    run = sandbox.run(program + "\nprint('allocated')")
    assert run.stdout == b""
    assert not run.succeeded
    _assert_unharmed(sandbox)


def test_five_gigabytes_of_output_are_cut_short(sandbox: Sandbox) -> None:
    run = sandbox.run("line = '3' * (1 << 20)\nfor _ in range(5000): print(line)")
    assert run.status == "output"
    assert len(run.stdout) <= LIMITS.output_mib << 20
    _assert_unharmed(sandbox)


def test_errors_are_kept_in_part(sandbox: Sandbox) -> None:
    run = sandbox.run("import sys\nfor _ in range(5000): sys.stderr.write('e' * 1000)\nprint('end')")
    assert run.stdout == b"end\n"
    assert 0 < len(run.stderr) <= 8192


FILLED = """
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
    run = sandbox.run(FILLED.replace("SIZE", str(blocks)))
    if run.status == "finished":
        total, reason = map(int, run.stdout.split())
        assert total <= LIMITS.disk_mib << 20
        assert reason in (errno.ENOSPC, errno.EFBIG, errno.EMFILE)
    else:
        assert run.status == "disk"
    _assert_unharmed(sandbox)


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
    _assert_unharmed(sandbox)


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
    _assert_unharmed(sandbox)


def test_graders_files_and_memory_are_out_of_sight(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "expected.json"
    secret.write_text("the expected output")
    for parent in (secret, *secret.parents):
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    run = sandbox.run(f"""
import os
wanted = [{str(secret)!r}, {str(ROOT / "pyproject.toml")!r}, "/etc/passwd", "/etc/shadow"]
for pid in {[os.getpid(), _parents()[os.getpid()]]} + [os.getppid(), 1]:
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


@pytest.mark.skipif("rlimits" not in WORKING, reason="level rlimits does not work here")
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


def test_deep_recursion_ends(sandbox: Sandbox) -> None:
    run = sandbox.run(
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1) + 1\nprint(f(0))"
    )
    assert run.stdout == b""
    assert not run.succeeded
    _assert_unharmed(sandbox)


def test_exit_is_what_it_is(strongest: Sandbox) -> None:
    assert strongest.run("import os; print(3, flush=True); os._exit(0)").stdout == b"3\n"
    assert strongest.run("import os; os._exit(0)").succeeded
    assert strongest.run("import sys; sys.exit(7)").code == 7
    assert strongest.run("import sys; sys.exit('why')").code == 1
    assert strongest.run("import sys; sys.exit = print; print(3)").stdout == b"3\n"
    assert strongest.run("import os; os.abort()").code == -signal.SIGABRT
    assert b"SyntaxError" in strongest.run("def f(:").stderr
    assert strongest.run("import os; os.close(1); print(3)").code == 120
    assert strongest.run("import atexit; atexit.register(print, 'late')").stdout == b"late\n"


def test_ordinary_programs_run(strongest: Sandbox) -> None:
    echoed = strongest.run("import sys; sys.stdout.write(sys.stdin.read()[::-1])", b"a\n" * 400_000)
    assert echoed.stdout == b"\na" * 400_000
    assert strongest.run("print(open(0).read())", b"x").stdout == b"x\n"
    threaded = """
import sys, threading
sys.setrecursionlimit(10 ** 6)
threading.stack_size(64 << 20)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
threading.Thread(target=lambda: print(depth(50000))).start()
"""
    assert strongest.run(threaded).stdout == b"50000\n"
    imports = "import decimal, fractions, zoneinfo, hashlib, sqlite3, numbers, queue"
    run = strongest.run(imports + "\nprint(decimal.Decimal('0.1') * 3)")
    assert run.stdout == b"0.3\n", run
    kept = "with open('a', 'w') as f: f.write('1')\nprint(open('a').read(), __name__)"
    assert strongest.run(kept).stdout == b"1 __main__\n"
    assert strongest.run("print('\\u00e4\\U0001f600')").stdout == "ä😀\n".encode()


def test_same_program_same_output(strongest: Sandbox) -> None:
    program = "print({str(i) for i in range(50)}, hash('a'))"
    first = strongest.run(program)
    strongest.close()
    assert strongest.run(program).stdout == first.stdout


def test_functions_are_called_and_answer_in_json(strongest: Sandbox) -> None:
    source = """
print("noise")
class Solution:
    def add(self, a, b): return (a + b, [None])
if __name__ == "__main__": 1 / 0
"""
    assert strongest.call(source, "add", [1, 2]).value == b"[3, [null]]"
    assert strongest.call("def add(a, b): return a + b", "add", ["x", "y"]).value == b'"xy"'
    for broken in ("def other(): pass", "def add(a, b): return object()", "def add(a): return a", "1 / 0"):
        run = strongest.call(broken, "add", [1, 2])
        assert run.code == 1
        assert run.value == b""
    assert strongest.call("def add(a, b): return '3' * 10 ** 7", "add", [1, 2]).status == "output"


@pytest.mark.parametrize("level", WORKING)
def test_nothing_is_left_when_the_grader_is_killed(level: str, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from envs.sandbox import Limits, Sandbox
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
    left = _descendants(grader.pid)
    assert left
    grader.kill()
    grader.wait()
    grader.stdout.close()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in left) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, "waited 30 s for the sandbox to end after its grader"
        time.sleep(0.02)


def test_closing_leaves_nothing(sandbox: Sandbox) -> None:
    sandbox.run("open('left', 'w').close()")
    assert sandbox._session is not None
    pids = {_supervisor(sandbox), *_descendants(_supervisor(sandbox))}
    directory = sandbox._session.directory
    sandbox.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert directory is None or not Path(directory).exists()


def test_a_killed_supervisor_is_replaced(strongest: Sandbox) -> None:
    strongest.run("print()")
    os.kill(_supervisor(strongest), signal.SIGKILL)
    assert strongest.run("print(6 * 7)").stdout == b"42\n"


def test_a_forked_grader_starts_its_own_supervisor(strongest: Sandbox) -> None:
    strongest.run("print()")
    supervisor = _supervisor(strongest)
    pid = os.fork()
    if pid == 0:
        own = strongest.run("print(6 * 7)").stdout == b"42\n" and _supervisor(strongest) != supervisor
        strongest.close()
        os._exit(0 if own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert strongest.run("print(6 * 7)").stdout == b"42\n"
    assert _supervisor(strongest) == supervisor


def test_levels_that_do_not_work_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="choose one of auto, bubblewrap, namespaces, rlimits"):
        choose_level("chroot")
    monkeypatch.setenv("PATH", "")
    assert why_not.__wrapped__("bubblewrap") == "bwrap is not installed"
    monkeypatch.setattr(sandbox_module, "why_not", lambda level: "not here")
    with pytest.raises(
        ConfigError, match=r"env\.sandbox=namespaces: .* \(namespaces: not here\); install bubblewrap"
    ):
        choose_level.__wrapped__("namespaces")
    monkeypatch.setattr(sandbox_module, "why_not", lambda level: None if level == "rlimits" else "not here")
    assert choose_level.__wrapped__("auto") == "rlimits"


def test_directories_are_emptied_however_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for depth in range(300):
        os.mkdir("nested-directory")
        os.chdir("nested-directory")
        Path("file").write_text("x")
        os.chmod("..", 0o700 if depth == 0 else 0o300)
    (tmp_path / "link").symlink_to(ROOT)
    empty(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert (ROOT / "pyproject.toml").exists()


def _verdict(machine: str, number: int, arguments: tuple[int, ...] = (), without_files: bool = False) -> int:
    """Runs the filter on one system call, as the kernel would."""
    program = sandbox_filter.assemble(machine, 77, without_files)
    words = {0: number, 4: sandbox_filter.MACHINES[machine][0]}
    words |= {16 + 8 * place: value for place, value in enumerate(arguments)}
    at, held = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        if code == sandbox_filter.RETURN:
            return operand
        if code == sandbox_filter.LOAD:
            held, at = words.get(operand, 0), at + 1
            continue
        holds = {
            sandbox_filter.JUMP_EQUAL: held == operand,
            sandbox_filter.JUMP_GREATER_EQUAL: held >= operand,
            sandbox_filter.JUMP_ANY_BIT: bool(held & operand),
        }[code]
        at += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_refuses_what_it_should(machine: str, column: int) -> None:
    def verdict(number: tuple[int, int | None], *arguments: int, without_files: bool = False) -> int:
        wanted = number[column]
        assert wanted is not None
        return _verdict(machine, wanted, arguments, without_files)

    refuse, allow = sandbox_filter.REFUSE, sandbox_filter.ALLOW
    for numbers in sandbox_filter.REFUSED.values():
        assert numbers[column] is None or verdict(numbers) == refuse
    for numbers in sandbox_filter.FILE_CHANGES.values():
        if numbers[column] is not None:
            assert (verdict(numbers), verdict(numbers, without_files=True)) == (allow, refuse)
    assert verdict(sandbox_filter.CLONE, 17) == refuse
    assert verdict(sandbox_filter.CLONE, 0x3D0F00) == allow
    assert verdict(sandbox_filter.CLONE3) == sandbox_filter.UNKNOWN
    assert [verdict(sandbox_filter.KILL, pid) for pid in (77, 78, 0)] == [allow, refuse, refuse]
    assert [verdict(sandbox_filter.PRLIMIT, pid) for pid in (0, 77, 78)] == [allow, allow, refuse]
    assert [verdict(sandbox_filter.FCNTL, 3, command) for command in (3, 8, 10, 15)] == [allow] + [refuse] * 3
    assert [verdict(sandbox_filter.PRCTL, option) for option in (15, 1)] == [allow, refuse]
    opened = [
        verdict(sandbox_filter.OPENAT, 0, 0, flags, without_files=True)
        for flags in (os.O_RDONLY | os.O_CLOEXEC, os.O_WRONLY, os.O_RDWR, os.O_CREAT)
    ]
    assert opened == [allow, refuse, refuse, refuse]
    assert _verdict(machine, 0) == allow
    if machine == "x86_64":
        assert _verdict(machine, sandbox_filter.X32_BIT | 1) == refuse
