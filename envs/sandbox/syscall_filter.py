"""System-call filter of the sandbox: a classic BPF program for seccomp.

The filter refuses (EPERM) calls that a program does not need to read its input, compute and print: new
processes, other programs, sockets, signals to others, tracing, mounts, kernel keys, memory outside the
address-space limit. Threads pass, and pairs of connected sockets (asyncio creates one). Of `ioctl` and `fcntl`
only listed commands pass, because both can make the kernel send signals to other processes.

Rules for files depend on their other protection (`files`):

- `root of its own`: the private root holds none of the user's files, so no rule is needed.
- `landlock`: Landlock does not check owners, modes and times, nor truncation before its version 3. So the
  filter refuses changes of these, also in the private directory.
- `none`: files can be read only.

A program in another language than Python may start processes and programs. In that case the root is private,
and a process-number namespace ends all processes.

Numbers: Linux arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).
"""

import ctypes
import errno
import os

# AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

ALWAYS_REFUSED = {  # name: (x86_64, aarch64); None: the machine lacks the call
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "mount_setattr": (442, 442),
    "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    # System V objects of other processes are reached by number alone
    "shmat": (30, 196), "shmctl": (31, 195), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    "sync": (162, 81), "syncfs": (306, 267), "syslog": (103, 116),
    "mknod": (133, None), "mknodat": (259, 33),
}  # fmt: skip

FILE_CHANGES = {
    "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
}  # fmt: skip

METADATA_CALLS = {
    "openat2": (437, 437), "truncate": (76, 45),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
"""Changes of a file that Landlock does not check, and `openat2`, whose flags a filter cannot read."""

CLONE, CLONE3, KILL, TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
PRLIMIT, FCNTL, PRCTL = (302, 261), (72, 25), (157, 167)
OPEN, OPENAT, IOCTL, SOCKETPAIR, SENDTO = (2, None), (257, 56), (16, 29), (53, 199), (44, 206)
CLONE_THREAD = 0x10000
CLONE_NEW = 0x7E020080
"""Flags of `clone` that create namespaces."""
PROCESS_START_CALLS = ("fork", "vfork", "execve", "execveat")
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
F_SETFL = 4
FCNTL_ALLOWED = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
"""Descriptors and their flags, locks, sizes of pipes, seals.

F_SETFL passes without O_ASYNC, which requests signals.
"""
STREAM_BITS, ACCESS_BITS = 0xE, 3
"""Bits of a socket's type other than a stream's; the bits of `open` for reading and writing."""
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38

ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT = 0x15, 0x35, 0x45
OFFSET_NUMBER, OFFSET_MACHINE, OFFSET_ARGUMENTS = 0, 4, 16
X32_BIT = 0x40000000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
Number = tuple[int, int | None]
FileProtection = str
"""`root of its own`, `landlock` or `none`."""


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter))]


