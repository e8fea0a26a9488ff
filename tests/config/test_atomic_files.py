"""Tests that errors of the disk are recognised in exceptions."""

import errno
import os
from pathlib import Path

import pytest

from config.run_folder.atomic_files import is_disk_full, write_failure_reason


def os_error(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([] if path is None else [str(path)]))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG])
def test_errors_of_an_unwritable_disk_have_a_reason(number: int, tmp_path: Path) -> None:
    assert write_failure_reason(os_error(number), tmp_path) == os.strerror(number)
    assert not is_disk_full(os_error(number))


def test_denied_access_counts_only_in_the_runs_folder(tmp_path: Path) -> None:
    assert write_failure_reason(os_error(errno.EACCES, tmp_path / "metrics.jsonl"), tmp_path) == "Permission denied"
    assert write_failure_reason(os_error(errno.EACCES, Path("/dev/nvidia0")), tmp_path) is None
    assert write_failure_reason(os_error(errno.EACCES), tmp_path) is None


def test_a_missing_file_counts_where_the_folder_is_gone(tmp_path: Path) -> None:
    missing = os_error(errno.ENOENT, tmp_path / "run" / "metrics.jsonl")
    assert write_failure_reason(missing, tmp_path / "run") == "No such file or directory"
    (tmp_path / "run").mkdir()
    assert write_failure_reason(missing, tmp_path / "run") is None


def test_causes_of_an_exception_count(tmp_path: Path) -> None:
    try:
        try:
            raise os_error(errno.EROFS)
        except OSError as error:
            raise RuntimeError("unexpected pos 704 vs 598") from error
    except RuntimeError as error:
        reason = write_failure_reason(error, tmp_path)
    assert reason == "Read-only file system"
    assert write_failure_reason(RuntimeError("a fault"), tmp_path) is None
