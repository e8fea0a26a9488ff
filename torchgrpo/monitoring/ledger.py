"""The ledger: every group of a run, as the record it is, in `rollouts/` of the run's folder.

    judged group ─▶ learner: advantages, log-ratios ─▶ end of the iteration: its lines, in one write
    evaluation   ─▶ its lines as they come ─▶ a file of its own when all are there

It never stops a run: where it cannot write, it says so once and goes without.
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
from torchgrpo.monitoring.ledger_line import Fate, TokenValues, record_of
from torchgrpo.monitoring.ledger_storage import CLOSED, FOLDER, OPEN, close_file, keep_until, ledger_files

ROTATE_BYTES, ROTATE_SHARE = 1 << 26, 1 / 8
"""Of a plain file, or of all that the ledger may take, from which a file is closed."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class Ledger:
    """Writes groups once their fate is known.

    Args:
        limit_bytes: that all files may take; the oldest of training go first, then the oldest evaluations. 0: nothing
            is written.
        say: told once that the ledger cannot be written.
    """

    def __init__(self, run_dir: Path, limit_bytes: int, say: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / FOLDER
        self.limit_bytes = limit_bytes
        self.say = say
        self.rotate_bytes = min(ROTATE_BYTES, limit_bytes * ROTATE_SHARE)
        self.writes = limit_bytes > 0
        self._fates: dict[int, Fate] = {}
        self._open: BinaryIO | None = None
        self._closing: Thread | None = None

    def begin(self, after: int) -> None:
        """Go on after an iteration; lines of later ones, of an attempt that was given up, are removed."""
        with self._guarded():
            if self.folder.is_dir():
                keep_until(self.run_dir, after)
                for file in ledger_files(self.run_dir):
                    if not file.path.name.endswith(CLOSED):
                        close_file(file.path)

    def learned(self, group: Group, step: int, values: TokenValues, trained_at: int | None) -> None:
        """An optimizer step has trained on a group."""
        if not self.writes:
            return
        fate = self._fates.setdefault(group.group_id, Fate("trained", 0, trained_at=trained_at))
        fate.optimizer_steps.append(step)
        fate.tokens = fate.tokens or values

    def consumed(self, iteration: int, groups: Sequence[Group], stale: Sequence[Group] = ()) -> None:
        """The end of an iteration: write its groups, those that they replace, and those that were too old.

        groups: in the order in which the learner was given them.
        """
        if not self.writes:
            return
        for group in groups:
            self._fates.setdefault(group.group_id, Fate("trained", 0)).iteration = iteration
        refused = [one for group in (*groups, *stale) for one in islice(group.chain(), 1, None)]
        lines = chain(
            (self._line(group, self._fates[group.group_id]) for group in groups),
            (self._line(group, Fate("replaced", iteration)) for group in refused),
            (self._line(group, Fate("stale", iteration)) for group in stale),
        )  # one at a time: those of a large batch take hundreds of megabytes
        with self._guarded():
            if self._open is None:
                self._open = self._opened(self.folder / f"train_{iteration:06d}{OPEN}", "ab")
            if _write(self._open, lines) > self.rotate_bytes:
                self._open.close()
                self._close(Path(self._open.name))
                self._open = None
        self._fates = {}

    @contextmanager
    def evaluation(self, name: str, iteration: int) -> Iterator[Callable[[Group], None]]:
        """Takes the groups of one evaluation; the file gets its name at the end of the block."""
        path = self.folder / f"eval_{name}_{iteration:06d}.jsonl.partial"
        fate = Fate("evaluated", iteration, evaluated=name)
        file: BinaryIO | None = None

        def take(group: Group) -> None:
            nonlocal file
            if self.writes:
                with self._guarded():
                    file = file or self._opened(path, "wb")
                    _write(file, [self._line(group, fate)])

        try:
            yield take
        except BaseException:
            if file is not None:
                file.close()
                path.unlink()
            raise
        if self.writes and file is not None:
            with self._guarded():
                file.close()
                self._close(path.rename(path.with_suffix("")))

    def close(self) -> None:
        """The end of a run: every file is closed."""
        if self._closing is not None:
            self._closing.join()
        if self.writes and self._open is not None:
            with self._guarded():
                self._open.close()
                close_file(Path(self._open.name))
        self._open = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.writes:
                self.writes = False
                said = f"{self.folder} cannot be written ({error.strerror}); the run goes on without it"
                self.say(f"warning: {said}")

    def _line(self, group: Group, fate: Fate) -> bytes:
        record = record_of(group, fate)
        try:
            return orjson.dumps(record, default=_plain, option=_OPTIONS)
        except orjson.JSONEncodeError:  # an answer may be half a character, or a number of a hundred digits
            return orjson.dumps(record | {"answer": ascii(record["answer"])}, option=_OPTIONS)

    def _opened(self, path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
        self.folder.mkdir(exist_ok=True)
        return path.open(mode, buffering=1 << 20)

    def _close(self, path: Path) -> None:
        """In a thread: compressing lets go of the interpreter."""
        if self._closing is not None:
            self._closing.join()
        self._closing = Thread(target=self._close_and_bound, args=(path,), name="closes the ledger's files")
        self._closing.start()

    def _close_and_bound(self, path: Path) -> None:
        with self._guarded():
            close_file(path)
            files = ledger_files(self.run_dir)
            sizes = {file.path: file.path.stat().st_size for file in files}
            for file in sorted(files, key=lambda one: (bool(one.evaluated), one.number)):
                if sum(sizes.values()) <= self.limit_bytes:
                    return
                if file.path.name.endswith(CLOSED):
                    file.path.unlink()
                    del sizes[file.path]


def _write(file: BinaryIO, lines: Iterable[bytes]) -> int:
    """Write whole lines, or none where there is no room for all; returns the file's bytes.

    The file is closed where nothing was written.
    """
    before = file.tell()
    try:
        file.writelines(lines)
        file.flush()
    except OSError:
        with suppress(OSError):  # closing writes what is left, which fails as well
            file.close()
        os.truncate(file.name, before)
        raise
    return file.tell()


def _plain(value: Any) -> Any:
    """Convert a value of an answer or a reward's part that JSON does not know."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
