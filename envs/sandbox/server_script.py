"""Script that a sandbox server runs to call functions or tests of a tested program.

`envs.sandbox.remote_sandbox` sends this file's text as the program, followed by a call of `call_function` or
`run_tests`. The result appears on standard output behind a marker that the tested program cannot know. Standard
library only, because the script runs on the server's machine.
"""

import ctypes
import json
import os
import sys
from types import ModuleType
from typing import Any

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
PACKAGE = "envs.sandbox.assertions"
CAPABILITY_VERSION_3 = 0x20080522


def _read_request() -> Any:
    """Reads the JSON on standard input, and leaves standard input empty."""
    request = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return request


def call_function(source: str, function: str) -> None:
    """Calls a function of a module; prints the marker and the JSON of the result."""
    request = _read_request()
    module = ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(source, "solution.py", "exec"), vars(module))
    names = vars(module)
    if function not in names and "Solution" not in names:
        raise NameError(f"name {function!r} is not defined")
    target = names[function] if function in names else getattr(names["Solution"](), function)
    value = json.dumps(target(*request["arguments"]))
    sys.stdout.flush()
    os.write(1, f"\n{request['mark']}{value}".encode())


def run_tests(source: str, texts: dict[str, str]) -> None:
    """Runs tests on a program, in two processes; prints the marker and each test's verdict.

    The program's process is forked before the tests are read. That process loses root's rights for good, if it
    has them, and cannot look into this process. Its user stays, because other users may be unable to read
    Python's files.

    texts: source texts of the modules of `envs.sandbox.assertions`, by module name.
    """
    import socket

    for package in ("envs", "envs.sandbox", PACKAGE):
        sys.modules[package] = ModuleType(package)
    for name, text in texts.items():
        module = ModuleType(f"{PACKAGE}.{name}")
        setattr(sys.modules[PACKAGE], name, module)
        sys.modules[module.__name__] = module
        exec(compile(text, f"{name}.py", "exec"), vars(module))
    program_module, tests_module = (vars(sys.modules[f"{PACKAGE}.{side}_process"]) for side in ("program", "tests"))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process without capabilities can look in
    program_end, tests_end = socket.socketpair()
    preamble_read, preamble_write = os.pipe()
    program_pid = os.fork()
    if program_pid == 0:
        for fd in (tests_end.fileno(), preamble_write):
            os.close(fd)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.capset(header, (ctypes.c_uint32 * 6)()):
            raise OSError(ctypes.get_errno(), "a program could not be kept from its tests")
        with open(preamble_read, "rb") as file:
            preamble = file.read()
        program_module["serve_program"](preamble, source.encode(), program_end.fileno())
    program_end.close()
    os.close(preamble_read)
    request = _read_request()
    with open(preamble_write, "wb") as file:
        file.write(request["tests"]["preamble"].encode())
    verdicts_read, verdicts_write = os.pipe()
    tests_pid = os.fork()
    if tests_pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        tests_module["run_tests"](request["tests"], tests_end.fileno(), verdicts_write)
    os.close(verdicts_write)
    tests_end.close()
    with open(verdicts_read, "rb") as file:
        verdict_lines = file.read()
    os.kill(program_pid, 9)
    os.write(1, f"\n{request['mark']}".encode() + verdict_lines)
