"""Default limits of a program's time, memory, threads, files and output in the sandbox.

`envs.sandbox.sandbox_child` sets them. For a tested program, `env.options` chooses time and memory
(`CodeOptions` in envs/verifiers/code.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program."""

    wall_seconds: float = 6.0
    cpu_seconds: int = 5
    memory_mib: int = 512
    """Address space."""
    threads: int = 32
    open_files: int = 64
    file_mib: int = 16
    """Size of one file."""
    disk_mib: int = 32
    """Total size of the files, of which there can be 1024."""
    output_mib: int = 8
    """Standard output, and the JSON of a function's result."""
