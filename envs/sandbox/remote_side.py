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

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
PACKAGE = "envs.sandbox.assertions"
CAPABILITY_VERSION_3 = 0x20080522


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

    The program's process is forked before the tests are read, loses root's rights where it has them, for good, and may
    not look into this one. It keeps its user, who may be the only one that can read Python's files.

    texts: of the modules of `envs.sandbox.assertions` that stand between, by their names.
    """
    import socket

    for package in ("envs", "envs.sandbox", PACKAGE):
        sys.modules[package] = ModuleType(package)
    for name, text in texts.items():
        module = ModuleType(f"{PACKAGE}.{name}")
        setattr(sys.modules[PACKAGE], name, module)
        sys.modules[module.__name__] = module
        exec(compile(text, f"{name}.py", "exec"), vars(module))
    answer_side, tests_side = (vars(sys.modules[f"{PACKAGE}.{side}_side"]) for side in ("answer", "tests"))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody without capabilities can look in
    theirs, ours = socket.socketpair()
    preamble_read, preamble_write = os.pipe()
    answer = os.fork()
    if answer == 0:
        for fd in (ours.fileno(), preamble_write):
            os.close(fd)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.capset(header, (ctypes.c_uint32 * 6)()):
            raise OSError(ctypes.get_errno(), "a program could not be kept from its tests")
        with open(preamble_read, "rb") as file:
            preamble = file.read()
        answer_side["run_answer"](preamble, source.encode(), theirs.fileno())
    theirs.close()
    os.close(preamble_read)
    given = _given()
    with open(preamble_write, "wb") as file:
        file.write(given["tests"]["preamble"].encode())
    verdicts, theirs_of_verdicts = os.pipe()
    judge = os.fork()
    if judge == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        tests_side["run_tests"](given["tests"], ours.fileno(), theirs_of_verdicts)
    os.close(theirs_of_verdicts)
    ours.close()
    with open(verdicts, "rb") as file:
        said = file.read()
    os.kill(answer, 9)
    os.write(1, f"\n{given['mark']}".encode() + said)
