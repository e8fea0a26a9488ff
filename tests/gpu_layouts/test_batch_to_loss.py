"""Optimizer steps on simulated machines of 1 to 8 GPUs, from groups on the host.

All layouts give the results of one GPU, which in float32 are those of the CPU. See tests/pretend_gpu.py.
"""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

from config.schema.policy import load_policy
from envs.group import Group
from tests.gpu_layouts.layouts import LAYOUTS, LEARNER_LAYOUTS, Case, Layout, learner_on, save_tiny, scored_groups
from tests.groups import credit_groups
from tests.pretend_gpu import pretend_gpus
from tests.training.presets import DEFAULT_TIER, NAMES
from torchgrpo.training.kl import ESTIMATORS

HOST, ONE = Layout(0), Layout(1)
Switches = tuple[bool, bool, bool]
"""Tied head, LoRA, gradient checkpointing."""

SWITCHES: list[Switches] = list(itertools.product([False, True], repeat=3))


def presets_everywhere() -> Iterator[tuple[str, str, Switches]]:
    """Yields every preset with the learner on the first GPU and on another.

    The switches take turns among the presets.
    """
    for row, preset in enumerate(NAMES):
        for layout in LEARNER_LAYOUTS:
            yield layout, preset, SWITCHES[3 * row % len(SWITCHES)]


def grpo_everywhere() -> Iterator[tuple[str, str, Switches]]:
    """Yields the default preset on every layout, with every home of a reference.

    An even number of the switches is on.
    """
    pairs = [switches for switches in SWITCHES if sum(switches) % 2 == 0]
    for layout, switches in itertools.product(LAYOUTS, pairs):
        yield layout, "grpo", switches


CASES = [
    pytest.param(*case, marks=() if case[1] in DEFAULT_TIER else pytest.mark.long)
    for case in sorted({*presets_everywhere(), *grpo_everywhere()})
]


@cache
def groups() -> list[Group]:
    return scored_groups()


Folders = tuple[Path, Path]
"""Folders of the tiny model without and with a tied head."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    untied, tied = (save_tiny(tmp_path_factory.mktemp("model"), tied) for tied in (False, True))
    return untied, tied


@cache
def step(layout: Layout, preset: str, switches: Switches, precision: str, folders: Folders) -> dict[str, float]:
    """Returns metrics of one optimizer step on a machine of `layout.gpus` simulated GPUs."""
    tied, lora, checkpointing = switches
    policy = load_policy(preset, overlong_cache=None, filter_range=None, dynamic_batching=False)
    case = Case(policy, folders[tied], tied, lora, checkpointing, precision)
    with pretend_gpus(layout.gpus) if layout.gpus else nullcontext():
        learner, plan = learner_on(layout, case, folders[tied])
        there = torch.device(plan.devices.train_device)
        assert {parameter.device for parameter in learner.worker.model.parameters()} == {there}
        report = learner.step(credit_groups(learner, groups()))
    assert not report.is_skipped
    return report.metrics


@pytest.mark.parametrize(("layout", "preset", "switches"), CASES, ids=str)
def test_every_layout_gives_the_numbers_of_one_gpu(
    layout: str, preset: str, switches: Switches, folders: Folders
) -> None:
    expected = step(ONE, preset, switches, "bf16", folders)
    assert step(LAYOUTS[layout], preset, switches, "bf16", folders) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_a_scorer_on_a_gpu_of_its_own_gives_the_numbers_of_one_process(
    placement: str, estimator: str, folders: Folders
) -> None:
    policy = load_policy("grpo", kl_coef=0.1, kl_placement=placement, kl_estimator=estimator)
    case = Case(policy, folders[False], precision="fp32")
    found = []
    for layout in (HOST, LAYOUTS["3 GPUs"]):
        with pretend_gpus(layout.gpus) if layout.gpus else nullcontext():
            learner, plan = learner_on(layout, case, folders[False])
            found.append([learner.step(credit_groups(learner, groups())).metrics for _ in range(2)])
    assert plan.reference.home == "own devices" and plan.reference.devices == (2,)
    for here, there in zip(*found, strict=True):
        for name in ("loss/objective", "loss/kl", "kl/ref", "grad_norm"):
            assert there[name] == pytest.approx(here[name], rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("preset", ["grpo", "compat_nanochat", "compat_torchrl"])
def test_one_gpu_gives_the_cpus_numbers(preset: str, folders: Folders) -> None:
    switches = (False, False, False)
    expected = step(HOST, preset, switches, "fp32", folders)
    assert step(ONE, preset, switches, "fp32", folders) == pytest.approx(expected, rel=1e-3, abs=1e-6)
