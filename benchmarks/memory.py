"""Estimated memory of the learner against torch's memory tracker, for the shipped configs of billion-parameter models.

    python benchmarks/memory.py [WORD ...]        only the cases whose names contain a WORD

The tracker sees the learner's own step on tensors that have a shape and no memory (tests/plan/fake_learner.py): no GPU
is needed, only a few minutes. Sizes in GiB; the ratio is estimate / tracker.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plan.memory import train_phases
from plan.model_shape import GIB, KNOWN
from tests.plan.fake_learner import measured
from tests.scripts import configured

SHAPES = {size: KNOWN[f"Qwen/Qwen2.5-{size}-Instruct"] for size in ("1.5B", "3B", "7B")}
LORA, KEPT = "train_model.lora.enabled=true", "train.gradient_checkpointing=false"
HALF, FULL = "model.dtype=bfloat16", "model.dtype=float32"
SPLIT = "train.gradient_accumulation_steps=16"
ALONE = "train_model.num_devices=1"
CASES = {
    "countdown 1.5B": ("1.5B", "grpo_countdown", ()),
    "gsm8k 3B": ("3B", "grpo_gsm8k", ()),
    "math 7B": ("7B", "grpo_math", (FULL,)),
    "code 7B": ("7B", "grpo_code", (FULL,)),
    "math 7B bf16": ("7B", "grpo_math", (HALF,)),
    "code 7B bf16": ("7B", "grpo_code", (HALF,)),
    "dapo 7B": ("7B", "grpo_dapo", (FULL,)),
    "countdown 1.5B bf16": ("1.5B", "grpo_countdown", (HALF,)),
    "math 7B, 16 rows": ("7B", "grpo_math", (SPLIT,)),
    "countdown 1.5B LoRA": ("1.5B", "grpo_countdown", (LORA,)),
    "countdown 1.5B LoRA bf16": ("1.5B", "grpo_countdown", (LORA, HALF)),
    "gsm8k 3B LoRA": ("3B", "grpo_gsm8k", (LORA,)),
    "math 7B LoRA": ("7B", "grpo_math", (LORA, FULL)),
    "math 7B LoRA bf16": ("7B", "grpo_math", (LORA, HALF)),
    "countdown 1.5B kept": ("1.5B", "grpo_countdown", (KEPT, SPLIT)),
    "countdown 1.5B kept, whole rows": (
        "1.5B",
        "grpo_countdown",
        (KEPT, SPLIT, "train.packing=false"),
    ),
    "gsm8k 3B kept": ("3B", "grpo_gsm8k", (KEPT,)),
    "countdown 1.5B bf16 kept": ("1.5B", "grpo_countdown", (HALF, KEPT, SPLIT)),
    "countdown 1.5B LoRA kept": ("1.5B", "grpo_countdown", (LORA, KEPT, SPLIT)),
    "countdown 1.5B fp32": ("1.5B", "grpo_countdown", ("train.mixed_precision=fp32",)),
    "countdown 1.5B entropy": ("1.5B", "grpo_countdown", ("policy.entropy_coef=0.01",)),
    "countdown 1.5B one microbatch of 16": (
        "1.5B",
        "grpo_countdown",
        ("train.gradient_accumulation_steps=1", "train.optim_batch_size=16"),
    ),
    "countdown 1.5B muon": ("1.5B", "grpo_countdown", ("optimizer=muon_adamw",)),
}


def compare(name: str) -> list[tuple[str, float, float]]:
    """Phase, tracker's bytes, estimated bytes."""
    size, config_name, overrides = CASES[name]
    config = configured(ALONE, *overrides, name=config_name)
    peaks = measured(config, SHAPES[size])
    phases = train_phases(config, SHAPES[size], on_cpu=False)
    return [(phase.name, peaks[phase.name], phase.bytes) for phase in phases]


def main() -> None:
    words = sys.argv[1:]
    print(f"{'case':42}{'phase':16}{'tracker':>9}{'estimate':>10}{'ratio':>7}")
    for name in CASES:
        if words and not any(word in name for word in words):
            continue
        for phase, tracker, estimate in compare(name):
            sizes = f"{tracker / GIB:9.2f}{estimate / GIB:10.2f}{estimate / tracker:7.2f}"
            print(f"{name:42}{phase:16}{sizes}", flush=True)


if __name__ == "__main__":
    main()
