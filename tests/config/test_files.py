"""What an exception says of the disk."""

import errno
import os
from pathlib import Path

import pytest

from config.run_folder.files import disk_full, unwritable


def refused(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([] if path is None else [str(path)]))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG])
def test_a_disk_that_takes_no_more_is_known_by_its_error(number: int, tmp_path: Path) -> None:
    assert unwritable(refused(number), tmp_path) == os.strerror(number)
    assert not disk_full(refused(number))


def test_what_may_not_be_written_counts_in_the_runs_folder_alone(tmp_path: Path) -> None:
    assert unwritable(refused(errno.EACCES, tmp_path / "metrics.jsonl"), tmp_path) == "Permission denied"
    assert unwritable(refused(errno.EACCES, Path("/dev/nvidia0")), tmp_path) is None
    assert unwritable(refused(errno.EACCES), tmp_path) is None


def test_a_missing_file_counts_where_the_folder_is_gone(tmp_path: Path) -> None:
    missing = refused(errno.ENOENT, tmp_path / "run" / "metrics.jsonl")
    assert unwritable(missing, tmp_path / "run") == "No such file or directory"
    (tmp_path / "run").mkdir()
    assert unwritable(missing, tmp_path / "run") is None


def test_what_came_of_it_counts_as_well(tmp_path: Path) -> None:
    try:
        try:
            raise refused(errno.EROFS)
        except OSError as error:
            raise RuntimeError("unexpected pos 704 vs 598") from error
    except RuntimeError as error:
        found = unwritable(error, tmp_path)
    assert found == "Read-only file system"
    assert unwritable(RuntimeError("a fault"), tmp_path) is None
