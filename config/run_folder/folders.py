"""The folder of a run: its files, and the lock that a live run holds.

    folder ──held──▶ .lock: a lock that ends with its process, and in it who holds it

The lock is the kernel's, so that a killed run leaves none. It reaches as far as the file system's locks do: over all
nodes of NFS, Lustre (mounted with `flock`), GPFS or CephFS. Without locks, the owner that the file names decides.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from config.run_folder.checkpoints import FOLDER, MODELS, remove_unfinished_checkpoints
from config.run_folder.files import disk_full, remove_unfinished
from config.schema.errors import ConfigError

LOCK = ".lock"
_held: set[Path] = set()
"""What this process holds. Its lock on a file would end as soon as it closed the file a second time."""
SETTINGS = ".hydra"
SETTINGS_FILES = ("config.yaml", "hydra.yaml", "overrides.yaml")
LOG, ENGINE_LOG, SUMMARY, EVENTS = "grpo.log", "engine.log", "summary.json", "events.jsonl"
REPORT = "report.html"


@dataclass(frozen=True)
class Owner:
    """The process that holds a folder. began: when it started, in seconds since 1970."""

    host: str
    pid: int
    began: float

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def read(cls, descriptor: int) -> "Owner | None":
        """None where nobody has written, or not to the end."""
        try:
            return cls(**json.loads(os.pread(descriptor, 4096, 0)))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        return f"process {self.pid} on {self.host}, begun {since}"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """No other process works in `folder` during the block. What killed ones left unfinished there is removed.

    Raises:
        ConfigError: another one does, which the message names; nothing can be written there; or its name is no text.
    """
    key = folder.resolve()
    if str(key).encode(errors="ignore").decode() != str(key):
        raise ConfigError(
            f"hydra.run.dir={folder}: bytes of this path are no UTF-8, or the locale (LC_ALL, LANG) takes none, so the "
            "run's files cannot name it; choose another path, or a locale such as C.UTF-8"
        )
    if key in _held:
        raise _in_use(folder, Owner.this_process())
    descriptor = _lock(folder)
    _held.add(key)
    try:
        for place in (folder, folder / FOLDER, folder / MODELS):
            remove_unfinished(place)
        remove_unfinished_checkpoints(folder)
        yield
    finally:
        with suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink()
        os.close(descriptor)
        _held.discard(key)


def holder(folder: Path) -> Owner | None:
    """The process that works in a folder now; None where none does, or this user may not ask."""
    if folder.resolve() in _held:
        return Owner.this_process()
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        return _taken_by(descriptor)
    finally:
        os.close(descriptor)


def _in_use(folder: Path, owner: Owner) -> ConfigError:
    return ConfigError(
        f"hydra.run.dir={folder}: another run works in this folder ({owner}); take another folder, or wait until that "
        f"run has ended. If it is known to be dead, remove {folder / LOCK}"
    )


def _lock(folder: Path) -> int:
    """The descriptor that holds the lock: a lock of this process alone, which none of its children keeps."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if disk_full(error):
                raise
            raise ConfigError(
                f"hydra.run.dir={folder}: no file can be written there ({error.strerror}); take another folder"
            ) from error
        other = _taken_by(descriptor)
        if other is not None:
            os.close(descriptor)
            raise _in_use(folder, other)
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode(), 0)
                return descriptor
        os.close(descriptor)  # it was removed between `open` and the lock, by a run that ended


def _taken_by(descriptor: int) -> Owner | None:
    """None where the lock is now this process's; else who has it."""
    owner = Owner.read(descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return owner or Owner("a host that it has not named yet", 0, time.time())
    except OSError:  # a file system without locks
        if owner is None or owner == Owner.this_process():
            return None
        if owner.host != socket.gethostname():
            return owner
        with suppress(psutil.Error):
            if abs(psutil.Process(owner.pid).create_time() - owner.began) < 1:
                return owner
    return None


def save_settings(folder: Path, composed: DictConfig, hydra: Any) -> None:
    """Write `.hydra/` as Hydra would: the config as it was composed, Hydra's own, the command line."""
    saved = (composed, OmegaConf.create({"hydra": hydra}), hydra.overrides.task)
    (folder / SETTINGS).mkdir(exist_ok=True)
    for name, content in zip(SETTINGS_FILES, saved, strict=True):
        (folder / SETTINGS / name).write_text(OmegaConf.to_yaml(content), encoding="utf-8")


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of a job that has not begun, if it holds nothing but files that this process wrote.

    A folder that holds anything else keeps all of it, and loses the log if that is empty.
    """
    if any((folder / name).exists() for name in (LOCK, SETTINGS, "metrics.jsonl", FOLDER)):
        return
    began = psutil.Process().create_time()
    try:
        found = list(folder.iterdir())
        own = [
            path
            for path in found
            if path.name in (LOG, ENGINE_LOG, SUMMARY, EVENTS) and path.stat().st_mtime >= began
        ]
        for path in own:
            if len(own) == len(found) or (path.name == LOG and not path.stat().st_size):
                path.unlink()
        folder.rmdir()
        parents = folder.absolute().parents
        if len(parents) > 1 and parents[1] == Path("outputs").absolute():
            for emptied in parents[:2]:
                emptied.rmdir()
    except OSError:  # it is gone, or something else lies in one of them
        return
