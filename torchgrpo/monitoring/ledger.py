"""Writer of the ledger, the record of all groups of a run in `rollouts/`.

    scored group ─▶ learner: advantages, log-ratios ─▶ end of the iteration: all its lines in one write
    evaluation   ─▶ lines as groups arrive ─▶ a file of its own after the last group

The ledger never stops a run: if its folder cannot be written, a warning is logged once and the ledger is disabled.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Literal

import orjson

from envs.group import Group
from torchgrpo.monitoring.ledger_record import GroupFate, TokenValues, group_to_record
from torchgrpo.monitoring.ledger_storage import CLOSED, FOLDER, OPEN, close_file, ledger_files, remove_later_records

ROTATE_BYTES, ROTATE_SHARE = 1 << 26, 1 / 8
"""Size of a plain file, absolute or as a share of the size limit, at which the file is compressed."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class Ledger:
    """Writes each group at the end of its iteration.

    Args:
        limit_bytes: maximum size of all files; the oldest training files are removed first, then the oldest
            evaluations. 0: nothing is written.
        on_warning: called once if the ledger cannot be written.
    """

    def __init__(self, run_dir: Path, limit_bytes: int, on_warning: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / FOLDER
        self.limit_bytes = limit_bytes
        self.on_warning = on_warning
        self.rotate_bytes = min(ROTATE_BYTES, limit_bytes * ROTATE_SHARE)
        self.enabled = limit_bytes > 0
        self._fates: dict[int, GroupFate] = {}
        self._open_file: BinaryIO | None = None
        self._closing_thread: Thread | None = None

    def truncate_after(self, iteration: int) -> None:
        """Removes the lines of later iterations and compresses all plain files."""
        with self._catch_os_error():
            if self.folder.is_dir():
                remove_later_records(self.run_dir, iteration)
                for file in ledger_files(self.run_dir):
                    if not file.path.name.endswith(CLOSED):
                        close_file(file.path)

    def record_training(self, group: Group, step: int, values: TokenValues, trained_at: int | None) -> None:
        """Records that an optimizer step trained on a group."""
        if not self.enabled:
            return
        fate = self._fates.setdefault(group.group_id, GroupFate("trained", 0, trained_at=trained_at))
        fate.optimizer_steps.append(step)
        fate.token_values = fate.token_values or values

    def write_iteration(self, iteration: int, groups: Sequence[Group], stale_groups: Sequence[Group] = ()) -> None:
        """Writes the groups of an iteration, the groups that they replace, and stale groups.

        groups: in the order in which the learner received them.
        """
        if not self.enabled:
            return
        for group in groups:
            self._fates.setdefault(group.group_id, GroupFate("trained", 0)).iteration = iteration
        replaced_groups = [
            one for group in (*groups, *stale_groups) for one in islice(group.replacement_chain(), 1, None)
        ]
        lines = chain(
            (self._line(group, self._fates[group.group_id]) for group in groups),
            (self._line(group, GroupFate("replaced", iteration)) for group in replaced_groups),
            (self._line(group, GroupFate("stale", iteration)) for group in stale_groups),
        )  # lazy, since the lines of a large batch need much memory
        with self._catch_os_error():
            if self._open_file is None:
                self._open_file = self._create_file(self.folder / f"train_{iteration:06d}{OPEN}", "ab")
            if _write_lines(self._open_file, lines) > self.rotate_bytes:
                self._open_file.close()
                self._compress_in_thread(Path(self._open_file.name))
                self._open_file = None
        self._fates = {}

    @contextmanager
    def evaluation_writer(self, name: str, iteration: int) -> Iterator[Callable[[Group], None]]:
        """Yields a function that writes a group of one evaluation.

        The file gets its final name at the end of the block, and is removed if the block raises.
        """
        path = self.folder / f"eval_{name}_{iteration:06d}.jsonl.partial"
        fate = GroupFate("evaluated", iteration, eval_set=name)
        file: BinaryIO | None = None

        def write_group(group: Group) -> None:
            nonlocal file
            if self.enabled:
                with self._catch_os_error():
                    file = file or self._create_file(path, "wb")
                    _write_lines(file, [self._line(group, fate)])

        try:
            yield write_group
        except BaseException:
            if file is not None:
                file.close()
                path.unlink()
            raise
        if self.enabled and file is not None:
            with self._catch_os_error():
                file.close()
                self._compress_in_thread(path.rename(path.with_suffix("")))

    def close(self) -> None:
        """Compresses the last file at the end of a run."""
        if self._closing_thread is not None:
            self._closing_thread.join()
        if self.enabled and self._open_file is not None:
            with self._catch_os_error():
                self._open_file.close()
                close_file(Path(self._open_file.name))
        self._open_file = None

    @contextmanager
    def _catch_os_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.enabled:
                self.enabled = False
                message = f"{self.folder} cannot be written ({error.strerror}); the run continues without the ledger"
                self.on_warning(f"warning: {message}")

    def _line(self, group: Group, fate: GroupFate) -> bytes:
        record = group_to_record(group, fate)
        try:
            return orjson.dumps(record, default=_to_json_type, option=_OPTIONS)
        except orjson.JSONEncodeError:  # the answer has a lone surrogate, or an integer over 64 bits
            return orjson.dumps(record | {"answer": ascii(record["answer"])}, option=_OPTIONS)

    def _create_file(self, path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
        self.folder.mkdir(exist_ok=True)
        return path.open(mode, buffering=1 << 20)

    def _compress_in_thread(self, path: Path) -> None:
        """Compresses a file in a thread; compression releases the GIL."""
        if self._closing_thread is not None:
            self._closing_thread.join()
        self._closing_thread = Thread(target=self._compress_and_remove_oldest, args=(path,), name="ledger compression")
        self._closing_thread.start()

    def _compress_and_remove_oldest(self, path: Path) -> None:
        with self._catch_os_error():
            close_file(path)
            files = ledger_files(self.run_dir)
            sizes = {file.path: file.path.stat().st_size for file in files}
            for file in sorted(files, key=lambda file: (bool(file.eval_set), file.first_iteration)):
                if sum(sizes.values()) <= self.limit_bytes:
                    return
                if file.path.name.endswith(CLOSED):
                    file.path.unlink()
                    del sizes[file.path]


def _write_lines(file: BinaryIO, lines: Iterable[bytes]) -> int:
    """Writes all lines or none; returns the size of the file in bytes.

    If the disk has no room, the file is closed and truncated to its former size.
    """
    size_before = file.tell()
    try:
        file.writelines(lines)
        file.flush()
    except OSError:
        with suppress(OSError):  # closing flushes the buffer, which fails as well
            file.close()
        os.truncate(file.name, size_before)
        raise
    return file.tell()


def _to_json_type(value: Any) -> Any:
    """Converts a value of an answer or a reward component that JSON does not support."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
