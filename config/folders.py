"""The folder of a run: its unique name, and the lock that a live run holds.

    outputs/DATE/TIME ──unused_folder──▶ outputs/DATE/TIME or TIME-1, TIME-2 ...     made before Hydra writes to it
    folder ──held──▶ .lock: a lock that ends with its process, and beside it who holds it

The lock is the kernel's, so that a killed run leaves none. It reaches as far as the file system's locks do: over all
nodes of NFS, Lustre (mounted with `flock`), GPFS or CephFS. Where it ends at the node, the owner that the file names
decides.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from config.checkpoints import FOLDER, MODELS, remove_unfinished_checkpoints
from config.errors import ConfigError
from config.files import disk_full, remove_unfinished

LOCK = ".lock"
_held: set[Path] = set()
"""What this process holds. Its lock on a file would end as soon as it closed the file a second time."""
_made: set[Path] = set()
"""Folders that this process made for a run's folder to lie in."""
SETTINGS = ".hydra"
SETTINGS_FILES = ("config.yaml", "hydra.yaml", "overrides.yaml")
LOG, ENGINE_LOG, SUMMARY, EVENTS = "grpo.log", "engine.log", "summary.json", "events.jsonl"
REPORT = "report.html"
_ENDS_AT_THE_NODE = {
    "localflock",
    "noflock",
    "nolock",
    "local_lock=all",
    "local_lock=flock",
    "local_lock=posix",
}
"""Mount options of network file systems whose locks the other nodes do not see."""


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

    @property
    def may_live(self) -> bool:
        """Whether it is a process of this machine that is there, or one of another machine."""
        if self.host != socket.gethostname():
            return True
        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.began) < 1)
        except psutil.Error:
            return False


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
        return _taken_by(descriptor, folder)
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
        descriptor = _opened(path)
        other = _taken_by(descriptor, folder)
        if other is not None:
            os.close(descriptor)
            raise _in_use(folder, other)
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode(), 0)
                return descriptor
        os.close(descriptor)  # it was removed between `open` and the lock, by a run that ended


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if disk_full(error):
            raise
        raise ConfigError(
            f"hydra.run.dir={path.parent}: no file can be written there ({error.strerror}); take another folder"
        ) from error


def _taken_by(descriptor: int, folder: Path) -> Owner | None:
    """None where the lock is now this process's; else who has it."""
    owner = Owner.read(descriptor)
    reaches_all = True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return owner or Owner("a host that it has not named yet", 0, time.time())
    except OSError:  # a file system without locks
        reaches_all = False
    if owner is None or owner == Owner.this_process() or not owner.may_live:
        return None
    here = owner.host == socket.gethostname()
    return owner if here or not reaches_all or _locks_end_at_the_node(folder) else None


def _locks_end_at_the_node(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether the file system is mounted so that other nodes do not see its locks."""
    place, found, options = folder.resolve(), Path(), ""
    with suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, point, _, its, *_ = line.split()
            mount = Path(point.encode().decode("unicode_escape"))
            if place.is_relative_to(mount) and len(mount.parts) >= len(found.parts):
                found, options = mount, its
    return bool(_ENDS_AT_THE_NODE & set(options.split(",")))


def register_unused_folder() -> None:
    """Makes `${unused_folder:NAME}` known to OmegaConf: NAME, or NAME-1, NAME-2 ... where others have that already.

    The folder is made, so that of runs which start at one time each gets its own; OmegaConf asks once per run.
    """
    OmegaConf.register_new_resolver("unused_folder", unused_folder, replace=True, use_cache=True)


def unused_folder(name: str) -> str:
    path, count = Path(name), 0
    try:
        while True:
            _made.update(parent for parent in path.absolute().parents if not parent.exists())
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
                return str(path)
            except FileExistsError:
                count += 1
                path = Path(f"{name}-{count}")
            except FileNotFoundError:
                if path.parent.exists():
                    raise
                # else a run that never began has just taken the folder of the day with it
    except OSError as error:
        raise ConfigError(
            f"{path.absolute()}: this folder cannot be made ({error.strerror}); start in another one, or name one that "
            "can be written: hydra.run.dir=FOLDER, of a sweep hydra.sweep.dir=FOLDER"
        ) from error


def save_settings(folder: Path, composed: DictConfig, hydra: Any) -> None:
    """Write `.hydra/` as Hydra would: the config as it was composed, Hydra's own, the command line."""
    saved = (composed, OmegaConf.create({"hydra": hydra}), hydra.overrides.task)
    (folder / SETTINGS).mkdir(exist_ok=True)
    for name, content in zip(SETTINGS_FILES, saved, strict=True):
        (folder / SETTINGS / name).write_text(OmegaConf.to_yaml(content), encoding="utf-8")


def remove_if_unused(folder: Path) -> None:
    """A run that never began leaves no folder behind. Nothing of anybody else's is removed."""
    if holder(folder) is not None or any((folder / name).exists() for name in ("metrics.jsonl", FOLDER)):
        return
    written = (LOG, ENGINE_LOG, SUMMARY, EVENTS, LOCK, *(f"{SETTINGS}/{name}" for name in SETTINGS_FILES))
    for name in written:
        with suppress(OSError):
            (folder / name).unlink()
    around = takewhile(_made.__contains__, folder.absolute().parents)
    for emptied in (folder / SETTINGS, folder, *around):
        with suppress(OSError):  # something else lies in it
            emptied.rmdir()
