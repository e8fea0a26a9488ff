"""The system-call filter, one call at a time, for machines that this one is not."""

import os

import pytest

from envs import sandbox_filter
from tests.envs.sandboxes import NEEDS_LINUX

pytestmark = NEEDS_LINUX


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
    for numbers in [*sandbox_filter.REFUSED.values(), *sandbox_filter.METADATA.values()]:
        assert numbers[column] is None or verdict(numbers) == refuse
    for numbers in sandbox_filter.FILE_CHANGES.values():
        if numbers[column] is not None:
            assert (verdict(numbers), verdict(numbers, without_files=True)) == (allow, refuse)
    assert verdict(sandbox_filter.CLONE, 17) == refuse
    assert verdict(sandbox_filter.CLONE, 0x3D0F00) == allow
    assert verdict(sandbox_filter.CLONE3) == sandbox_filter.UNKNOWN
    assert [verdict(sandbox_filter.KILL, pid) for pid in (77, 78, 0)] == [allow, refuse, refuse]
    assert [verdict(sandbox_filter.PRLIMIT, pid) for pid in (0, 77, 78)] == [allow, allow, refuse]
    for command in (8, 10, 15, 1024, 1026, 1031):  # owners, signals, leases, notices, size of a pipe
        assert verdict(sandbox_filter.FCNTL, 3, command) == refuse
    assert [verdict(sandbox_filter.FCNTL, 3, command) for command in (0, 1, 2, 3, 1030)] == [allow] * 5
    assert [verdict(sandbox_filter.FCNTL, 3, 4, flags) for flags in (0x800, 0x2800)] == [allow, refuse]
    assert verdict(sandbox_filter.FCNTL, 3, 6, 0x2000) == allow
    assert verdict(sandbox_filter.FCNTL, 3, 6, 0x2000, without_files=True) == refuse
    for request in (0x8901, 0x8902, 0x5452, 0x5412, 0x40086602):  # owners, O_ASYNC, typed text, attributes
        assert verdict(sandbox_filter.IOCTL, 0, request) == refuse
    assert [verdict(sandbox_filter.IOCTL, 0, request) for request in (0x5401, 0x5421)] == [allow] * 2
    assert [verdict(sandbox_filter.PRCTL, option) for option in (15, 1, 4, 62)] == [allow] + [refuse] * 3
    pairs = [verdict(sandbox_filter.SOCKETPAIR, *kind) for kind in ((1, 0x80801), (1, 2), (1, 5), (30, 1))]
    assert pairs == [allow] + [refuse] * 3
    cut = [
        verdict(sandbox_filter.OPENAT, 0, 0, flags)
        for flags in (os.O_RDONLY, os.O_TRUNC | os.O_CREAT | os.O_WRONLY, os.O_TRUNC)
    ]
    assert cut == [allow, allow, refuse]
    assert verdict(sandbox_filter.OPENAT2) == _verdict(machine, 470) == sandbox_filter.UNKNOWN
    opened = [
        verdict(sandbox_filter.OPENAT, 0, 0, flags, without_files=True)
        for flags in (os.O_RDONLY | os.O_CLOEXEC, os.O_WRONLY, os.O_RDWR, os.O_CREAT)
    ]
    assert opened == [allow, refuse, refuse, refuse]
    assert verdict((77, 46)) == allow  # ftruncate: of a file that is open for writing
    if machine == "x86_64":
        assert _verdict(machine, sandbox_filter.X32_BIT | 1) == refuse
