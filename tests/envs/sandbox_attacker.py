"""Grader that runs hostile programs in the sandbox and reports their successes.

    python -m tests.envs.sandbox_attacker LEVEL LANDLOCK FOLDER

The grader has files and a victim process. It prints two JSON lists: actions that the programs report as
successful, and objects that have changed. Both are empty if the sandbox holds. LANDLOCK is the newest version
of Landlock's interface that the kernel pretends to have.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from config.schema import errors
from envs.sandbox import isolation, syscall_filter
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import Sandbox

PREAMBLE = """
import ctypes, errno, fcntl, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
done = []
def attempt(name, deed):
    try:
        result = deed()
    except (OSError, ValueError, RuntimeError, ImportError):
        return
    if result != -1:
        done.append(name)
def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments)
"""

REFUSED_CALLS = """
for name, number in CALLS.items():
    result = call(number, 0, 0, 0, 0, 0, 0)
    if result != -1 or ctypes.get_errno() != errno.EPERM:
        done.append(f"{name}: {result}, {errno.errorcode.get(ctypes.get_errno())}")
print(done)
"""

PROCESSES = """
import subprocess
attempt("fork", lambda: os.fork() or os._exit(0))
attempt("forkpty", lambda: os.forkpty())
attempt("posix_spawn", lambda: os.posix_spawn(sys.executable or "/bin/true", ["x"], {}))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("subprocess", lambda: subprocess.run(["/bin/true"]))
attempt("clone", lambda: call(CLONE, signal.SIGCHLD, 0, 0, 0, 0))
attempt("clone3", lambda: call(435, (ctypes.c_uint64 * 8)(0, 0, 0, 0, signal.SIGCHLD), 64))
print(done)
"""

SOCKETS = """
def connected(family, address):
    with socket.socket(family) as made:
        made.settimeout(0.5)
        made.connect(address)
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        attempt(f"socket {family} {kind}", lambda: socket.socket(family, kind))
attempt("tcp", lambda: connected(socket.AF_INET, ("127.0.0.1", PORT)))
attempt("unix", lambda: connected(socket.AF_UNIX, PATH))
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    attempt(f"pair {kind}", lambda: socket.socketpair(socket.AF_UNIX, kind))
a, b = socket.socketpair()
a.send(b"x")
assert b.recv(1) == b"x"
for name, target in (("path", PATH), ("abstract", ABSTRACT)):
    attempt(f"{name} sendto", lambda: a.sendto(b"x", target))
    attempt(f"{name} sendmsg", lambda: a.sendmsg([b"x"], [], 0, target))
    attempt(f"{name} connect", lambda: a.connect(target))
attempt("bind", lambda: a.bind("made"))
attempt("listen", lambda: a.listen())
print(done)
"""

SHARED = """
libc.shmat.restype = ctypes.c_void_p
FAILED = ctypes.c_void_p(-1).value
memory, queue, locks = IDS
def written():
    place = libc.shmat(memory, None, 0)
    if place in (None, FAILED):
        return -1
    ctypes.memmove(place, b"gone", 4)
attempt("shmat", written)
attempt("msgsnd", lambda: libc.msgsnd(queue, ctypes.byref(ctypes.c_long(1)), 0, 0o4000))
attempt("semop", lambda: libc.semop(locks, struct.pack("Hhh", 0, 1, 0o4000), 1))
attempt("shmctl", lambda: libc.shmctl(memory, 0, None))
attempt("msgctl", lambda: libc.msgctl(queue, 0, None))
attempt("semctl", lambda: libc.semctl(locks, 0, 0))
attempt("inotify", lambda: libc.inotify_init1(0))
print(done)
"""

SIGNALS = """
a, b = socket.socketpair()
read, write = os.pipe()
for target in (VICTIM, -VICTIM, os.getppid(), 1, -1, 0):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    attempt(f"kill {target}", lambda: os.kill(target, signal.SIGTERM))
    attempt(f"tkill {target}", lambda: call(TKILL, target, 9))
    attempt(f"tgkill {target}", lambda: call(TGKILL, target, target, 9))
    attempt(f"pidfd {target}", lambda: os.pidfd_open(target))
    for fd in (a.fileno(), read, 0):
        attempt(f"F_SETOWN {fd}", lambda: fcntl.fcntl(fd, fcntl.F_SETOWN, target))
        attempt(f"F_SETOWN_EX {fd}", lambda: fcntl.fcntl(fd, 15, struct.pack("ii", 1, target)))
        attempt(f"F_SETSIG {fd}", lambda: fcntl.fcntl(fd, fcntl.F_SETSIG, 9))
        for request in (0x8901, 0x8902):
            attempt(f"ioctl {request:x} {fd}", lambda: fcntl.ioctl(fd, request, struct.pack("i", target)))
        attempt(f"FIOASYNC {fd}", lambda: fcntl.ioctl(fd, 0x5452, struct.pack("i", 1)))
        attempt(f"O_ASYNC {fd}", lambda: fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC))
        attempt(f"lease {fd}", lambda: fcntl.fcntl(fd, 1024, fcntl.F_RDLCK))
        attempt(f"notify {fd}", lambda: fcntl.fcntl(fd, 1026, 0x8000001F))
