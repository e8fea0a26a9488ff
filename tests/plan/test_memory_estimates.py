"""Estimated memory of the learner against its rehearsal, and between numbers of ranks.

No GPU is here: a rehearsal counts tensors that have a shape and no memory. tests/rehearsal/test_peaks.py compares the
peak of every shipped config at full depth.
"""

import json
from pathlib import Path

import pytest

from tests.scripts import configured
from torchgrpo.plan.activations import FLOAT
from torchgrpo.plan.disk import checkpoint_bytes
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import MASTER_BUCKET, Phase, between_steps, train_phases
from torchgrpo.plan.microbatches import CHUNK_BYTES, chunk_size
from torchgrpo.plan.model_shape import KNOWN, find_shape
from torchgrpo.plan.plan import Plan
from torchgrpo.run.rehearsal.step import Peaks, rehearse_memory
from torchgrpo.training.log_probs import CHUNK_ELEMENTS
from torchgrpo.training.master_weights import BUCKET_ELEMENTS

CLOSE = 0.15
MODELS = {size: f"Qwen/Qwen2.5-{size}-Instruct" for size in ("1.5B", "3B", "7B")}
SHAPES = {size: shape for size, name in MODELS.items() if (shape := find_shape(name))}
LORA, KEPT = "train_model.lora.enabled=true", "train.gradient_checkpointing=false"
HALF, ALONE, EIGHT = "model.dtype=bfloat16", "train_model.num_devices=1", "train_model.num_devices=8"
ONE_MICROBATCH = ("train.gradient_accumulation_steps=1", "train.optim_batch_size=16")
CASES = {
    "math 7B bf16": ("7B", "grpo_math", (HALF,)),
    "math 7B LoRA": ("7B", "grpo_math", (LORA, "model.dtype=float32")),
    "countdown 1.5B LoRA": ("1.5B", "grpo_countdown", (LORA,)),
    "countdown 1.5B kept": ("1.5B", "grpo_countdown", (KEPT, "train.gradient_accumulation_steps=16")),
    "countdown 1.5B one microbatch of 16": ("1.5B", "grpo_countdown", ONE_MICROBATCH),
    "countdown 1.5B entropy": ("1.5B", "grpo_countdown", ("policy.entropy_coef=0.01",)),
    "gsm8k 3B on 8": ("3B", "grpo_gsm8k", (EIGHT,)),
    "math 7B on 8 in groups of 4": ("7B", "grpo_math", (EIGHT, "train_model.shard_size=4")),
    "math 7B LoRA on 8": ("7B", "grpo_math", (EIGHT, LORA)),
    "countdown 1.5B on 8, one microbatch": ("1.5B", "grpo_countdown", (EIGHT, *ONE_MICROBATCH)),
}
"""Model, config and overrides."""
OFTEN = ("countdown 1.5B LoRA", "countdown 1.5B one microbatch of 16", "countdown 1.5B on 8, one microbatch")
"""Cases of the first tier."""
PHASES = {
    "score": ("score",),
    "optimize": ("forward", "backward"),
    "optimizer step": ("clip", "optimizer step"),
}
"""Of a plan, and those of a rehearsal that it sums up."""


def plan_of(size: str, name: str, *overrides: str) -> Plan:
    """The plan of a config with a model of this size on as many GPUs of 80 GiB as it needs, without a reference."""
    config = configured(ALONE, "policy.kl_coef=0", f"model.name={MODELS[size]}", *overrides, name=name)
    gpus = config.train_model.ranks + 1
    machine = Machine(gpus, 80.0, 512.0, 4096.0, "0.32.0", tuple(map(str, range(gpus))), imagined=True)
    return make_plan(config, False, machine)


def rehearsed(peaks: Peaks, phase: str) -> int:
    """Bytes of the rehearsal in a phase of the plan."""
    return max(peaks[part].total() for part in PHASES[phase])


def estimated(*asked: str) -> dict[str, Phase]:
    return {phase.name: phase for phase in plan_of(*asked).phases}


@pytest.mark.parametrize(
    ("size", "name", "overrides"),
    [
        pytest.param(*case, id=key, marks=() if key in OFTEN else pytest.mark.long)
        for key, case in CASES.items()
    ],
)
def test_every_phase_of_a_model_of_real_width(
    size: str, name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Two layers, all being alike, weigh less than the rest, which is to be right too."""
    raw = KNOWN[MODELS[size]] | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = plan_of(size, name, *overrides, f"model.name={tmp_path}")
    peaks = rehearse_memory(plan)
    for phase in plan.phases:
        assert phase.bytes == pytest.approx(rehearsed(peaks, phase.name), rel=CLOSE), phase.name


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


def test_a_base_in_4_bits() -> None:
    """Half a byte a parameter and 1/64 + 1/4096 for scales; embedding, head and norms are as without."""
    shape, adapters = SHAPES["7B"], "train_model.lora.enabled=true"
    small, whole = (
        configured(ALONE, adapters, f"train_model.lora.quantization={kind}", name="grpo_math")
        for kind in ("nf4", "none")
    )
    others = 2 * 152064 * 3584 + (2 * 28 + 1) * 3584
    assert shape.linear_parameters == shape.parameters - others
    saved = between_steps(whole, shape).bytes - between_steps(small, shape).bytes
    assert saved == shape.linear_parameters * (4 - 0.5 - 1 / 64 - 1 / 4096)
    phases = (train_phases(config, shape, False) for config in (small, whole))
    for phase, other in zip(*phases, strict=True):
        assert other.bytes - phase.bytes >= saved - 2 * 3584 * 18944, "less one matrix out of 4 bits"
    assert checkpoint_bytes(small, shape) == checkpoint_bytes(whole, shape)


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
    one, two, eight = (
        estimated("7B", "grpo_math", f"train_model.num_devices={ranks}") for ranks in (1, 2, 8)
    )
    for phase in ("optimize", "optimizer step"):
        assert one[phase].bytes > two[phase].bytes > eight[phase].bytes
    assert eight["optimizer step"].bytes == one["optimizer step"].bytes / 8


def test_every_part_names_a_knob_that_exists() -> None:
    sections = vars(configured(name="grpo_math"))
    for asked in (("7B", "grpo_code", HALF), ("3B", "grpo_gsm8k", LORA), ("1.5B", "grpo_countdown", KEPT)):
        for phase in estimated(*asked).values():
            for use in phase.uses:
                assert use.bytes >= 0
                for knob in use.knobs.split(" ")[0].rstrip(",").split(", "):
                    section, _, key = knob.partition(".")
                    assert key.partition("=")[0].split(".")[0] in vars(sections[section]), use
