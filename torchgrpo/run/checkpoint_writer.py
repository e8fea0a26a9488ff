"""Checkpoints of a run, one at a time, written by a thread beside it.

state is copied ─▶ the run goes on                                   (train.async_checkpoint; else it waits here)
               └─▶ thread: tensors, run.pt ─▶ the folder gets its name ─▶ old ones are removed ─▶ its model
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from config.run_folder.checkpoints import checkpoint_path
from config.schema.errors import DeadlineError
from config.schema.train import TrainConfig
from torchgrpo.run.checkpoint_retention import remove_others

State = dict[str, Any]
"""Of a run, as a checkpoint holds it, all but the learner's tensors."""


def no_model(checkpoint: Path, state: State) -> None:
    """Makes none."""


@dataclass(eq=False)
class CheckpointWriter:
    """Gives a checkpoint its name when it is whole; what went wrong with it is raised by the next call.

    make_model: makes the model of a checkpoint that is whole. Where it fails, `say` is told and the run goes on.
    """

    run_dir: Path
    train: TrainConfig
    make_model: Callable[[Path, State], None] = no_model
    say: Callable[[str], None] = print
    _writing: tuple[Path, Future[str]] | None = field(default=None, init=False)

    @property
    def writing(self) -> str | None:
        return None if self._writing is None else self._writing[0].name

    def write(self, iteration: int, state: State, save: Callable[[Path], Callable[[], None]]) -> None:
        """Begin an iteration's checkpoint once the one before and its model are whole. save: `Learner.save`."""
        from torchgrpo.training.checkpoint import LEARNER, begin_checkpoint, packed

        self.wait()
        path = checkpoint_path(self.run_dir, iteration)
        tensors_written = save(begin_checkpoint(path) / LEARNER)
        self._writing = path, Future()
        arguments = (*self._writing, packed(state), tensors_written, state)
        Thread(target=self._write, args=arguments, name=f"writes {path.name}", daemon=True).start()
        if not self.train.async_checkpoint:
            self.wait()

    def _write(
        self, path: Path, written: Future[str], run: bytes, tensors_written: Callable[[], None], state: State
    ) -> None:
        from torchgrpo.training.checkpoint import abandon_checkpoint, complete_checkpoint

        try:
            tensors_written()
            complete_checkpoint(path, run)
            remove_others(path, self.train)
        except BaseException as error:
            abandon_checkpoint(path)
            written.set_exception(error)
            return
        told = ""
        try:
            self.make_model(path, state)
        except Exception as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            told = (
                f"{path.name} is whole, but no model of it was written ({why}). The run goes on. Later:\n"
                f"  python grpo.py run=export checkpoint={path} to=FOLDER"
            )
        written.set_result(told)

    def check(self) -> None:
        """Raise what went wrong, where that is known by now."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint that is being written has its name, and its model is made.

        Raises:
            DeadlineError: that is not so after `train.wait_timeout_s`.
        """
        if self._writing is None:
            return
        (path, written), limit = self._writing, self.train.wait_timeout_s
        done, _ = wait([written], timeout=limit)
        self._writing = None
        if not done:
            what = f"the model of {path}" if path.exists() else str(path)
            raise DeadlineError(
                f"the run waited {limit:.0f} s (train.wait_timeout_s) for {what} to be written: the file system does "
                "not answer, or is too slow for a checkpoint of this size"
            )
        told = written.result()
        if told:
            self.say(told)
