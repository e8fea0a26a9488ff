"""Estimated memory of the learner against torch's memory tracker on the learner's own step, and between devices.

No GPU is here: the tracker counts tensors that have a shape and no memory, as tests/plan/fake_learner.py says.
`benchmarks/memory.py` compares every case at full depth.
"""

from dataclasses import replace

import pytest

from benchmarks.memory import ALONE, CASES, SHAPES
from plan.activations import FLOAT
from plan.memory import (
    CHUNK_BYTES,
    MASTER_BUCKET,
    Phase,
    between_steps,
    chunk_size,
    train_phases,
)
from tests.plan.fake_learner import measured
from tests.scripts import configured
from training.log_probs import CHUNK_ELEMENTS
from training.master_weights import BUCKET_ELEMENTS

CLOSE = 0.15


def estimated(name: str, layers: int | None = None, ranks: int = 1, *overrides: str) -> dict[str, Phase]:
    size, config, ours = CASES[name]
    shape = SHAPES[size] if layers is None else replace(SHAPES[size], num_layers=layers)
    asked = (f"train_model.num_devices={ranks}", *ours, *overrides)
    phases = train_phases(configured(*asked, name=config), shape, on_cpu=False)
    return {phase.name: phase for phase in phases}


@pytest.mark.parametrize("name", ["countdown 1.5B", "gsm8k 3B", "code 7B"])
def test_the_peak_of_a_real_model(name: str) -> None:
    size, config, overrides = CASES[name]
    peaks = measured(configured(ALONE, *overrides, name=config), SHAPES[size], ["optimize"])
    assert estimated(name)["optimize"].bytes == pytest.approx(peaks["optimize"], rel=CLOSE)


@pytest.mark.parametrize(
    "name",
    ["math 7B bf16", "countdown 1.5B LoRA", "countdown 1.5B kept", "countdown 1.5B one microbatch of 16"],
)
def test_every_phase_of_a_model_of_real_width(name: str) -> None:
    """Two layers, all being alike, weigh less than the rest, which is to be right too."""
    size, config, overrides = CASES[name]
    peaks = measured(configured(ALONE, *overrides, name=config), replace(SHAPES[size], num_layers=2))
    phases = estimated(name, layers=2)
    assert list(peaks) == list(phases)
    for phase, peak in peaks.items():
        assert phases[phase].bytes == pytest.approx(peak, rel=CLOSE), phase


def test_numbers_that_are_the_learners_own() -> None:
    assert {device: number // FLOAT for device, number in CHUNK_BYTES.items()} == CHUNK_ELEMENTS
    assert MASTER_BUCKET == BUCKET_ELEMENTS
    gsm8k, small = configured(name="grpo_gsm8k"), configured("train.log_prob_chunk_size=7", name="grpo_gsm8k")
    assert chunk_size(gsm8k, SHAPES["7B"], on_cpu=False) == 896
    assert chunk_size(gsm8k, SHAPES["1.5B"], on_cpu=False) == 883
    assert chunk_size(small, SHAPES["7B"], on_cpu=False) == 7


def test_what_stays_between_two_steps() -> None:
    config, shape = configured(name="grpo_gsm8k"), SHAPES["3B"]
    assert between_steps(config, shape).bytes == 12 * shape.parameters
    half = configured("model.dtype=bfloat16", name="grpo_gsm8k")
    assert between_steps(half, shape).bytes == 12 * shape.parameters, "with the rest of the float32 numbers"
    lora = configured("train_model.lora.enabled=true", name="grpo_gsm8k")
    assert between_steps(lora, shape).bytes == 4 * shape.parameters + 12 * shape.lora_parameters(8)
    with_reference = between_steps(config, shape, reference="resident")
    assert with_reference.bytes == between_steps(config, shape).bytes + 2 * (
        shape.parameters + shape.head_parameters
    ), "its embedding is float32"


def test_shards_of_several_ranks() -> None:
    """What is resident falls with the shards, not with the ranks; offloading takes it away."""
    shape = SHAPES["7B"]

    def resident(*asked: str) -> float:
        return between_steps(configured(*asked, name="grpo_math"), shape).bytes

    assert resident("train_model.num_devices=8") == resident(ALONE) / 8
    assert resident("train_model.num_devices=16", "train_model.shard_size=8") == resident(ALONE) / 8
    assert resident("train_model.num_devices=8", "train_model.offload=optimizer") == 4 * shape.parameters / 8
    assert resident("train_model.num_devices=8", "train_model.offload=all") == 0


def test_ranks_take_less_memory_each() -> None:
    one, two, eight = (estimated("math 7B", ranks=ranks) for ranks in (1, 2, 8))
    for phase in ("optimize", "optimizer step"):
        assert one[phase].bytes > two[phase].bytes > eight[phase].bytes
    assert eight["optimizer step"].bytes == one["optimizer step"].bytes / 8


def test_every_part_names_a_knob_that_exists() -> None:
    sections = vars(configured(name="grpo_math"))
    for name in ("code 7B bf16", "gsm8k 3B LoRA", "countdown 1.5B kept"):
        for phase in estimated(name).values():
            for use in phase.uses:
                assert use.bytes >= 0
                for knob in use.knobs.split(" ")[0].rstrip(",").split(", "):
                    section, _, key = knob.partition(".")
                    assert key.partition("=")[0].split(".")[0] in vars(sections[section]), use
