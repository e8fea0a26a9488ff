"""Memory settings of a training process."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys

import torch

from torchgrpo.training.process_setup import keep_freed_memory


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(5_000_000) for _ in range(10)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
print(faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library's malloc is left as it is")
@pytest.mark.long
def test_freed_memory_is_reused_without_the_kernel() -> None:
    """200 MB are 48,828 pages of 4 KiB, or 95 huge ones."""

    def faults(mode: str) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True, timeout=900
        )
        return [int(each) for each in done.stdout.split()]

    first, again = faults("return")
    assert again > 0.9 * first > 80
    first, again = faults("keep")
    assert first > 80 and again < 0.5 * first
