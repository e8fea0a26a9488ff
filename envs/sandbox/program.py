"""The process of one test: it drops its privileges, limits itself, and then runs the program that a model wrote."""

import atexit
import builtins
import json
import marshal
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from envs.sandbox import isolation, syscall_filter
from envs.sandbox.assertions.answer_side import run_answer
from envs.sandbox.assertions.tests_side import run_tests

READY = b"R"
VALUE_FD = 3
SETUP_FAILED = 113
MAIN_STACK_BYTES = 64 << 20
OTHER_STACK_BYTES = 8 << 20
"""Of each thread of another interpreter."""
CPU_GRACE_SECONDS = 1
"""From SIGXCPU, which says why a program ended, to SIGKILL, for those that ignore it."""


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Tested:
    """What a fork of the supervisor becomes."""

    def __init__(self, settings: dict[str, Any], libraries: list[int]) -> None:
        self.settings, self.libraries = settings, libraries

    def run(self, given: list[int]) -> NoReturn:
        """given: descriptors of the program, standard input, standard output, standard error, the function's value."""
        source, function, arguments = self._begin(given[0], given[1:])
        if self.settings["interpreter"]:
            run_interpreter(self.settings["interpreter"], self.settings["file"], source)
        run_program(source, function, arguments)

    def answer(self, given: list[int], channel: int) -> NoReturn:
        """The program as a module that tests in another process call by way of a channel. given: as for `run`."""
        source, _, preamble = self._begin(given[0], [*given[1:4], channel])
        offer_exit()
        run_answer(preamble, source, VALUE_FD)

    def check(self, given: list[int], channel: int) -> NoReturn:
        """The tests of `answer`, whose verdicts are the value. given: as for `run`, and the tests."""
        tests = self._begin(given[5], [*given[1:5], channel])
        if os.read(VALUE_FD + 1, len(READY)) != READY:
            os._exit(SETUP_FAILED)
        run_tests(tests, VALUE_FD + 1, VALUE_FD)

    def _begin(self, file: int, streams: list[int]) -> Any:
        """What stands in the file, once this process is shut in; the value's stream then holds `READY`."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            with open(file, "rb") as opened:
                job = marshal.load(opened)
            kept = [os.dup2(fd, 100 + place) for place, fd in enumerate((*streams, *self.libraries))]
            for place, fd in enumerate(kept):
                os.dup2(fd, place)
            os.closerange(len(kept), 1 << 16)
            os.chdir(self.settings["directory"])
            self._limit()
            self._confine(len(streams))
            os.write(VALUE_FD, READY)
            return job
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(SETUP_FAILED)

    def _limit(self) -> None:
        settings = self.settings
        other = bool(settings["interpreter"])  # one such as node takes far more addresses than memory
        limits = {
            resource.RLIMIT_DATA if other else resource.RLIMIT_AS: settings["memory_bytes"],
            resource.RLIMIT_STACK: OTHER_STACK_BYTES if other else MAIN_STACK_BYTES,
            resource.RLIMIT_NOFILE: settings["open_files"],
            resource.RLIMIT_FSIZE: settings["file_bytes"],
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if settings["level"] != "rlimits" or os.geteuid() == 0:
            limits[resource.RLIMIT_NPROC] = settings["threads"]
        for kind, wanted in limits.items():
            allowed = resource.getrlimit(kind)[1]
            value = wanted if allowed == resource.RLIM_INFINITY else min(wanted, allowed)
            resource.setrlimit(kind, (value, value))
        allowed = resource.getrlimit(resource.RLIMIT_CPU)[1]
        killed = settings["cpu_seconds"] + CPU_GRACE_SECONDS
        most = killed if allowed == resource.RLIM_INFINITY else min(killed, allowed)
        resource.setrlimit(resource.RLIMIT_CPU, (min(settings["cpu_seconds"], most), most))

    def _confine(self, first_library: int) -> None:
        settings = self.settings
        readable = isolation.readable_paths()
        if settings["files"] == "landlock":
            isolation.confine_files(readable, ".", settings["landlock"])
        isolation.drop_privileges(settings["user"])
        if settings["level"] == "rlimits":
            isolation.die_with_parent()
            if self.libraries and not os.access(os.__file__, os.R_OK):
                _import_through_open_directories(first_library)
        if settings["filter"]:
            syscall_filter.install(isolation.libc, settings["files"], bool(settings["interpreter"]))


def _import_through_open_directories(fd: int) -> None:
    """For an interpreter in a directory that only root may enter: imports go by way of what root had opened."""
    moved = {}
    for path in [path for path in sys.path if os.path.isabs(path) and not path.endswith(".zip")]:
        moved[path] = f"/proc/self/fd/{fd}"
        fd += 1
    sys.path[:] = moved.values()
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        package = vars(module).get("__path__")
        if package is not None:
            root = max((path for path in moved if package[0].startswith(path)), key=len, default=None)
            if root is not None:
                module.__path__ = [moved[root] + package[0][len(root) :]]


def run_program(source: bytes, function: str | None, arguments: str) -> NoReturn:
    """Runs the program as a script, or as a module of which one function is called; ends the process."""
    code = 1
    try:
        name = "__main__" if function is None else "solution"
        module = type(sys)(name)
        sys.modules[name] = module
        sys.argv = ["solution.py"]
        offer_exit()
        try:
            exec(compile(source, "solution.py", "exec"), module.__dict__)
            if function is not None:
                names = module.__dict__
                called = names[function] if function in names else getattr(names["Solution"](), function)
                write_all(VALUE_FD, json.dumps(called(*json.loads(arguments))).encode())
            code = 0
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code & 0xFF if isinstance(stop.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        # What the interpreter does at its end: wait for threads, run exit functions, flush.
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            code = code or 120
    finally:
        os._exit(code)


def run_interpreter(interpreter: Sequence[str], file: str, source: bytes) -> NoReturn:
    """Becomes an interpreter that runs the program."""
    try:
        with open(file, "wb") as opened:
            opened.write(source)
        directory = os.getcwd()
        names = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"}
        os.execve(interpreter[0], [*interpreter, file], names)
    except OSError as error:
        os.write(2, f"{interpreter[0]}: {error}\n".encode())
    finally:
        os._exit(SETUP_FAILED)


def offer_exit() -> None:
    """`exit` and `quit`, which the interpreter has from `site`, and this one has no `site`."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
