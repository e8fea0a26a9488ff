"""Safetensors files, written a tensor at a time: names and sizes first, then the values as they are made.

parts: names and shapes, known before ──write_safetensors──▶ model.safetensors, or model-00001-of-00003.safetensors ...
and model.safetensors.index.json

The format is 8 bytes (the header's length), a JSON header with every tensor's dtype, shape and place, and the values.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LARGEST_FILE = 5 * 10**9
"""Bytes; a larger tensor is alone in its file."""
_NAMES = {
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
class Part:
    """Tensors that are made together, one as a rule.

    described: their names, shapes and dtypes, on the meta device. make: their values, by name.
    """

    described: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.described.values())


def write_safetensors(
    folder: Path, parts: Sequence[Part], stem: str = "model", largest: int = LARGEST_FILE
) -> None:
    """One file, or with more than `largest` bytes several and an index. Ends when all is on disk."""
    files = _files(parts, largest)
    if len(files) == 1:
        _write(folder / f"{stem}.safetensors", files[0])
        return
    places: dict[str, str] = {}
    for number, mine in enumerate(files, 1):
        name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        _write(folder / name, mine)
        places |= {tensor: name for part in mine for tensor in part.described}
    index = {"metadata": {"total_size": sum(part.nbytes for part in parts)}, "weight_map": places}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _files(parts: Sequence[Part], largest: int) -> list[list[Part]]:
    """The parts of each file; widest dtypes first, so that every tensor begins at a multiple of its width."""
    files: list[list[Part]] = []
    filled = 0
    for part in parts:
        if not files or filled + part.nbytes > largest:
            files.append([])
            filled = 0
        files[-1].append(part)
        filled += part.nbytes

    def width(part: Part) -> int:
        return min(tensor.element_size() for tensor in part.described.values())

    return [sorted(mine, key=width, reverse=True) for mine in files]


def _write(path: Path, parts: Sequence[Part]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in (item for part in parts for item in part.described.items()):
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(8, "little"))
        file.write(said)
        for part in parts:
            made = part.make()
            for name, tensor in part.described.items():
                values = made[name]
                assert values.shape == tensor.shape and values.dtype == tensor.dtype, name
                file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
