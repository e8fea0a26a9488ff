"""Writing a file or a folder so that it is whole or not there, and recognising a full disk."""

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

_UNFINISHED = re.compile(r".+\.\d+-[0-9a-f]{8}\.tmp")


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end of the block; an exception leaves no trace."""
    beside = unfinished(path)
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the name `folder` at the end of the block; an exception leaves no trace.

    Another one that took the name meanwhile stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = unfinished(folder)
    beside.mkdir()
    try:
        yield beside
        for path in beside.rglob("*"):
            sync_folder(path)
        sync_folder(beside)
        try:
            beside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def link(path: Path, target: str) -> None:
    """A symbolic link to `target`, in the place of the one that is there."""
    beside = unfinished(path)
    beside.symlink_to(target)
    beside.replace(path)


def unfinished(path: Path) -> Path:
    """A name beside `path` that no other writer has, on this machine or another."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sync_folder(folder: Path) -> None:
    """The names in a folder are on disk and outlive a loss of power, where the file system can promise that; of a file,
    what is in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers left in a folder. The caller knows that no other process writes there."""
    for path in folder.glob("*.tmp"):
        if not _UNFINISHED.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def disk_full(error: BaseException | None) -> bool:
    """Whether the exception, or one that it came from, says that there was no room to write."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return any(isinstance(link, OSError) and link.errno in full for link in causes(error))


def unwritable(error: BaseException | None, folder: Path) -> str | None:
    """Why nothing can be written in a folder any more, where that is what the exception came from."""
    # Takes no more, though it has room: read-only, limited, broken, a server that is gone.
    of_the_disk = (errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE)
    for link in causes(error):
        if not isinstance(link, OSError):
            continue
        within = link.filename is not None and Path(str(link.filename)).is_relative_to(folder)
        gone = link.errno == errno.ENOENT and not folder.exists()
        if link.errno in of_the_disk or (within and (gone or link.errno in (errno.EACCES, errno.EPERM))):
            return link.strerror
    return None
