"""A small disk of its own for a test: full, or read-only, as a real one is, for root as for everybody.

unshare (mount, user) ── sh: mounts a tmpfs at `place`, waits        only what enters the namespace sees it;
    └── the script under test                                        the test does through /proc/PID/root
"""

import subprocess
from contextlib import suppress
from pathlib import Path

from tests.namespaces import USER, nsenter

LIMIT_S = 300.0
NAMESPACE = ["unshare", *USER, "--mount"]


def can_mount() -> bool:
    """Whether this user may mount what only its own processes see."""
    try:
        command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode == 0
    except OSError:
        return False


class Disk:
    """`mib` MiB at `place`, until it is closed. enter: the command that enters where it is seen."""

    def __init__(self, place: Path, mib: int) -> None:
        self.place = place
        place.mkdir()
        script = 'mount -t tmpfs -o size="$0" tmpfs "$1" && echo up && exec cat'
        command = [*NAMESPACE, "sh", "-c", script, f"{mib}m", str(place)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        self.enter = nsenter(self._holder.pid, ["mount"])

    def seen(self, path: Path) -> Path:
        """The same file from outside."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def fill(self) -> None:
        """No byte more goes on it, but in what the files' last blocks have left."""
        with self.seen(self.place / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def empty(self) -> None:
        self.seen(self.place / "filler").unlink()

    def make_read_only(self, folder: Path) -> None:
        """A folder on it, for every file that is opened from now on.

        It is made so elsewhere and moved there: a mount with a file open for writing stays writable (busy).
        """
        aside = folder.with_name(f"{folder.name}-read-only")
        self.seen(aside).mkdir()
        self._do("mount", "--bind", str(folder), str(aside))
        self._do("mount", "-o", "remount,bind,ro", str(aside))
        self._do("mount", "--move", str(aside), str(folder))

    def make_writable(self, folder: Path) -> None:
        self._do("umount", str(folder))

    def _do(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True, timeout=LIMIT_S)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()
