"""Locks a run's folder, names its files, saves settings, and removes the folder if unused.

    folder ──lock_folder──▶ .lock: a kernel lock; the file's content names the owner

The kernel releases the lock when its process ends, so that a killed run leaves no lock. The lock works across
all nodes of a file system with locks: NFS, Lustre (mounted with `flock`), GPFS or CephFS. On a file system
without locks, the owner in the file decides.
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

from config.run_folder.atomic_files import is_disk_full, remove_temporary_files
from config.run_folder.checkpoints import CHECKPOINTS_FOLDER, MODELS_FOLDER, remove_unfinished_checkpoints
from config.schema.errors import ConfigError

LOCK = ".lock"
_locked_folders: set[Path] = set()
"""Folders that this process has locked. POSIX drops a process's lock on a file at any `close` of that file."""
SETTINGS = ".hydra"
SETTINGS_FILES = ("config.yaml", "hydra.yaml", "overrides.yaml")
LOG, ENGINE_LOG, SUMMARY, EVENTS = "grpo.log", "engine.log", "summary.json", "events.jsonl"
REPORT = "report.html"


@dataclass(frozen=True)
class Owner:
    """The process that has locked a folder.

    began: the start time of the process, in seconds since 1970.
    """

    host: str
    pid: int
    began: float

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def read(cls, descriptor: int) -> "Owner | None":
        """Reads the owner from a lock file; None for an empty or incomplete file."""
        try:
            return cls(**json.loads(os.pread(descriptor, 4096, 0)))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        return f"process {self.pid} on {self.host}, started {since}"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks `folder` against other processes during the block, and removes partial files of killed runs.

    Raises:
        ConfigError: another process has the lock, the folder is not writable, or its path is not valid text.
    """
    key = folder.resolve()
    if str(key).encode(errors="ignore").decode() != str(key):
        raise ConfigError(
            f"hydra.run.dir={folder}: the path is not valid UTF-8, or the locale (LC_ALL, LANG) has no "
            "UTF-8, so the run's files cannot name the path; choose another path, or set a locale such as "
            "C.UTF-8"
        )
    if key in _locked_folders:
        raise _in_use_error(folder, Owner.this_process())
    descriptor = _open_lock(folder)
    _locked_folders.add(key)
    try:
        for place in (folder, folder / CHECKPOINTS_FOLDER, folder / MODELS_FOLDER):
            remove_temporary_files(place)
        remove_unfinished_checkpoints(folder)
        yield
    finally:
        with suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink()
        os.close(descriptor)
        _locked_folders.discard(key)


def lock_owner(folder: Path) -> Owner | None:
    """Returns the process that has locked a folder, or None.

    None also means that this user cannot open the lock file.
    """
    if folder.resolve() in _locked_folders:
        return Owner.this_process()
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        return _acquire_lock(descriptor)
    finally:
        os.close(descriptor)


def _in_use_error(folder: Path, owner: Owner) -> ConfigError:
    return ConfigError(
        f"hydra.run.dir={folder}: another run uses this folder ({owner}); choose another folder, or wait "
        f"until the other run has ended. If its process is dead, remove {folder / LOCK}"
    )


def _open_lock(folder: Path) -> int:
    """Acquires the folder's lock and returns the descriptor of the lock file.

    The lock belongs to this process alone: child processes do not inherit it.
    """
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ConfigError(
                f"hydra.run.dir={folder}: the folder cannot be written ({error.strerror}); choose another folder"
            ) from error
        other_owner = _acquire_lock(descriptor)
        if other_owner is not None:
            os.close(descriptor)
            raise _in_use_error(folder, other_owner)
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode(), 0)
                return descriptor
        os.close(descriptor)  # a run that ended removed the file between `open` and the lock


def _acquire_lock(descriptor: int) -> Owner | None:
    """Tries to acquire the lock; returns None on success, else the present owner."""
    owner = Owner.read(descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return owner or Owner("an unknown host", 0, time.time())
    except OSError:  # a file system without locks
        if owner is None or owner == Owner.this_process():
            return None
        if owner.host != socket.gethostname():
            return owner
        with suppress(psutil.Error):
            if abs(psutil.Process(owner.pid).create_time() - owner.began) < 1:
                return owner
    return None


def save_settings(folder: Path, composed_config: DictConfig, hydra: Any) -> None:
    """Writes `.hydra/` as Hydra does: the composed config, Hydra's own config, the overrides."""
    contents = (composed_config, OmegaConf.create({"hydra": hydra}), hydra.overrides.task)
    (folder / SETTINGS).mkdir(exist_ok=True)
    for name, content in zip(SETTINGS_FILES, contents, strict=True):
        (folder / SETTINGS / name).write_text(OmegaConf.to_yaml(content), encoding="utf-8")


def remove_unused_folder(folder: Path) -> None:
    """Removes the folder of an unstarted job if it holds only files of this process.

    A folder with other files keeps all of its files except an empty log.
    """
    if any((folder / name).exists() for name in (LOCK, SETTINGS, "metrics.jsonl", CHECKPOINTS_FOLDER)):
        return
    process_start = psutil.Process().create_time()
    try:
        paths = list(folder.iterdir())
        own_paths = [
            path
            for path in paths
            if path.name in (LOG, ENGINE_LOG, SUMMARY, EVENTS) and path.stat().st_mtime >= process_start
        ]
        for path in own_paths:
            if len(own_paths) == len(paths) or (path.name == LOG and not path.stat().st_size):
                path.unlink()
        folder.rmdir()
        parents = folder.absolute().parents
        if len(parents) > 1 and parents[1] == Path("outputs").absolute():
            for parent in parents[:2]:
                parent.rmdir()
    except OSError:  # a folder is removed already, or holds other files
        return
