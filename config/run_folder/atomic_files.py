"""Writes files and folders atomically, and recognises errors of the disk.

A reader sees either the complete file or folder, or none.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from config.schema.errors import causes

_TEMPORARY_NAME = re.compile(r".+\.\d+-[0-9a-f]{8}\.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` at the end of the block.

    An exception in the block removes the temporary file and leaves `path` unchanged.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Creates a temporary folder that is renamed to `folder` at the end of the block.

    An exception in the block removes the temporary folder. If another process has created `folder` in the
    meantime, that folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(folder)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            sync_to_disk(path)
        sync_to_disk(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_to_disk(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_link(path: Path, target: str) -> None:
    """Creates or replaces the symbolic link `path` to `target`."""
    temporary = temporary_path(path)
    temporary.symlink_to(target)
    temporary.replace(path)


def temporary_path(path: Path) -> Path:
    """Returns a path beside `path` that no other writer uses, on this machine or another."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sync_to_disk(path: Path) -> None:
    """Flushes the content of a file, or the names in a folder, to disk.

    Flushed data survives a loss of power. File systems that do not support the call are skipped.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_temporary_files(folder: Path) -> None:
    """Removes the temporary files and folders of killed writers from a folder.

    The caller guarantees that no other process writes to the folder.
    """
    for path in folder.glob("*.tmp"):
        if not _TEMPORARY_NAME.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether the exception or one of its causes is a full disk or quota."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return any(isinstance(link, OSError) and link.errno in full for link in causes(error))


def write_failure_reason(error: BaseException | None, folder: Path) -> str | None:
    """Returns the reason why a folder is not writable; None for any other error."""
    # Errors of a disk with free space: read-only, a file size limit, broken hardware, a lost server.
    disk_errors = (errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE)
    for link in causes(error):
        if not isinstance(link, OSError):
            continue
        is_inside = link.filename is not None and Path(str(link.filename)).is_relative_to(folder)
        is_removed = link.errno == errno.ENOENT and not folder.exists()
        is_denied = link.errno in (errno.EACCES, errno.EPERM)
        if link.errno in disk_errors or (is_inside and (is_removed or is_denied)):
            return link.strerror
    return None
