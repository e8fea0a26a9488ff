"""Tests of the system-call filter, simulated for single calls on both machine types."""

import os

import pytest

from envs.sandbox import syscall_filter
from tests.envs.sandbox_helpers import NEEDS_LINUX

pytestmark = NEEDS_LINUX


def _verdict(machine: str, number: int, arguments: tuple[int, ...] = (), files: str = "root of its own") -> int:
    """Simulates the filter on one system call; returns the action."""
    program = syscall_filter.assemble(machine, 77, files)
    words = {0: number, 4: syscall_filter.MACHINES[machine][0]}
    words |= {16 + 8 * place: value & 0xFFFFFFFF for place, value in enumerate(arguments)}
    words |= {20 + 8 * place: value >> 32 for place, value in enumerate(arguments)}
    at, held = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        if code == syscall_filter.RETURN:
            return operand
        if code == syscall_filter.LOAD:
            held, at = words.get(operand, 0), at + 1
            continue
        if code == syscall_filter.AND:
            held, at = held & operand, at + 1
            continue
        holds = {
            syscall_filter.JUMP_EQUAL: held == operand,
            syscall_filter.JUMP_GREATER_EQUAL: held >= operand,
            syscall_filter.JUMP_ANY_BIT: bool(held & operand),
        }[code]
        at += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_refuses_what_it_should(machine: str, column: int) -> None:
    def verdict(number: tuple[int, int | None], *arguments: int, files: str = "root of its own") -> int:
        wanted = number[column]
        assert wanted is not None
        return _verdict(machine, wanted, arguments, files)

    refuse, allow = syscall_filter.REFUSE, syscall_filter.ALLOW
    for numbers in syscall_filter.ALWAYS_REFUSED.values():
        assert numbers[column] is None or verdict(numbers) == refuse
    levels = ("root of its own", "landlock", "none")
    for numbers in syscall_filter.METADATA_CALLS.values():
        if numbers[column] is not None:
            assert [verdict(numbers, files=files) for files in levels] == [allow, refuse, refuse]
    for numbers in syscall_filter.FILE_CHANGES.values():
        if numbers[column] is not None:
            assert [verdict(numbers, files=files) for files in levels] == [allow, allow, refuse]
    assert verdict(syscall_filter.CLONE, 17) == refuse
    assert verdict(syscall_filter.CLONE, 0x3D0F00) == allow
    assert verdict(syscall_filter.CLONE3) == syscall_filter.UNKNOWN
    assert [verdict(syscall_filter.KILL, pid) for pid in (77, 78, 0)] == [allow, refuse, refuse]
    assert [verdict(syscall_filter.PRLIMIT, pid) for pid in (0, 77, 78)] == [allow, allow, refuse]
    commands = (3, 8, 10, 15, 1024, 1026)
    assert [verdict(syscall_filter.FCNTL, 3, command) for command in commands] == [allow] + [refuse] * 5
    flags = (os.O_NONBLOCK, os.O_ASYNC, os.O_ASYNC | os.O_NONBLOCK)
    assert [verdict(syscall_filter.FCNTL, 3, 4, flag) for flag in flags] == [allow, refuse, refuse]
    owners = (0x5401, 0x8901, 0x8902, 0x5452, 0x40086602)
    assert [verdict(syscall_filter.IOCTL, 3, command) for command in owners] == [allow] + [refuse] * 4
    kinds = (1, 1 | 0x80000, 2, 3, 5)
    assert [verdict(syscall_filter.SOCKETPAIR, 1, kind) for kind in kinds] == [allow] * 2 + [refuse] * 3
    addresses = (0, 1, 1 << 32, 0x7F0000000000)
    assert [verdict(syscall_filter.SENDTO, 3, 0, 0, 0, at) for at in addresses] == [allow] + [refuse] * 3
    assert [verdict(syscall_filter.PRCTL, option) for option in (15, 1)] == [allow, refuse]
    opened = {
        files: [
            verdict(syscall_filter.OPENAT, 0, 0, flags, files=files)
            for flags in (
                os.O_RDONLY | os.O_CLOEXEC, os.O_WRONLY | os.O_TRUNC, os.O_RDWR, os.O_RDONLY | os.O_TRUNC,
                3 | os.O_TRUNC,
            )
        ]
        for files in levels
    }  # fmt: skip
    assert opened == {
        "root of its own": [allow] * 5,
        "landlock": [allow, allow, allow, refuse, refuse],
        "none": [allow, refuse, refuse, refuse, refuse],
    }
    assert _verdict(machine, 0) == allow
    if machine == "x86_64":
        assert _verdict(machine, syscall_filter.X32_BIT | 1) == refuse
