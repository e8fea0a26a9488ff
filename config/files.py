"""Files that are whole or not there, and the one way in which writing them usually fails."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end of the block; an exception leaves no trace."""
    beside = path.with_suffix(".tmp")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def disk_full(error: BaseException | None) -> bool:
    """Whether the exception, or one that it came from, says that there was no room to write."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def remove_if_unused(run_dir: Path) -> None:
    """A run that never began leaves no folder behind."""
    if not (run_dir / "metrics.jsonl").exists() and not (run_dir / "checkpoints").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