b.send(b"x")
os.write(write, b"x")
import resource
attempt("prlimit", lambda: resource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0)))
attempt("setpriority", lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 19))
attempt("affinity", lambda: os.sched_setaffinity(VICTIM, {0}))
attempt("scheduler", lambda: os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0)))
attempt("PDEATHSIG", lambda: libc.prctl(1, 0, 0, 0, 0))
print(done)
"""

FILES = """
import shutil
FILE, FOLDER = KEPT
library = os.__file__
for path in (FILE, FOLDER, library, os.path.dirname(library)):
    for name, deed in {
        "chmod": lambda: os.chmod(path, 0),
        "chown": lambda: os.chown(path, os.getuid(), os.getgid()),
        "lchown": lambda: os.lchown(path, os.getuid(), os.getgid()),
        "utime": lambda: os.utime(path, (1, 1)),
        "truncate": lambda: os.truncate(path, 0),
        "open and truncate": lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
        "open for ioctl and truncate": lambda: os.open(path, 3 | os.O_TRUNC),
        "write": lambda: os.open(path, os.O_WRONLY),
        "append": lambda: os.open(path, os.O_RDWR | os.O_APPEND),
        "setxattr": lambda: os.setxattr(path, "user.made", b"x"),
        "removexattr": lambda: os.removexattr(path, "user.kept"),
        "unlink": lambda: os.unlink(path),
        "rmdir": lambda: os.rmdir(path),
        "rename": lambda: os.rename(path, "taken"),
        "rename inside": lambda: os.rename(path, path + "2"),
        "link": lambda: os.link(path, "linked"),
        "make in it": lambda: os.mkdir(path + "/made"),
        "create in it": lambda: open(path + "/made", "w"),
        "symlink in it": lambda: os.symlink("/", path + "/made"),
        "fifo in it": lambda: os.mkfifo(path + "/made"),
        "fifo": lambda: os.mkfifo("fifo"),
        "chroot": lambda: os.chroot(path),
    }.items():
        attempt(f"{name} {path}", deed)
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    for name, deed in {
        "fchmod": lambda: os.fchmod(fd, 0),
        "fchown": lambda: os.fchown(fd, os.getuid(), os.getgid()),
        "futimens": lambda: os.utime(fd, (1, 1)),
        "fsetxattr": lambda: os.setxattr(fd, "user.made", b"x"),
        "ftruncate": lambda: os.ftruncate(fd, 0),
        "FS_IOC_SETFLAGS": lambda: fcntl.ioctl(fd, 0x40086602, struct.pack("l", 0x80)),
    }.items():
        attempt(f"{name} {path}", deed)
print(done)
"""

SECRETS = """
def readable(path):
    with open(path, "rb") as file:
        return len(file.read(1)) or -1
for path in (KEPT[0], PROJECT, "/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/environ"):
    attempt(f"read {path}", lambda: readable(path))
for pid in PIDS:
    for name in ("mem", "environ", "maps", "fd/0", "cmdline"):
        attempt(f"read {name} of {pid}", lambda: readable(f"/proc/{pid}/{name}"))
    buffer = ctypes.create_string_buffer(8)
    attempt(f"process_vm_readv {pid}", lambda: call(VM_READ, pid, buffer, 1, buffer, 1, 0))
for fd in range(4, 64):
    attempt(f"descriptor {fd}", lambda: os.read(fd, 1))