def _return_instruction(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def _argument_check(
    argument: int, tests: list[tuple[int, int]], match_action: int = REFUSE, default_action: int = ALLOW
) -> list[Instruction]:
    """Builds a check of the low 32 bits of an argument.

    tests: (jump code, operand) pairs. If any pair holds, the check returns `match_action`, otherwise
    `default_action`.
    """
    load = (LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * argument)
    jumps = [(code, len(tests) - place, 0, operand) for place, (code, operand) in enumerate(tests)]
    return [load, *jumps, _return_instruction(default_action), _return_instruction(match_action)]


def _sendto_check() -> list[Instruction]:
    """Builds a check that allows `sendto` without an address: the address pointer is null."""
    address = OFFSET_ARGUMENTS + 8 * 4
    return [
        (LOAD, 0, 0, address),
        (JUMP_EQUAL, 0, 3, 0),
        (LOAD, 0, 0, address + 4),
        (JUMP_EQUAL, 0, 1, 0),
        _return_instruction(ALLOW),
        _return_instruction(REFUSE),
    ]


def _truncation_check(argument: int) -> list[Instruction]:
    """Builds a check that allows O_TRUNC only when a file is opened for writing.

    Landlock checks the access mode of an opened file, but before its version 3 not O_TRUNC.
    """
    return [
        (LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * argument),
        (JUMP_ANY_BIT, 0, 4, os.O_TRUNC),
        (AND, 0, 0, ACCESS_BITS),
        (JUMP_EQUAL, 2, 0, os.O_WRONLY),
        (JUMP_EQUAL, 1, 0, os.O_RDWR),
        _return_instruction(REFUSE),
        _return_instruction(ALLOW),
    ]


def _file_rules(files: FileProtection) -> list[tuple[Number, list[Instruction]]]:
    if files == "root of its own":
        return []
    if files == "landlock":
        return [(OPEN, _truncation_check(1)), (OPENAT, _truncation_check(2))]
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    return [
        (OPEN, _argument_check(1, [(JUMP_ANY_BIT, writing)])),
        (OPENAT, _argument_check(2, [(JUMP_ANY_BIT, writing)])),
    ]


def refused_calls(files: FileProtection, starts_programs: bool = False) -> dict[str, Number]:
    """Returns the calls that are refused with any arguments."""
    file_calls = {"root of its own": {}, "landlock": METADATA_CALLS, "none": {**METADATA_CALLS, **FILE_CHANGES}}[files]
    calls = {**ALWAYS_REFUSED, **file_calls}
    return {name: calls[name] for name in calls if not (starts_programs and name in PROCESS_START_CALLS)}


def _call_rules(pid: int, files: FileProtection, starts_programs: bool) -> list[tuple[Number, list[Instruction]]]:
    itself = [(JUMP_EQUAL, pid)]
    threads = _argument_check(0, [(JUMP_ANY_BIT, CLONE_THREAD)], ALLOW, REFUSE)
    number: Instruction = (LOAD, 0, 0, OFFSET_ARGUMENTS + 8)
    flags = _argument_check(2, [(JUMP_ANY_BIT, os.O_ASYNC)])
    commands = _argument_check(1, [(JUMP_EQUAL, command) for command in FCNTL_ALLOWED], ALLOW, REFUSE)
    processes = _argument_check(0, [(JUMP_ANY_BIT, CLONE_NEW)])  # new processes pass, new namespaces do not
    return [
        *((number, [_return_instruction(REFUSE)]) for number in refused_calls(files, starts_programs).values()),
        (CLONE3, [_return_instruction(UNKNOWN)]),  # the C library falls back to clone, whose flags a filter reads
        (CLONE, processes if starts_programs else threads),
        (KILL, _argument_check(0, itself, ALLOW, REFUSE)),
        (TGKILL, _argument_check(0, itself, ALLOW, REFUSE)),
        (PRLIMIT, _argument_check(0, [(JUMP_EQUAL, 0), *itself], ALLOW, REFUSE)),
        (PRCTL, _argument_check(0, [(JUMP_EQUAL, PR_SET_PDEATHSIG)])),
        (FCNTL, [number, (JUMP_EQUAL, 0, len(flags), F_SETFL), *flags, *commands]),
        (IOCTL, _argument_check(1, [(JUMP_EQUAL, command) for command in IOCTL_ALLOWED], ALLOW, REFUSE)),
        (SOCKETPAIR, _argument_check(1, [(JUMP_ANY_BIT, STREAM_BITS)])),
        (SENDTO, _sendto_check()),
        *_file_rules(files),
    ]


def assemble(machine: str, pid: int, files: FileProtection, starts_programs: bool = False) -> list[Instruction]:
    """Assembles the filter program for process `pid` and its children. Raises OSError on unknown machines."""
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}; known: {', '.join(MACHINES)}")
    audit, column = MACHINES[machine]
    program: list[Instruction] = [
        (LOAD, 0, 0, OFFSET_MACHINE),
        (JUMP_EQUAL, 1, 0, audit),
        _return_instruction(KILL_PROCESS),
        (LOAD, 0, 0, OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        program += [(JUMP_GREATER_EQUAL, 0, 1, X32_BIT), _return_instruction(REFUSE)]
    for number, body in _call_rules(pid, files, starts_programs):
        if number[column] is not None:
            program += [(JUMP_EQUAL, 0, len(body), int(number[column] or 0)), *body]
    return [*program, _return_instruction(ALLOW)]


def install(libc: ctypes.CDLL, files: FileProtection, starts_programs: bool = False) -> None:
    """Installs the filter on this process and its children, for good.

    Raises:
        OSError: the kernel refuses.
    """
    program = assemble(os.uname().machine, os.getpid(), files, starts_programs)
    instructions = (_Filter * len(program))(*(_Filter(*instruction) for instruction in program))
    header = _Program(len(program), instructions)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")
