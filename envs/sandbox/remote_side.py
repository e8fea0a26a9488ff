"""What runs on a sandbox server beside a tested program, where more than a script with input and output is asked for.

Its text is sent as the program, with a call of `call` or `check` at its end. What comes back stands on standard output
behind a mark that the tested program has never seen. Standard library only: this runs on a machine of others.
"""

import ctypes
import json
import os
import sys
from types import ModuleType
from typing import Any

NOBODY = 65534
PR_SET_DUMPABLE = 4


def _given() -> Any:
    """The JSON on standard input, which is empty from then on."""
    given = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return given


def call(source: str, function: str) -> None:
    """Runs a module and calls one of its functions; prints the mark and JSON of what it returns."""
    given = _given()
    module = ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(source, "solution.py", "exec"), vars(module))
    names = vars(module)
    called = names[function] if function in names else getattr(names["Solution"](), function)
    value = json.dumps(called(*given["arguments"]))
    sys.stdout.flush()
    os.write(1, f"\n{given['mark']}{value}".encode())


def check(source: str, texts: dict[str, str]) -> None:
    """Runs tests on a module, each side in a process of its own; prints the mark and a line for each test.

    The program's process is forked before the tests are read, loses root's rights where it has them, and may not look
    into this one. texts: of the modules of `envs.sandbox` that stand between.
    """
    import socket

    for package in ("envs", "envs.sandbox"):
        sys.modules[package] = ModuleType(package)
    for name, text in texts.items():
        module = ModuleType(f"envs.sandbox.{name}")
        setattr(sys.modules["envs.sandbox"], name, module)
        sys.modules[module.__name__] = module
        exec(compile(text, f"{name}.py", "exec"), vars(module))
    between = vars(sys.modules["envs.sandbox.assertions"])
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    theirs, ours = socket.socketpair()
    preamble_read, preamble_write = os.pipe()
    answer = os.fork()
    if answer == 0:
        for fd in (ours.fileno(), preamble_write):
            os.close(fd)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        with open(preamble_read, "rb") as file:
            preamble = file.read()
        between["run_answer"](preamble, source.encode(), theirs.fileno())
    theirs.close()
    os.close(preamble_read)
    given = _given()
    with open(preamble_write, "wb") as file:
        file.write(given["tests"]["preamble"].encode())
    verdicts, theirs_of_verdicts = os.pipe()
    judge = os.fork()
    if judge == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        between["run_tests"](given["tests"], ours.fileno(), theirs_of_verdicts)
    os.close(theirs_of_verdicts)
    ours.close()
    with open(verdicts, "rb") as file:
        said = file.read()
    os.kill(answer, 9)
    os.write(1, f"\n{given['mark']}".encode() + said)
