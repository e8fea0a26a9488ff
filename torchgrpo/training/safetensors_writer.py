"""Writes safetensors files, one group of tensors at a time.

TensorGroup: names and shapes, known in advance ──write_safetensors──▶ model.safetensors
                                         └─above max_file_bytes──▶ model-00001-of-00003.safetensors ... and index

The format is 8 bytes (the header's length), a JSON header with dtype, shape and offsets of every tensor, and
the values. The header is written first, then the values as they are computed.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_FILE_BYTES = 5 * 10**9
"""Bytes of the values in one file; a larger tensor has a file of its own."""
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are computed together, usually one.

    descriptions: names, shapes and dtypes, on the meta device. make: returns the values by name.
    """

    descriptions: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.descriptions.values())


def write_safetensors(
    folder: Path, groups: Sequence[TensorGroup], stem: str = "model", max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Writes groups of tensors to one file, or to several files and an index.

    Returns when all is on disk. max_file_bytes: size above which there are several files.
    """
    files = _split_into_files(groups, max_file_bytes)
    if len(files) == 1:
        _write_file(folder / f"{stem}.safetensors", files[0])
        return
    file_names: dict[str, str] = {}
    for number, file_groups in enumerate(files, 1):
        name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, file_groups)
        file_names |= {tensor: name for group in file_groups for tensor in group.descriptions}
    index = {"metadata": {"total_size": sum(group.nbytes for group in groups)}, "weight_map": file_names}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _split_into_files(groups: Sequence[TensorGroup], max_file_bytes: int) -> list[list[TensorGroup]]:
    """Returns the groups of each file.

    The widest dtypes come first, so that every tensor begins at a multiple of its width.
    """
    files: list[list[TensorGroup]] = []
    filled = 0
    for group in groups:
        if not files or filled + group.nbytes > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(group)
        filled += group.nbytes

    def width(group: TensorGroup) -> int:
        return min(tensor.element_size() for tensor in group.descriptions.values())

    return [sorted(file_groups, key=width, reverse=True) for file_groups in files]


def _write_file(path: Path, groups: Sequence[TensorGroup]) -> None:
    """Writes one safetensors file and syncs it to disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in (item for group in groups for item in group.descriptions.items()):
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little"))
        file.write(header_bytes)
        for group in groups:
            tensors = group.make()
            for name, tensor in group.descriptions.items():
                values = tensors[name]
                assert values.shape == tensor.shape and values.dtype == tensor.dtype, name
                file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
