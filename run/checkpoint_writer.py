"""Checkpoints of a run, one at a time, written by a thread beside it.

state is copied ─▶ the run goes on                                   (train.async_checkpoint; else it waits here)
               └─▶ thread: tensors, run.pt ─▶ the folder gets its name ─▶ old ones are removed
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

from config.checkpoints import checkpoint_path
from config.errors import DeadlineError
from config.schema import TrainConfig


class CheckpointWriter:
    """Gives a checkpoint its name when it is whole; what went wrong with it is raised by the next call."""

    def __init__(self, run_dir: Path, train: TrainConfig) -> None:
        self.run_dir = run_dir
        self.train = train
        self._writing: tuple[Path, Future[None]] | None = None

    @property
    def writing(self) -> str | None:
        """The name of the checkpoint that is being written."""
        return None if self._writing is None else self._writing[0].name

    def write(
        self, iteration: int, state: dict[str, Any], save: Callable[[Path], Callable[[], None]]
    ) -> None:
        """Begin the checkpoint of an iteration, after the one before is whole.

        state: of the run, all but the learner's tensors. save: `Learner.save`.
        """
        from training.checkpoint import LEARNER, begin_checkpoint, packed

        self.wait()
        path = checkpoint_path(self.run_dir, iteration)
        tensors_written = save(begin_checkpoint(path) / LEARNER)
        self._writing = path, Future()
        arguments = (*self._writing, packed(state), tensors_written)
        Thread(target=self._write, args=arguments, name=f"writes {path.name}", daemon=True).start()
        if not self.train.async_checkpoint:
            self.wait()

    def _write(
        self, path: Path, written: Future[None], run: bytes, tensors_written: Callable[[], None]
    ) -> None:
        from training.checkpoint import abandon_checkpoint, complete_checkpoint

        try:
            tensors_written()
            complete_checkpoint(path, run, self.train.keep_checkpoints)
        except BaseException as error:
            abandon_checkpoint(path)
            written.set_exception(error)
        else:
            written.set_result(None)

    def check(self) -> None:
        """Raise what went wrong, where that is known by now."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint that is being written has its name.

        Raises:
            DeadlineError: it has none after `train.wait_timeout_s`.
        """
        if self._writing is None:
            return
        (path, written), limit = self._writing, self.train.wait_timeout_s
        done, _ = wait([written], timeout=limit)
        self._writing = None
        if not done:
            raise DeadlineError(
                f"the run waited {limit:.0f} s (train.wait_timeout_s) for {path} to be written: the file system does "
                "not answer, or is too slow for a checkpoint of this size"
            )
        written.result()
