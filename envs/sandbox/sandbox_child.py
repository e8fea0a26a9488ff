"""Process forked by the supervisor, which confines itself and runs a program or its tests."""

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
from envs.sandbox.assertions.program_process import serve_program
from envs.sandbox.assertions.tests_process import run_tests

READY = b"R"
VALUE_FD = 3
SETUP_FAILED = 113
MAIN_STACK_BYTES = 64 << 20
OTHER_STACK_BYTES = 8 << 20
"""Stack of each thread in an interpreter other than Python."""
CPU_GRACE_SECONDS = 1
"""Time from SIGXCPU, which marks a program as over its CPU limit, to SIGKILL for programs that ignore SIGXCPU."""


def write_all(fd: int, data: bytes) -> None:
    """Writes all bytes to a descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class SandboxChild:
    """A fork of the supervisor that runs a program or its tests.

    library_fds: open directories of `sys.path`, where only root may enter these.
    """

    def __init__(self, settings: dict[str, Any], library_fds: list[int]) -> None:
        self.settings, self.library_fds = settings, library_fds

    def run(self, descriptors: list[int]) -> NoReturn:
        """Runs the program, or one of its functions.

        descriptors: the program, standard input, standard output, standard error, the function's value.
        """
        source, function, arguments = self._confine_and_load(descriptors[0], descriptors[1:])
        if self.settings["interpreter"]:
            run_interpreter(self.settings["interpreter"], self.settings["file"], source)
        run_program(source, function, arguments)

    def serve(self, descriptors: list[int], channel: int) -> NoReturn:
        """Loads the program as a module that tests in another process call through a channel.

        descriptors: as for `run`.
        """
        source, _, preamble = self._confine_and_load(descriptors[0], [*descriptors[1:4], channel])
        define_exit_builtins()
        serve_program(preamble, source, VALUE_FD)

    def test(self, descriptors: list[int], channel: int) -> NoReturn:
        """Runs tests on the program of `serve`, and writes their verdicts as the value.

        descriptors: as for `run`, then the tests.
        """
        tests = self._confine_and_load(descriptors[5], [*descriptors[1:5], channel])
        if os.read(VALUE_FD + 1, len(READY)) != READY:
            os._exit(SETUP_FAILED)
        run_tests(tests, VALUE_FD + 1, VALUE_FD)

    def _confine_and_load(self, file: int, streams: list[int]) -> Any:
        """Confines this process, and returns the content of `file`. Afterwards the value's stream holds `READY`."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            with open(file, "rb") as source:
                job = marshal.load(source)
            duplicates = [os.dup2(fd, 100 + place) for place, fd in enumerate((*streams, *self.library_fds))]
            for place, fd in enumerate(duplicates):
                os.dup2(fd, place)
            os.closerange(len(duplicates), 1 << 16)
            os.chdir(self.settings["directory"])
            self._set_limits()
            self._drop_access(len(streams))
            os.write(VALUE_FD, READY)
            return job
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(SETUP_FAILED)

    def _set_limits(self) -> None:
        settings = self.settings
        has_interpreter = bool(settings["interpreter"])  # node and the like take far more addresses than memory
        limits = {
            resource.RLIMIT_DATA if has_interpreter else resource.RLIMIT_AS: settings["memory_bytes"],
            resource.RLIMIT_STACK: OTHER_STACK_BYTES if has_interpreter else MAIN_STACK_BYTES,
            resource.RLIMIT_NOFILE: settings["open_files"],
            resource.RLIMIT_FSIZE: settings["file_bytes"],
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if settings["level"] != "rlimits" or os.geteuid() == 0:
            limits[resource.RLIMIT_NPROC] = settings["threads"]
        for kind, limit in limits.items():
            maximum = resource.getrlimit(kind)[1]
            value = limit if maximum == resource.RLIM_INFINITY else min(limit, maximum)
            resource.setrlimit(kind, (value, value))
        maximum = resource.getrlimit(resource.RLIMIT_CPU)[1]
        kill_seconds = settings["cpu_seconds"] + CPU_GRACE_SECONDS
        hard_limit = kill_seconds if maximum == resource.RLIM_INFINITY else min(kill_seconds, maximum)
        resource.setrlimit(resource.RLIMIT_CPU, (min(settings["cpu_seconds"], hard_limit), hard_limit))

    def _drop_access(self, first_library: int) -> None:
        settings = self.settings
        readable = isolation.readable_paths()
        if settings["files"] == "landlock":
            isolation.confine_files(readable, ".", settings["landlock"])
        isolation.drop_privileges(settings["user"])
        if settings["level"] == "rlimits":
            isolation.die_with_parent()
            if self.library_fds and not os.access(os.__file__, os.R_OK):
                _redirect_imports_to_open_directories(first_library)
        if settings["filter"]:
            syscall_filter.install(isolation.libc, settings["files"], bool(settings["interpreter"]))


def _redirect_imports_to_open_directories(fd: int) -> None:
    """Redirects imports to library directories that root opened, starting at descriptor `fd`.

    Needed for an interpreter in a directory that only root may enter.
    """
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
    """Runs a program as a script, or calls one function of the program.

    Ends the process. arguments: a JSON array, for `function`.
    """
    code = 1
    try:
        name = "__main__" if function is None else "solution"
        module = type(sys)(name)
        sys.modules[name] = module
        sys.argv = ["solution.py"]
        define_exit_builtins()
        try:
            exec(compile(source, "solution.py", "exec"), module.__dict__)
            if function is not None:
                names = module.__dict__
                if function not in names and "Solution" not in names:
                    raise NameError(f"name {function!r} is not defined")
                target = names[function] if function in names else getattr(names["Solution"](), function)
                write_all(VALUE_FD, json.dumps(target(*json.loads(arguments))).encode())
            code = 0
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code & 0xFF if isinstance(stop.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        # The interpreter's own exit: wait for threads, run exit functions, flush.
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
    """Replaces this process by an interpreter that runs the program."""
    try:
        with open(file, "wb") as script:
            script.write(source)
        directory = os.getcwd()
        names = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"}
        os.execve(interpreter[0], [*interpreter, file], names)
    except OSError as error:
        os.write(2, f"{interpreter[0]}: {error}\n".encode())
    finally:
        os._exit(SETUP_FAILED)


def define_exit_builtins() -> None:
    """Defines `exit` and `quit`, which come from the module `site` that this interpreter lacks."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
