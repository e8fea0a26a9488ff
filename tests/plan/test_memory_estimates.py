"""Compares the learner's estimated memory with a dry run, and between numbers of ranks.

No GPU is needed: a dry run counts fake tensors, which have a shape but no memory. tests/dry_run/test_peaks.py compares
the peak of every shipped config at full depth.
"""

import json
from pathlib import Path

import pytest

from tests.script_runner import compose_run_config
from torchgrpo.plan.disk import checkpoint_bytes
from torchgrpo.plan.known_models import KNOWN_MODELS
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import MASTER_BUCKET, Phase, resident_phase, train_phases
from torchgrpo.plan.microbatch_sizes import chunk_size
from torchgrpo.plan.model_shape import find_shape
from torchgrpo.plan.plan import Plan
from torchgrpo.run.dry_run.step import Peaks, dry_run_peaks
from torchgrpo.training.master_weights import BUCKET_ELEMENTS

CLOSE = 0.15
MODELS = {size: f"Qwen/Qwen2.5-{size}-Instruct" for size in ("1.5B", "3B", "7B")}
SHAPES = {size: shape for size, name in MODELS.items() if (shape := find_shape(name))}
LORA, NO_CHECKPOINTING = "train_model.lora.enabled=true", "train.gradient_checkpointing=false"
SELECTIVE = "train.gradient_checkpointing=selective"
FLOAT32, HALF = "model.dtype=float32", "model.dtype=bfloat16"
ALONE, EIGHT = "train_model.num_devices=1", "train_model.num_devices=8"
ONE_MICROBATCH = ("train.gradient_accumulation_steps=1", "train.optim_batch_size=16")
CASES = {
    "math 7B bf16": ("7B", "grpo_math", (HALF,)),
    "math 7B LoRA": ("7B", "grpo_math", (LORA, FLOAT32)),
    "countdown 1.5B LoRA": ("1.5B", "grpo_countdown", (LORA,)),
    "countdown 1.5B kept": ("1.5B", "grpo_countdown", (NO_CHECKPOINTING, "train.gradient_accumulation_steps=16")),
    "countdown 1.5B selective": ("1.5B", "grpo_countdown", (SELECTIVE,)),
    "countdown 1.5B LoRA selective": ("1.5B", "grpo_countdown", (LORA, SELECTIVE)),
    "gsm8k 3B on 8 selective": ("3B", "grpo_gsm8k", (EIGHT, SELECTIVE)),
    "countdown 1.5B one microbatch of 16": ("1.5B", "grpo_countdown", ONE_MICROBATCH),
    "countdown 1.5B entropy": ("1.5B", "grpo_countdown", ("policy.entropy_coef=0.01",)),
    "gsm8k 3B on 8": ("3B", "grpo_gsm8k", (EIGHT,)),
    "math 7B on 8 in groups of 4": ("7B", "grpo_math", (EIGHT, "train_model.shard_size=4")),
    "math 7B LoRA on 8": ("7B", "grpo_math", (EIGHT, LORA)),
    "countdown 1.5B on 8, one microbatch": ("1.5B", "grpo_countdown", (EIGHT, *ONE_MICROBATCH)),
}
"""Model size, config and overrides by case."""
FAST_CASES = (
    "countdown 1.5B LoRA",
    "countdown 1.5B selective",
    "countdown 1.5B one microbatch of 16",
    "countdown 1.5B on 8, one microbatch",
)
"""Cases that run in the fast tests."""
PHASES = {"score": ("score",), "optimize": ("forward", "backward"), "optimizer step": ("clip", "optimizer step")}
"""Phases of a plan, with the phases of a dry run that each covers."""


def plan_of(size: str, name: str, *overrides: str) -> Plan:
    """Plans a config with a model of this size, without a reference.

    There are as many GPUs of 80 GiB as the plan needs.
    """
    config = compose_run_config(ALONE, "policy.kl_coef=0", f"model.name={MODELS[size]}", *overrides, name=name)
    gpus = config.train_model.ranks + 1
    machine = Machine(gpus, 80.0, 512.0, 4096.0, "0.32.0", tuple(map(str, range(gpus))), is_hypothetical=True)
    return make_plan(config, False, machine)


def dry_run_bytes(peaks: Peaks, phase: str) -> int:
    """Returns the peak bytes of a dry run in a phase of the plan."""
    return max(peaks[step_phase].total() for step_phase in PHASES[phase])


def estimated_phases(*case: str) -> dict[str, Phase]:
    return {phase.name: phase for phase in plan_of(*case).phases}


