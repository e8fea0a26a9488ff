"""Isolation of a process by namespaces, a private root, Landlock and an unprivileged user.

By ctypes, so that nothing has to be compiled or installed. Runs in the sandbox's own interpreter, which has no
site-packages, and imports little: every millisecond here is paid at each start.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH = 16384, 1 << 18, 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 442, 0x8000, 1, 2
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
EXECUTE, WRITE_FILE, READ_FILE, READ_DIRECTORY, TRUNCATE = 1, 2, 4, 8, 1 << 14
CAPABILITY_VERSION_3 = 0x20080522
INNER_ID = 1000
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
DISK_ENTRIES = 1024
PROGRAM_FOLDERS = ("/bin", "/usr/bin", "/etc/alternatives")


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def readable_paths() -> list[str]:
    """Paths that a Python program reads: libraries of the interpreter and of the system."""
    library = os.path.dirname(os.path.dirname(os.__file__))
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    return sorted(path for path in {library, *system} if os.path.exists(path))


def program_paths(interpreter: Sequence[str]) -> list[str]:
    """Further paths for another language: its interpreter, and programs that a shell calls."""
    paths = (interpreter[0], *PROGRAM_FOLDERS)
    return sorted(path for path in set(paths) if os.path.exists(path))


def die_with_parent() -> None:
    _check(libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def hide_memory() -> None:
    """No process without privileges can read this one's memory or open its files by way of /proc."""
    _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def unshare_namespaces() -> None:
    """New namespaces for this process (mounts, network, ...) and for its next child (process numbers).

    Root makes them directly. Others make a user namespace first, in which they have all capabilities.

    Raises:
        OSError: the kernel or the container refuses.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0 and libc.unshare(NAMESPACES) == 0:
        return
    _check(libc.unshare(NAMESPACES | CLONE_NEWUSER), "unshare")
    maps = {"setgroups": "deny", "uid_map": f"{INNER_ID} {user} 1", "gid_map": f"{INNER_ID} {group} 1"}
    for name, line in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if value is None else os.fsencode(value) for value in (source, target, kind)]
    _check(libc.mount(*arguments, flags, None if data is None else data.encode()), f"mount {target}")


def build_root(disk_bytes: int, more: Sequence[str] = ()) -> None:
    """Changes the root to one that holds `readable_paths`, `more`, a few devices and an empty /tmp, and nothing else.

    No /proc, no home, no project. All is read-only but /tmp, which is memory limited to `disk_bytes`.
    """
    seen = [(os.path.realpath(path), path) for path in (*readable_paths(), *more, *DEVICES)]
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    _check(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    read_only = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    for source, target in seen:
        if os.path.isdir("/old" + source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_RDONLY, 0o644))
        _mount("/old" + source, target, None, MS_BIND | MS_REC)
        place, size = os.fsencode(target), ctypes.sizeof(read_only)
        result = libc.syscall(SYS_MOUNT_SETATTR, -100, place, AT_RECURSIVE, read_only, size)
        _check(result, f"mount_setattr {target}")
    _check(libc.umount2(b"/old", MNT_DETACH), "umount /old")
    os.rmdir("/old")
    os.mkdir("/tmp")
    flags = MS_NOSUID | MS_NODEV
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    options = f"size={disk_bytes},nr_inodes={DISK_ENTRIES},mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", flags | MS_NOEXEC, options)


def drop_privileges(user: int) -> None:
    """To an unprivileged user when root, and to no capabilities in any case."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def landlock_version() -> int:
    """Landlock's interface version; 0 where the kernel has none or the container refuses it."""
    return max(0, int(libc.syscall(SYS_LANDLOCK_CREATE, None, 0, 1)))


def confine_files(readable: list[str], writable: str, version: int) -> None:
    """Landlock: from now on only `readable` can be read, and only the directory `writable` changed.

    version: of Landlock's interface. From 4 on TCP is refused too, from 6 on signals to, and abstract sockets of,
    processes outside.

    Raises:
        OSError: the kernel or the container refuses.
    """
    # All file rights that the version knows: 13 in the first; then refer, truncate, ioctl on devices.
    everything = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    attributes = (ctypes.c_uint64 * 3)(everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 * (1 + (version >= 4) + (version >= 6))
    rules = _check(libc.syscall(SYS_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    wanted = [(path, READ_FILE | (READ_DIRECTORY if os.path.isdir(path) else 0)) for path in readable]
    wanted += [(path, (READ_FILE | WRITE_FILE | TRUNCATE) & everything) for path in DEVICES]
    wanted.append((writable, everything & ~EXECUTE))
    for path, access in wanted:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access, place)
        _check(libc.syscall(SYS_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(place)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _check(libc.syscall(SYS_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)
