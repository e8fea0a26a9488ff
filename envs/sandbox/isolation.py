"""Kernel calls that confine the calling process by namespaces, private root, Landlock and unprivileged user.

It calls the kernel by ctypes, so nothing has to be compiled or installed. The module runs in the sandbox's own
interpreter, which has no site-packages. It imports little, because each start of a sandbox pays for its imports.
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
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
EXECUTE, WRITE_FILE, READ_FILE, READ_DIRECTORY, TRUNCATE = 1, 2, 4, 8, 1 << 14
CAPABILITY_VERSION_3 = 0x20080522
HOST_CAPABILITIES = (16, 17, 19, 21, 38, 39)
"""Rights to reach beyond a namespace: kernel modules, raw I/O, ptrace, administration, perfmon, BPF."""
INNER_ID = 1000
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
DISK_ENTRIES = 1024
PROGRAM_FOLDERS = ("/bin", "/usr/bin", "/etc/alternatives")


def _check_result(result: int, call_name: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call_name}: {os.strerror(number)}")
    return result


def readable_paths() -> list[str]:
    """Returns the paths that a Python program reads: libraries of the interpreter and the system."""
    library = os.path.dirname(os.path.dirname(os.__file__))
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    return sorted(path for path in {library, *system} if os.path.exists(path))


def program_paths(interpreter: Sequence[str]) -> list[str]:
    """Returns further paths for another language: its interpreter and programs that a shell calls."""
    paths = (interpreter[0], *PROGRAM_FOLDERS)
    return sorted(path for path in set(paths) if os.path.exists(path))


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies."""
    _check_result(libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def hide_memory() -> None:
    """Keeps unprivileged processes from reading this process's memory and files through /proc."""
    _check_result(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def unshare_namespaces(namespaces: int = NAMESPACES, keeps_ids: bool = False) -> None:
    """Creates new namespaces for this process (mounts, network, ...) and its next child (process numbers).

    Root creates them directly. Other users create a user namespace first, in which they have all capabilities.

    keeps_ids: whether user and group keep their numbers in a user namespace, instead of `INNER_ID`.

    Raises:
        OSError: the kernel or the container refuses.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0 and libc.unshare(namespaces) == 0:
        return
    inner_user, inner_group = (user, group) if keeps_ids else (INNER_ID, INNER_ID)
    _check_result(libc.unshare(namespaces | CLONE_NEWUSER), "unshare")
    maps = {"setgroups": "deny", "uid_map": f"{inner_user} {user} 1", "gid_map": f"{inner_group} {group} 1"}
    for name, line in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if value is None else os.fsencode(value) for value in (source, target, kind)]
    _check_result(libc.mount(*arguments, flags, None if data is None else data.encode()), f"mount {target}")


def hide_other_processes() -> None:
    """Mounts a /proc with the processes of this process's namespace only.

    Raises:
        OSError: the kernel or the container refuses.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def drop_host_capabilities() -> None:
    """Drops `HOST_CAPABILITIES` for this process and all programs that it starts."""
    for capability in HOST_CAPABILITIES:
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # older kernels do not know the last ones
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check_result(libc.capget(header, sets), "capget")
    for capability in HOST_CAPABILITIES:
        for index in range(3):
            sets[3 * (capability // 32) + index] &= ~(1 << capability % 32)
    _check_result(libc.capset(header, sets), "capset")


def build_root(disk_bytes: int, extra_paths: Sequence[str] = ()) -> None:
    """Changes the root directory to a private one.

    The new root holds `readable_paths`, `extra_paths`, a few devices and an empty /tmp. It has no /proc, no
    home and no project. Everything is read-only except /tmp, a memory file system limited to `disk_bytes`.
    """
    mounts = [(os.path.realpath(path), path) for path in (*readable_paths(), *extra_paths, *DEVICES)]
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    _check_result(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    read_only = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    for source, target in mounts:
        if os.path.isdir("/old" + source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_RDONLY, 0o644))
        _mount("/old" + source, target, None, MS_BIND | MS_REC)
        fd, size = os.fsencode(target), ctypes.sizeof(read_only)
        result = libc.syscall(SYS_MOUNT_SETATTR, -100, fd, AT_RECURSIVE, read_only, size)
        _check_result(result, f"mount_setattr {target}")
    _check_result(libc.umount2(b"/old", MNT_DETACH), "umount /old")
    os.rmdir("/old")
    os.mkdir("/tmp")
    flags = MS_NOSUID | MS_NODEV
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    options = f"size={disk_bytes},nr_inodes={DISK_ENTRIES},mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", flags | MS_NOEXEC, options)


def drop_privileges(user: int) -> None:
    """Drops all capabilities, and changes to the unprivileged `user` if this process is root's."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _check_result(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def landlock_version() -> int:
    """Returns Landlock's interface version; 0 if the kernel or the container offers none."""
    return max(0, int(libc.syscall(SYS_LANDLOCK_CREATE, None, 0, 1)))


def confine_files(readable: list[str], writable: str, version: int) -> None:
    """Restricts this process by Landlock to reading `readable` and changing the directory `writable`.

    version: Landlock's interface version. Version 4 and later also refuse TCP. Version 6 and later also refuse
    signals to processes outside, and their abstract sockets.

    Raises:
        OSError: the kernel or the container refuses.
    """
    # File rights of this interface version: 13 in the first; then refer, truncate, ioctl on devices.
    everything = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    attributes = (ctypes.c_uint64 * 3)(everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 * (1 + (version >= 4) + (version >= 6))
    rules = _check_result(libc.syscall(SYS_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    rules_by_path = [(path, READ_FILE | (READ_DIRECTORY if os.path.isdir(path) else 0)) for path in readable]
    rules_by_path += [(path, (READ_FILE | WRITE_FILE | TRUNCATE) & everything) for path in DEVICES]
    rules_by_path.append((writable, everything & ~EXECUTE))
    for path, access in rules_by_path:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access, fd)
        _check_result(libc.syscall(SYS_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(fd)
    _check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _check_result(libc.syscall(SYS_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)