@pytest.mark.parametrize(
    ("size", "name", "overrides"),
    [pytest.param(*case, id=key, marks=() if key in FAST_CASES else pytest.mark.long) for key, case in CASES.items()],
)
def test_every_phase_of_a_model_of_real_width(size: str, name: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Two layers suffice, since all layers are equal; the other parameters dominate."""
    raw = KNOWN_MODELS[MODELS[size]] | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = plan_of(size, name, *overrides, f"model.name={tmp_path}")
    peaks = dry_run_peaks(plan)
    for phase in plan.phases:
        assert phase.bytes == pytest.approx(dry_run_bytes(peaks, phase.name), rel=CLOSE), phase.name


def test_constants_equal_those_of_the_learner() -> None:
    assert MASTER_BUCKET == BUCKET_ELEMENTS


def test_chunk_sizes() -> None:
    """A chunk on a GPU has a whole number of matrix tiles.

    It has at least half as many logits as the head has elements.
    """
    gsm8k, small = (
        compose_run_config(name="grpo_gsm8k"),
        compose_run_config("train.log_prob_chunk_size=7", name="grpo_gsm8k"),
    )
    assert chunk_size(gsm8k, SHAPES["7B"], on_cpu=False) == 1792
    assert chunk_size(gsm8k, SHAPES["1.5B"], on_cpu=False) == 1664
    assert chunk_size(gsm8k, SHAPES["1.5B"], on_cpu=True) == 384
    assert chunk_size(small, SHAPES["7B"], on_cpu=False) == 7


def test_what_stays_between_two_steps() -> None:
    config, shape = compose_run_config(FLOAT32, name="grpo_gsm8k"), SHAPES["3B"]
    assert resident_phase(config, shape).bytes == 12 * shape.parameters
    half = compose_run_config(HALF, name="grpo_gsm8k")
    assert resident_phase(half, shape).bytes == 12 * shape.parameters, "with the rest of the float32 numbers"
    lora = compose_run_config(LORA, FLOAT32, name="grpo_gsm8k")
    assert resident_phase(lora, shape).bytes == 4 * shape.parameters + 12 * shape.lora_parameters(8)
    with_reference = resident_phase(config, shape, reference="resident")
    assert with_reference.bytes == resident_phase(config, shape).bytes + 2 * (
        shape.parameters + shape.head_parameters
    ), "its embedding is float32"


def test_a_base_in_4_bits() -> None:
    """A parameter takes half a byte, and its scales 1/64 + 1/4096 bytes.

    Embedding, head and norms are not quantized.
    """
    shape = SHAPES["7B"]
    small, whole = (
        compose_run_config(ALONE, LORA, FLOAT32, f"train_model.lora.quantization={kind}", name="grpo_math")
        for kind in ("nf4", "none")
    )
    others = 2 * 152064 * 3584 + (2 * 28 + 1) * 3584
    assert shape.linear_parameters == shape.parameters - others
    saved = resident_phase(whole, shape).bytes - resident_phase(small, shape).bytes
    assert saved == shape.linear_parameters * (4 - 0.5 - 1 / 64 - 1 / 4096)
    phases = (train_phases(config, shape, False) for config in (small, whole))
    for phase, other in zip(*phases, strict=True):
        assert other.bytes - phase.bytes >= saved - 2 * 3584 * 18944, "less one dequantized matrix"
    assert checkpoint_bytes(small, shape) == checkpoint_bytes(whole, shape)


def test_shards_of_several_ranks() -> None:
    """Resident bytes are divided by the shards, not by the ranks; offloading removes them."""
    shape = SHAPES["7B"]

    def resident(*case: str) -> float:
        return resident_phase(compose_run_config(FLOAT32, *case, name="grpo_math"), shape).bytes

    assert resident("train_model.num_devices=8") == resident(ALONE) / 8
    assert resident("train_model.num_devices=16", "train_model.shard_size=8") == resident(ALONE) / 8
    assert resident("train_model.num_devices=8", "train_model.offload=optimizer") == 4 * shape.parameters / 8
    assert resident("train_model.num_devices=8", "train_model.offload=all") == 0


def test_ranks_take_less_memory_each() -> None:
    case = ("7B", "grpo_math", FLOAT32)
    one, two, eight = (estimated_phases(*case, f"train_model.num_devices={ranks}") for ranks in (1, 2, 8))
    for phase in ("optimize", "optimizer step"):
        assert one[phase].bytes > two[phase].bytes > eight[phase].bytes
    assert eight["optimizer step"].bytes == one["optimizer step"].bytes / 8


def test_every_use_names_an_existing_key() -> None:
    sections = vars(compose_run_config(name="grpo_math"))
    for case in (("7B", "grpo_code", HALF), ("3B", "grpo_gsm8k", LORA), ("1.5B", "grpo_countdown", NO_CHECKPOINTING)):
        for phase in estimated_phases(*case).values():
            for use in phase.uses:
                assert use.bytes >= 0
                for knob in use.knobs.split(" ")[0].rstrip(",").split(", "):
                    section, _, key = knob.partition(".")
                    assert key.partition("=")[0].split(".")[0] in vars(sections[section]), use
