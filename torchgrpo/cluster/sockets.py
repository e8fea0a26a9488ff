"""Short names for folders of Unix sockets, whose paths the system limits."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from config.schema.errors import ConfigError

_LONGEST = 32
"""Bytes of a folder. Linux takes 107 for a socket's path, macOS 103, of which Ray needs 68 below its folder."""
_SHORT = "/tmp"


def make_room_for_sockets() -> None:
    """Give a long TMPDIR a short name, for this process and those that it starts.

    The name is a link in a private folder, gone when this process ends. Files stay where the user wants them.
    Ray does not look whether it can write in TMPDIR, so it is told of the folder that Python has found.

    Raises:
        ConfigError: the link cannot be made.
    """
    short = _short_name("TMPDIR", tempfile.gettempdir())
    if os.environ.get("TMPDIR", "/tmp") != short:
        os.environ["TMPDIR"] = tempfile.tempdir = short
    ray_folder = os.environ.get("RAY_TMPDIR")
    if ray_folder is not None:
        os.environ["RAY_TMPDIR"] = _short_name("RAY_TMPDIR", ray_folder)


def _short_name(variable: str, folder: str) -> str:
    """The folder, or a link to it."""
    length = len(os.fsencode(folder))
    if length <= _LONGEST:
        return folder
    try:
        os.makedirs(folder, exist_ok=True)  # as Ray would
        private = tempfile.mkdtemp(prefix="grpo-", dir=_SHORT)
    except OSError as error:
        raise ConfigError(
            f"{variable}={folder}: its path has {length} bytes, Unix sockets in it may have {_LONGEST}, and a short "
            f"name for it cannot be made in {_SHORT} ({error.strerror}); set {variable} to a folder with a shorter path"
        ) from error
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    link = Path(private, "tmp")
    link.symlink_to(folder)
    return str(link)