print(sorted(set(os.environ) - {"HOME", "LC_CTYPE", "PWD", "PYTHONHASHSEED", "TMPDIR"}) + done)
"""


def make_shared() -> tuple[int, int, int]:
    """Creates System V shared memory, a message queue and a semaphore; returns their numbers."""
    libc = isolation.libc
    return libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)


def remove_shared(ids: tuple[int, int, int]) -> list[str]:
    """Removes the objects of `make_shared`; returns the changes that a program made to them."""
    libc = isolation.libc
    libc.shmat.restype = ctypes.c_void_p
    memory, queue, locks = ids
    changed = []
    place = libc.shmat(memory, None, 0)
    if place == ctypes.c_void_p(-1).value or ctypes.string_at(place, 4) != bytes(4):
        changed.append("shared memory")
    if libc.msgrcv(queue, ctypes.create_string_buffer(64), 0, 0, 0o4000) == 0:
        changed.append("message queue")
    if libc.semctl(locks, 0, 12) != 0:  # GETVAL
        changed.append("semaphore")
    removed = libc.shmctl(memory, 0, None), libc.msgctl(queue, 0, None), libc.semctl(locks, 0, 0)
    return changed + ([f"removed before: {removed}"] if any(removed) else [])


def build_programs(
    level: str, files: str, victim: int, port: int, folder: Path, ids: tuple[int, int, int]
) -> dict[str, str]:
    column = syscall_filter.MACHINES[os.uname().machine][1]
    calls = {name: numbers[column] for name, numbers in syscall_filter.refused_calls(files).items() if numbers[column]}
    kept = [str(folder / "kept"), str(folder / "folder")]
    values: dict[str, Any] = {
        "CALLS": calls, "CLONE": syscall_filter.CLONE[column],
        "TKILL": syscall_filter.ALWAYS_REFUSED["tkill"][column], "TGKILL": syscall_filter.TGKILL[column],
        "VM_READ": syscall_filter.ALWAYS_REFUSED["process_vm_readv"][column], "VICTIM": victim, "PORT": port,
        "PATH": str(folder / "socket"), "ABSTRACT": f"\0sandbox {os.getpid()}", "IDS": ids, "KEPT": kept,
        "PROJECT": str(errors.__file__), "PIDS": [os.getpid(), victim],
    }  # fmt: skip
    named = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    chosen = {
        "refused calls": REFUSED_CALLS, "processes": PROCESSES, "sockets": SOCKETS, "signals": SIGNALS,
        "shared": SHARED, "files": FILES,
    }  # fmt: skip
    if level != "rlimits" or files == "landlock":
        chosen["secrets"] = SECRETS
    return {name: PREAMBLE + named + text for name, text in chosen.items()}


def file_state(folder: Path) -> dict[str, Any]:
    """Returns the state of files that no program may change, without access times."""
    states: dict[str, Any] = {}
    for path in (folder / "kept", folder / "folder", Path(os.__file__), Path(os.__file__).parent):
        status = path.stat()
        states[str(path)] = (
            status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
        )  # fmt: skip
    return states | {"listed": sorted(path.name for path in (folder / "folder").iterdir())}


def main(level: str, landlock: int, folder: Path) -> None:
    real = isolation.landlock_version()
    isolation.landlock_version = lambda: min(real, landlock)
    (folder / "kept").write_text("kept")
    (folder / "folder").mkdir()
    for path in ("kept", "folder"):
        (folder / path).chmod(0o777)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    listening = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    local.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    abstract.bind(f"\0sandbox {os.getpid()}")
    files = "root of its own" if level != "rlimits" else "landlock" if min(real, landlock) else "none"
    before, ids = file_state(folder), make_shared()
    try:
        hostile = build_programs(level, files, victim.pid, listening.getsockname()[1], folder, ids)
        successes = run_attacks(level, hostile)
        time.sleep(0.05)
        ended = victim.poll()
    finally:
        victim.kill()
        victim.wait()
        shared = remove_shared(ids)
    changed = [] if ended is None else [f"the victim ended with {ended}"]
    changed += shared
    after = file_state(folder)
    changed += [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    for heard in (listening, local, abstract):
        heard.setblocking(False)
        try:
            heard.accept() if heard is listening else heard.recv(1)
            changed.append(f"{heard} was reached")
        except BlockingIOError:
            pass
    print(json.dumps([successes, changed]))


def run_attacks(level: str, hostile: dict[str, str]) -> list[str]:
    """Runs hostile programs; returns the output of each program that reports a success.

    One supervisor must survive all programs.
    """
    successes = []
    with Sandbox(level, Limits(wall_seconds=60.0, cpu_seconds=30)) as sandbox:
        assert sandbox.run("print(1)").stdout == b"1\n"
        assert sandbox._supervisor is not None
        supervisor_pid = sandbox._supervisor.process.pid
        for name, program in hostile.items():
            run = sandbox.run(program)
            if run.stdout != b"[]\n":
                successes.append(f"{name}: {run.stdout.decode()} {run.stderr.decode()[-500:]} {run.status} {run.code}")
        assert sandbox.run("print(1)").stdout == b"1\n"
        if sandbox._supervisor.process.pid != supervisor_pid:
            successes.append("the supervisor had to be replaced")
    return successes


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
