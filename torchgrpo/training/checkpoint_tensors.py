"""Tensors on disk by torch.distributed.checkpoint: each rank writes its shards, any number of ranks reads them.

    name -> tensor, plain or this rank's part of a DTensor ──write_tensors──▶ folder/ __RANK_0.distcp, .metadata
    folder ──read_tensors──▶ into tensors that are there, whatever part of the whole they are
           └─SavedTensors──▶ whole tensors, one at a time

`.metadata` says what is where. It is a pickle, so it is read by an unpickler that makes nothing but descriptions.
"""

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from config.run_folder.files import sync_folder
from config.schema.errors import ConfigError, causes

METADATA = ".metadata"
_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""What `.metadata` may name, by module."""
# It says so with every checkpoint of one process. Not silenced around the call: that is no matter of one thread.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class UnreadableError(ConfigError):
    """A checkpoint that is none, or only a part of one."""


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the CPU's memory and of their own, so that the next step does not change them."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Ends when all is on disk.

    group: of the ranks that each call this with their parts under the same names, able to work on a CPU (gloo), and
        used by no other thread meanwhile. None: this process has all of it.
    """
    with _first_failure():
        save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=_Writer(folder),
            process_group=group,
            no_dist=group is None,
        )
    sync_folder(folder)


def read_tensors(folder: Path, into: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Fill tensors by their names; the folder may hold others too. group: as for `write_tensors`.

    Raises:
        UnreadableError: a file is damaged.
    """
    _load(folder, _Reader(folder, _metadata(folder)), into, group)


def _load(
    folder: Path, reader: "_Reader", into: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> None:
    wanted = {name: tensor.detach() for name, tensor in into.items()}
    try:
        with _first_failure():
            load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    except (RuntimeError, ValueError, AssertionError, OSError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableError(f"the tensors in {folder} cannot be read ({why})") from error


def saved_shapes(folder: Path) -> dict[str, list[int]]:
    """The whole shape of every tensor in a folder. Raises UnreadableError."""
    found = _metadata(folder).state_dict_metadata
    return {name: list(one.size) for name, one in found.items() if isinstance(one, TensorStorageMetadata)}


class SavedTensors:
    """The tensors of a folder, each read when it is asked for. Raises UnreadableError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = _metadata(folder)
        self._reader = _Reader(folder, metadata)
        self._empty = {
            name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            for name, one in metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }

    @property
    def names(self) -> list[str]:
        return list(self._empty)

    def __contains__(self, name: str) -> bool:
        return name in self._empty

    def described(self, name: str) -> Tensor:
        """Shape and dtype, on the meta device."""
        return self._empty[name]

    def read(self, name: str) -> Tensor:
        """Whole, in the CPU's memory."""
        tensor = torch.empty_like(self._empty[name], device="cpu")
        _load(self.folder, self._reader, {name: tensor})
        return tensor


def saved_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Those whose names begin with `prefix`, whole, in the CPU's memory. Raises UnreadableError."""
    saved = SavedTensors(folder)
    return {name: saved.read(name) for name in saved.names if name.startswith(prefix)}


def check_files(folder: Path) -> None:
    """Check every file's length by `.metadata`, reading no tensor. Raises UnreadableError with its name."""
    ends: dict[str, int] = {}
    for part in _metadata(folder).storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            raise UnreadableError(f"{folder.name}/{name} is missing")
        if path.stat().st_size < end:
            raise UnreadableError(f"{folder.name}/{name} has {path.stat().st_size} bytes of {end}")


class _Writer(FileSystemWriter):
    """torch's own, but that a full disk is raised as such: torch.save raises what came of it, and a rank passes on no
    more than the last exception."""

    def write_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super().write_data(*args, **options)
        except RuntimeError as error:
            first = next((link for link in causes(error) if isinstance(link, OSError)), error)
            raise first from None


class _DescriptionUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        module = "pathlib" if module == "pathlib._local" else module  # which Python 3.13 alone has
        if name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """What takes the place of `getattr`, by which Python before 3.11.4 writes the member of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"{name} of {kind} has no place in it")
    return _MEM_FORMAT_ENCODING[name]


class _Reader(FileSystemReader):
    """torch's own, but that nothing in the folder can run code, and that `.metadata` is read once."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata
        metadata.storage_meta = metadata.storage_meta or StorageMeta()

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        assert self.metadata.storage_meta is not None
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


def _metadata(folder: Path) -> Metadata:
    """Raises UnreadableError: there is none, or it is damaged, or describes what is no tensor."""
    place = f"{folder.name}/{METADATA}"
    try:
        content = (folder / METADATA).read_bytes()
    except OSError as error:
        raise UnreadableError(f"{place}: {error.strerror}") from error
    try:
        metadata = _DescriptionUnpickler(io.BytesIO(content)).load()
        tensors = metadata.state_dict_metadata.values()
        whole = all(isinstance(one, TensorStorageMetadata) for one in tensors)
        located = {index.fqn for index in metadata.storage_data} == set(metadata.state_dict_metadata)
    except Exception as error:  # unpickling what is damaged may raise anything
        raise UnreadableError(f"{place} is damaged ({type(error).__name__})") from error
    if not (isinstance(metadata, Metadata) and whole and located):
        raise UnreadableError(f"{place} describes no tensors of a learner")
    return metadata


@contextmanager
def _first_failure() -> Iterator[None]:
    """What went wrong on the lowest rank where something did, instead of torch's collection of tracebacks."""
    try:
        yield
    except CheckpointException as error:
        _, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        raise failure from None
