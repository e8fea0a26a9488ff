"""Writes, reads and checks a checkpoint's tensor files, sharded or full, by torch.distributed.checkpoint.

    name -> tensor, plain or this rank's shard of a DTensor ──write_tensors──▶ folder/ __RANK_0.distcp, .metadata
    folder ──read_tensors──▶ into existing tensors, however they are sharded
           └─SavedTensors──▶ full tensors, one at a time

Each rank writes its shards, and any number of ranks reads them. `.metadata` lists the tensors and their places in
the files. It is a pickle, so it is read by an unpickler that creates nothing but descriptions of tensors.
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
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from config.run_folder.atomic_files import sync_to_disk
from config.schema.errors import ConfigError, causes

METADATA = ".metadata"
_ALLOWED_GLOBALS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""Names that `.metadata` may refer to, by module."""
# torch warns with every checkpoint of a single process. The filter is global, since filters belong to no thread.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class UnreadableError(ConfigError):
    """Error about a checkpoint whose files are missing, incomplete or damaged."""


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the CPU's memory, out of reach of the next optimizer step."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Writes tensors into a folder and returns when all of them are on disk.

    group: the ranks that each call this function with their shards under the same names; it must work on a
    CPU (gloo), and no other thread may use it meanwhile. None: this process has all shards.
    """
    with _raise_first_failure():
        save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=_Writer(folder),
            process_group=group,
            no_dist=group is None,
        )
    sync_to_disk(folder)


def read_tensors(folder: Path, into: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Fills existing tensors from a folder by their names.

    The folder may hold other tensors too. group: as for `write_tensors`.

    Raises:
        UnreadableError: a file is damaged.
    """
    _load_tensors(folder, _Reader(folder, _read_metadata(folder)), into, group)


def _load_tensors(
    folder: Path, reader: "_Reader", into: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> None:
    """Fills tensors by a reader of a folder. Raises UnreadableError."""
    tensors = {name: tensor.detach() for name, tensor in into.items()}
    try:
        with _raise_first_failure():
            load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except (RuntimeError, ValueError, AssertionError, OSError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableError(f"the tensors in {folder} cannot be read ({reason})") from error


def saved_shapes(folder: Path) -> dict[str, list[int]]:
    """Returns the full shape of every tensor in a folder. Raises UnreadableError."""
    entries = _read_metadata(folder).state_dict_metadata
    return {name: list(one.size) for name, one in entries.items() if isinstance(one, TensorStorageMetadata)}


class SavedTensors:
    """The tensors of a folder, read one at a time. Raises UnreadableError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = _read_metadata(folder)
        self._reader = _Reader(folder, metadata)
        self._meta_tensors = {
            name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            for name, one in metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }

    @property
    def names(self) -> list[str]:
        return list(self._meta_tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._meta_tensors

    def meta_tensor(self, name: str) -> Tensor:
        """Returns a tensor of the saved shape and dtype on the meta device."""
        return self._meta_tensors[name]

    def read(self, name: str) -> Tensor:
        """Reads a full tensor into the CPU's memory."""
        tensor = torch.empty_like(self._meta_tensors[name], device="cpu")
        _load_tensors(self.folder, self._reader, {name: tensor})
        return tensor


def saved_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Reads the full tensors whose names begin with `prefix`, into the CPU's memory. Raises UnreadableError."""
    saved = SavedTensors(folder)
    return {name: saved.read(name) for name in saved.names if name.startswith(prefix)}


def check_tensor_files(folder: Path) -> None:
    """Checks every file's length by `.metadata`, without reading a tensor.

    Raises:
        UnreadableError: a file is missing or too short; the message has its name.
    """
    ends: dict[str, int] = {}
    for chunk in _read_metadata(folder).storage_data.values():
        ends[chunk.relative_path] = max(ends.get(chunk.relative_path, 0), chunk.offset + chunk.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            raise UnreadableError(f"{folder.name}/{name} is missing")
        if path.stat().st_size < end:
            raise UnreadableError(f"{folder.name}/{name} has {path.stat().st_size} bytes of {end}")


class _Writer(FileSystemWriter):
    """torch's writer, with the error of a full disk raised as that OSError.

    torch.save raises a RuntimeError that follows from the OSError, and a rank passes only the last exception on.
    """

    def write_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super().write_data(*args, **options)
        except RuntimeError as error:
            first = next((link for link in causes(error) if isinstance(link, OSError)), error)
            raise first from None


class _DescriptionUnpickler(pickle.Unpickler):
    """An unpickler of `.metadata` that refuses every name outside `_ALLOWED_GLOBALS`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        module = "pathlib" if module == "pathlib._local" else module  # the name of the module in Python 3.13
        if name not in _ALLOWED_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def _memory_format(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Returns a memory format by name, in place of `getattr`.

    Python before 3.11.4 pickles the member of an enumeration as a call of `getattr`.
    """
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"{name} of {kind} is not allowed")
    return _MEM_FORMAT_ENCODING[name]


class _Reader(FileSystemReader):
    """torch's reader, with metadata that is read once and cannot run code."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata
        metadata.storage_meta = metadata.storage_meta or StorageMeta()

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        assert self.metadata.storage_meta is not None
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


def _read_metadata(folder: Path) -> Metadata:
    """Reads `.metadata` of a folder.

    Raises:
        UnreadableError: the file is missing or damaged, or describes something other than tensors.
    """
    file_name = f"{folder.name}/{METADATA}"
    try:
        content = (folder / METADATA).read_bytes()
    except OSError as error:
        raise UnreadableError(f"{file_name}: {error.strerror}") from error
    try:
        metadata = _DescriptionUnpickler(io.BytesIO(content)).load()
        tensors = metadata.state_dict_metadata.values()
        all_tensors = all(isinstance(one, TensorStorageMetadata) for one in tensors)
        all_located = {index.fqn for index in metadata.storage_data} == set(metadata.state_dict_metadata)
    except Exception as error:  # unpickling a damaged file may raise anything
        raise UnreadableError(f"{file_name} is damaged ({type(error).__name__})") from error
    if not (isinstance(metadata, Metadata) and all_tensors and all_located):
        raise UnreadableError(f"{file_name} describes no tensors of a learner")
    return metadata


@contextmanager
def _raise_first_failure() -> Iterator[None]:
    """Raises the error of the lowest failed rank instead of torch's collection of tracebacks."""
    try:
        yield
    except CheckpointException as error:
        _, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        raise failure from None
