"""Replaces long TMPDIR and RAY_TMPDIR by short links, since Unix socket paths are limited."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from config.schema.errors import ConfigError

_MAX_FOLDER_BYTES = 32
"""Longest folder path in bytes.

A socket path may have 107 bytes on Linux and 103 on macOS. Ray needs 68 of them below its folder.
"""
_LINK_FOLDER = "/tmp"


def shorten_temporary_folders() -> None:
    """Replaces long paths in TMPDIR and RAY_TMPDIR by short links.

    The change holds for this process and its children. Each link lies in a private folder that is removed when
    this process ends; the files stay in the folder of the user. Ray does not check whether TMPDIR is writable,
    so TMPDIR is set to the folder that Python's `tempfile` has selected.

    Raises:
        ConfigError: a link cannot be created.
    """
    short = _short_name("TMPDIR", tempfile.gettempdir())
    if os.environ.get("TMPDIR", "/tmp") != short:
        os.environ["TMPDIR"] = tempfile.tempdir = short
    ray_folder = os.environ.get("RAY_TMPDIR")
    if ray_folder is not None:
        os.environ["RAY_TMPDIR"] = _short_name("RAY_TMPDIR", ray_folder)


def _short_name(variable: str, folder: str) -> str:
    """Returns the folder, or a new link to it if its path is too long.

    variable: name of the environment variable, for the error message.
    """
    length = len(os.fsencode(folder))
    if length <= _MAX_FOLDER_BYTES:
        return folder
    try:
        os.makedirs(folder, exist_ok=True)  # Ray creates the folder too
        private = tempfile.mkdtemp(prefix="grpo-", dir=_LINK_FOLDER)
    except OSError as error:
        raise ConfigError(
            f"{variable}={folder}: its path has {length} bytes, Unix sockets in it may have {_MAX_FOLDER_BYTES}, "
            f"and a short name for it cannot be made in {_LINK_FOLDER} ({error.strerror}); set {variable} to a "
            "folder with a shorter path"
        ) from error
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    link = Path(private, "tmp")
    link.symlink_to(folder)
    return str(link)
