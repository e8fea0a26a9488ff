"""Memory, allocator and determinism of a training process."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from config.schema.config import Config
from config.schema.models import ModelConfig
from config.schema.train import TrainConfig
from tests.pretend_gpu import pretend_gpus
from tests.script_runner import call_script
from torchgrpo.training.process_setup import ALLOCATOR_VARIABLES, prepare_process

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


@pytest.fixture
def allocator_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Settings that the GPU allocator gets; torch's deterministic mode is restored afterwards."""
    settings: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    yield settings
    torch.use_deterministic_algorithms(is_deterministic, warn_only=True)


def prepare(device: str, deterministic: bool | None = None, shares_gpu_memory: bool = False) -> bool:
    """Prepares this process and returns whether torch is deterministic."""
    with pretend_gpus(2):
        config = Config(model=ModelConfig(name="tiny"), train=TrainConfig(deterministic=deterministic))
        prepare_process(config, None, torch.device(device), shares_gpu_memory)
        return torch.are_deterministic_algorithms_enabled()


def test_kernels_are_deterministic_by_default_on_a_cpu_alone(allocator_settings: list[str]) -> None:
    """An engine in the learner's process would use slow kernels too."""
    assert prepare("cpu")
    assert not prepare("cuda:1")
    assert prepare("cuda:1", deterministic=True)
    assert not prepare("cpu", deterministic=False)


def test_segments_of_gpu_memory_are_expandable(allocator_settings: list[str]) -> None:
    prepare("cpu")
    assert allocator_settings == []
    prepare("cuda:1")
    assert allocator_settings == ["expandable_segments:True"]


def test_segments_that_other_processes_open_are_not_expandable(allocator_settings: list[str]) -> None:
    prepare("cuda:0", shares_gpu_memory=True)
    assert allocator_settings == []


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_users_settings_of_the_allocator_hold(
    name: str, allocator_settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    prepare("cuda:0")
    assert allocator_settings == []


@pytest.mark.parametrize(("user_value", "expected"), [(None, "0"), ("1", "1")])
def test_kernels_of_the_hub_are_off_unless_the_user_wants_them(
    user_value: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("USE_HUB_KERNELS", raising=False)
    if user_value is not None:
        monkeypatch.setenv("USE_HUB_KERNELS", user_value)
    seen: list[str] = []
    monkeypatch.setattr("grpo_utils.run_job", lambda *arguments: seen.append(os.environ["USE_HUB_KERNELS"]))
    call_script("grpo.py", "--config-name", "grpo_quickstart", "run=plan")
    assert seen == [expected]
