"""Small disks for tests, which can be full or read-only even for root.

unshare (mount, user) ── sh: mounts a tmpfs at `place`, waits        only processes in the namespace see the disk;
    └── the script under test                                        tests read it through /proc/PID/root
"""

import subprocess
from contextlib import suppress
from pathlib import Path

from tests.namespaces import USER_OPTIONS, nsenter

LIMIT_S = 300.0
NAMESPACE = ["unshare", *USER_OPTIONS, "--mount"]


def can_mount() -> bool:
    """Whether this user may mount in a private mount namespace."""
    try:
        command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode == 0
    except OSError:
        return False


class Disk:
    """Disk of `mib` MiB at `place`, in a mount namespace of its own, until `close`.

    enter: command that enters the namespace.
    """

    def __init__(self, place: Path, mib: int) -> None:
        self.place = place
        place.mkdir()
        script = 'mount -t tmpfs -o size="$0" tmpfs "$1" && echo up && exec cat'
        command = [*NAMESPACE, "sh", "-c", script, f"{mib}m", str(place)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        self.enter = nsenter(self._holder.pid, ["mount"])

    def host_path(self, path: Path) -> Path:
        """Returns the path of the same file outside of the namespace."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def fill(self) -> None:
        """Fills the disk; only the last blocks of existing files have room left."""
        with self.host_path(self.place / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def remove_filler(self) -> None:
        self.host_path(self.place / "filler").unlink()

    def make_read_only(self, folder: Path) -> None:
        """Makes a folder read-only for files that are opened later.

        A bind mount beside the folder is made read-only and then moved onto the folder, because a mount with a file
        open for writing cannot be made read-only (busy).
        """
        bind_mount = folder.with_name(f"{folder.name}-read-only")
        self.host_path(bind_mount).mkdir()
        self._do("mount", "--bind", str(folder), str(bind_mount))
        self._do("mount", "-o", "remount,bind,ro", str(bind_mount))
        self._do("mount", "--move", str(bind_mount), str(folder))

    def make_writable(self, folder: Path) -> None:
        self._do("umount", str(folder))

    def _do(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True, timeout=LIMIT_S)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()
