"""From a batch on the host to an optimizer step, on pretended machines of 1 to 8 GPUs (see tests/pretend_gpu.py).

Whatever the layout, the numbers are those of the CPU, to the digit: only the devices differ.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from config.policy import PRESETS, PolicyConfig, load_policy
from tests.gpu_layouts.layouts import LAYOUTS, Case, Layout, host_batch, learner_on
from tests.pretend_gpu import pretend_gpus

HOST = Layout(0)
PRESET_NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
SWITCHES = list(itertools.product([False, True], repeat=3))


def presets_everywhere() -> Iterator[tuple[str, str, tuple[bool, bool, bool]]]:
    """Every preset on every layout; tied heads, LoRA and checkpointing take turns, so that each preset and each
    layout meets them all."""
    for row, preset in enumerate(PRESET_NAMES):
        for column, layout in enumerate(LAYOUTS):
            yield layout, preset, SWITCHES[(3 * row + 5 * column) % len(SWITCHES)]


def everything_of_grpo() -> Iterator[tuple[str, str, tuple[bool, bool, bool]]]:
    """The default preset, which has a reference, with every combination on every layout."""
    for layout, switches in itertools.product(LAYOUTS, SWITCHES):
        yield layout, "grpo", switches


@cache
def batch() -> TensorDict:
    return host_batch()


def step(layout: Layout, case: Case, run_dir: Path) -> dict[str, float]:
    learner = learner_on(layout, case, run_dir)
    report = learner.step(learner.prepare(batch().clone()))
    assert not report.skipped
    return report.metrics


@cache
def on_the_host(preset: str, tied: bool, lora: bool, checkpointing: bool, run_dir: Path) -> dict[str, float]:
    return step(HOST, case_of(preset, tied, lora, checkpointing), run_dir)


def case_of(preset: str, tied: bool, lora: bool, checkpointing: bool) -> Case:
    policy: PolicyConfig = load_policy(preset, overlong_cache=None, filter_range=None, dynamic_batching=False)
    return Case(policy, tied, lora, checkpointing)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


CASES = sorted({*presets_everywhere(), *everything_of_grpo()})


@pytest.mark.parametrize(("layout", "preset", "switches"), CASES, ids=str)
def test_a_step_gives_the_cpus_numbers(
    layout: str, preset: str, switches: tuple[bool, bool, bool], run_dir: Path
) -> None:
    expected = on_the_host(preset, *switches, run_dir)
    with pretend_gpus(LAYOUTS[layout].gpus):
        assert step(LAYOUTS[layout], case_of(preset, *switches), run_dir) == expected
