"""Writes a checkpoint in a thread, then removes old ones and exports the model.

state is copied ─▶ the run goes on                                (train.async_checkpoint=false: it waits here)
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
from torchgrpo.run.checkpoint_retention import remove_old_checkpoints

RunState = dict[str, Any]
"""State of a run that a checkpoint holds, without the learner's tensors."""


def skip_model_export(checkpoint: Path, state: RunState) -> None:
    """Writes no model: the default for `CheckpointWriter.export_model`."""


@dataclass(eq=False)
class CheckpointWriter:
    """Writes checkpoints in a thread; the next call raises an error of the thread.

    A checkpoint folder gets its name when it is complete.

    export_model: writes the model of a complete checkpoint. log: receives a message if `export_model` fails; the run
    goes on.
    """

    run_dir: Path
    train: TrainConfig
    export_model: Callable[[Path, RunState], None] = skip_model_export
    log: Callable[[str], None] = print
    _pending: tuple[Path, Future[str]] | None = field(default=None, init=False)

    @property
    def pending_checkpoint(self) -> str | None:
        """Name of the checkpoint that is being written; None where there is none."""
        return None if self._pending is None else self._pending[0].name

    def write(self, iteration: int, state: RunState, save: Callable[[Path], Callable[[], None]]) -> None:
        """Starts to write a checkpoint, once the one before and its model are complete.

        save: `Learner.save`.
        """
        from torchgrpo.training.checkpoint import LEARNER, begin_checkpoint, serialize_run_state

        self.wait()
        path = checkpoint_path(self.run_dir, iteration)
        wait_for_tensors = save(begin_checkpoint(path) / LEARNER)
        self._pending = path, Future()
        arguments = (*self._pending, serialize_run_state(state), wait_for_tensors, state)
        Thread(target=self._write, args=arguments, name=f"writes {path.name}", daemon=True).start()
        if not self.train.async_checkpoint:
            self.wait()

    def _write(
        self, path: Path, result: Future[str], run_bytes: bytes, wait_for_tensors: Callable[[], None], state: RunState
    ) -> None:
        from torchgrpo.training.checkpoint import abandon_checkpoint, complete_checkpoint

        try:
            wait_for_tensors()
            complete_checkpoint(path, run_bytes)
            remove_old_checkpoints(path, self.train)
        except BaseException as error:
            abandon_checkpoint(path)
            result.set_exception(error)
            return
        notice = ""
        try:
            self.export_model(path, state)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            notice = (
                f"{path.name} is complete, but its model was not written ({reason}). The run continues. "
                f"Export the model later:\n  python grpo.py run=export export.checkpoint={path} "
                "export.to=FOLDER"
            )
        result.set_result(notice)

    def check(self) -> None:
        """Raises the error of a write that has ended; does not wait."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits until the pending checkpoint and its model are complete.

        Raises:
            DeadlineError: they are not complete after `train.wait_timeout_s`.
        """
        if self._pending is None:
            return
        (path, result), limit = self._pending, self.train.wait_timeout_s
        done, _ = wait([result], timeout=limit)
        self._pending = None
        if not done:
            target = f"the model of {path}" if path.exists() else str(path)
            raise DeadlineError(
                f"the run waited {limit:.0f} s (train.wait_timeout_s) for {target} to be written: the file "
                "system does not answer, or is too slow for a checkpoint of this size; check the file "
                "system, or raise train.wait_timeout_s"
            )
        notice = result.result()
        if notice:
            self.log(notice)
