"""The sandbox's system-call filter: a classic BPF program for seccomp, assembled here and given to the kernel.

It refuses (EPERM) what a program that reads its input, computes and prints has no use for: new processes, other
programs, sockets to others, signals to others, tracing, mounts, kernel keys, memory outside the address-space limit,
changes of a file's metadata. Threads pass. Of ioctl, fcntl and prctl only what is listed passes. `without_files`
also refuses to make, change or remove files, for kernels without Landlock.

Numbers: Linux arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).
"""

import ctypes
import errno
import os

# AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

REFUSED = {  # name: (x86_64, aarch64); None: the machine has no such call
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "fanotify_init": (300, 262),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "syslog": (103, 116),
    "quotactl_fd": (443, 443),
    "fspick": (433, 433),
    "mknod": (133, None),
    "mknodat": (259, 33),
}

METADATA = {  # Landlock does not cover these, and `truncate` only from version 3 on
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}

FILE_CHANGES = {
    "creat": (85, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "flock": (73, 32),
}

CLONE, CLONE3, KILL, TGKILL, PRLIMIT, FCNTL, PRCTL = (
    (56, 220),
    (435, 435),
    (62, 129),
    (234, 131),
    (302, 261),
    (72, 25),
    (157, 167),
)
IOCTL, SOCKETPAIR = (16, 29), (53, 199)
OPEN, OPENAT, OPENAT2 = (2, None), (257, 56), (437, 437)
NEWER = 470
"""The first call that is not known here; it and those after it fail as on a kernel that has none of them."""
CLONE_THREAD = 0x10000
AF_UNIX, BEYOND_SOCK_STREAM = 1, 0xE
F_SETFL, O_ASYNC = 4, 0x2000
FCNTL_ALLOWED = (0, 1, 2, 3, 1027, 1030, 1032, 1034)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_QUERY, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS."""
FCNTL_LOCKS = (5, 6, 7, 36, 37, 38)
"""F_GETLK, F_SETLK, F_SETLKW and the same for open file descriptions."""
IOCTL_ALLOWED = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
PRCTL_ALLOWED = (15, 16, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_SET_VMA."""
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38

ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
OFFSET_NUMBER, OFFSET_MACHINE, OFFSET_ARGUMENTS = 0, 4, 16
X32_BIT = 0x40000000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
Number = tuple[int, int | None]


class _Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter))]


def _returns(verdict: int) -> Instruction:
    return (RETURN, 0, 0, verdict)


def _when(argument: int, jump: int, operand: int, body: list[Instruction]) -> list[Instruction]:
    """`body`, which ends in a return, where the low 32 bits of an argument fit; else what follows it."""
    return [(LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * argument), (jump, 0, len(body), operand), *body]


def _one_of(argument: int, operands: tuple[int, ...], matched: int, otherwise: int) -> list[Instruction]:
    tests = [_when(argument, JUMP_EQUAL, operand, [_returns(matched)]) for operand in operands]
    return [*(instruction for test in tests for instruction in test), _returns(otherwise)]


def _opens(argument: int, without_files: bool) -> list[Instruction]:
    """Refuses to cut a file that is opened for reading only, which Landlock sees as reading before version 3."""
    changing = os.O_WRONLY | os.O_RDWR
    if without_files:
        return [
            *_when(argument, JUMP_ANY_BIT, changing | os.O_CREAT | os.O_TRUNC, [_returns(REFUSE)]),
            _returns(ALLOW),
        ]
    cuts = [*_when(argument, JUMP_ANY_BIT, changing, [_returns(ALLOW)]), _returns(REFUSE)]
    return [*_when(argument, JUMP_ANY_BIT, os.O_TRUNC, cuts), _returns(ALLOW)]


def _rules(pid: int, without_files: bool) -> list[tuple[Number, list[Instruction]]]:
    refused = {**REFUSED, **METADATA, **(FILE_CHANGES if without_files else {})}
    rules: list[tuple[Number, list[Instruction]]] = [
        (number, [_returns(REFUSE)]) for number in refused.values()
    ]
    refuse, allow = [_returns(REFUSE)], [_returns(ALLOW)]
    flags = [*_when(2, JUMP_ANY_BIT, O_ASYNC, refuse), *allow]
    commands = FCNTL_ALLOWED if without_files else FCNTL_ALLOWED + FCNTL_LOCKS
    rules += [
        (CLONE3, [_returns(UNKNOWN)]),  # the C library then makes threads by clone, whose flags can be read
        (OPENAT2, [_returns(UNKNOWN)]),  # nor can the flags of this one be read
        (CLONE, [*_when(0, JUMP_ANY_BIT, CLONE_THREAD, allow), *refuse]),
        (KILL, _one_of(0, (pid,), ALLOW, REFUSE)),
        (TGKILL, _one_of(0, (pid,), ALLOW, REFUSE)),
        (PRLIMIT, _one_of(0, (0, pid), ALLOW, REFUSE)),
        (FCNTL, [*_when(1, JUMP_EQUAL, F_SETFL, flags), *_one_of(1, commands, ALLOW, REFUSE)]),
        (IOCTL, _one_of(1, IOCTL_ALLOWED, ALLOW, REFUSE)),
        (PRCTL, _one_of(0, PRCTL_ALLOWED, ALLOW, REFUSE)),
        (
            SOCKETPAIR,  # a connected pair for a program's own threads and for asyncio; others can be sent anywhere
            [
                *_when(0, JUMP_GREATER_EQUAL, AF_UNIX + 1, refuse),
                *_when(1, JUMP_ANY_BIT, BEYOND_SOCK_STREAM, refuse),
                *allow,
            ],
        ),
        (OPEN, _opens(1, without_files)),
        (OPENAT, _opens(2, without_files)),
    ]
    return rules


def assemble(machine: str, pid: int, without_files: bool) -> list[Instruction]:
    """The program for one process.

    Raises:
        OSError: a machine whose call numbers are not known here.
    """
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}; known: {', '.join(MACHINES)}")
    audit, column = MACHINES[machine]
    program: list[Instruction] = [
        (LOAD, 0, 0, OFFSET_MACHINE),
        (JUMP_EQUAL, 1, 0, audit),
        _returns(KILL_PROCESS),
        (LOAD, 0, 0, OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        program += [(JUMP_GREATER_EQUAL, 0, 1, X32_BIT), _returns(REFUSE)]
    program += [(JUMP_GREATER_EQUAL, 0, 1, NEWER), _returns(UNKNOWN)]
    for number, body in _rules(pid, without_files):
        if number[column] is not None:
            program += [(JUMP_EQUAL, 0, len(body), int(number[column] or 0)), *body]
    return [*program, _returns(ALLOW)]


def install(libc: ctypes.CDLL, without_files: bool) -> None:
    """Filters this process and all it starts, for good.

    Raises:
        OSError: the kernel or the container refuses.
    """
    program = assemble(os.uname().machine, os.getpid(), without_files)
    instructions = (_Filter * len(program))(*(_Filter(*instruction) for instruction in program))
    header = _Program(len(program), instructions)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")
