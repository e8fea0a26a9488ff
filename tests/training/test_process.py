"""What a training process sets for itself."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys

import torch

from torchgrpo.training.process import keep_freed_memory


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(5_000_000) for _ in range(10)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
print(faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library's malloc is left as it is")
@pytest.mark.long
def test_memory_that_was_freed_is_had_again_without_the_kernel() -> None:
    """200 MB are 48,828 pages of 4 KiB, or 95 huge ones."""

    def faults(how: str) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=900
        )
        return [int(each) for each in done.stdout.split()]

    first, again = faults("given back")
    assert again > 0.9 * first > 80
    first, again = faults("kept")
    assert first > 80 and again < 0.5 * first
