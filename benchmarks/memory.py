"""Estimated memory of the learner against its rehearsal, for the shipped configs of billion-parameter models.

    python benchmarks/memory.py [WORD ...]        only the cases whose names contain a WORD

The rehearsal is the learner's own step on tensors that have a shape and no memory (`run=rehearse`): no GPU is needed,
only a few minutes. Sizes in GiB; the ratio is estimate / rehearsal.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plan.machine import Machine
from plan.make_plan import make_plan
from plan.model_shape import GIB
from plan.plan import Plan
from run.rehearsal.step import Peaks, rehearse_memory
from tests.scripts import configured

NAMES = {size: f"model.name=Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "32B")}
LORA, KEPT = "train_model.lora.enabled=true", "train.gradient_checkpointing=false"
HALF, FULL = "model.dtype=bfloat16", "model.dtype=float32"
SPLIT = "train.gradient_accumulation_steps=16"
ALONE, NO_REFERENCE = "train_model.num_devices=1", "policy.kl_coef=0"
EIGHT, GROUPS_OF_4 = "train_model.num_devices=8", "train_model.shard_size=4"
CASES = {
    "countdown 1.5B": ("1.5B", "grpo_countdown", ()),
    "gsm8k 3B": ("3B", "grpo_gsm8k", ()),
    "math 7B": ("7B", "grpo_math", (FULL,)),
    "code 7B": ("7B", "grpo_code", (FULL,)),
    "math 7B bf16": ("7B", "grpo_math", (HALF,)),
    "code 7B bf16": ("7B", "grpo_code", (HALF,)),
    "dapo 32B on 32": ("32B", "grpo_dapo", ("train_model.num_nodes=1",)),
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
    "gsm8k 3B on 8": ("3B", "grpo_gsm8k", (EIGHT,)),
    "math 7B on 8": ("7B", "grpo_math", (EIGHT,)),
    "math 7B on 8 in groups of 4": ("7B", "grpo_math", (EIGHT, GROUPS_OF_4)),
    "math 7B LoRA on 8": ("7B", "grpo_math", (EIGHT, LORA)),
    "countdown 1.5B on 8, one microbatch": (
        "1.5B",
        "grpo_countdown",
        (EIGHT, "train.gradient_accumulation_steps=1", "train.optim_batch_size=16"),
    ),
    "math 32B on 64": ("32B", "grpo_math", ("train_model.num_devices=64",)),
}
PHASES = {
    "score": ("score",),
    "optimize": ("forward", "backward"),
    "optimizer step": ("clip", "optimizer step"),
}
"""Of a plan, and those of a rehearsal that it sums up."""


def plan_of(name: str, *overrides: str) -> Plan:
    """The plan of a case on one node with as many GPUs of 80 GiB as it needs."""
    size, config_name, ours = CASES[name]
    alone = () if any("num_devices" in each for each in ours) else (ALONE,)
    config = configured(*alone, NO_REFERENCE, NAMES[size], *ours, *overrides, name=config_name)
    gpus = config.train_model.ranks + 1
    machine = Machine(gpus, 80.0, 512.0, 4096.0, "0.32.0", tuple(map(str, range(gpus))), imagined=True)
    return make_plan(config, False, machine)


def peak_of(peaks: Peaks, phase: str) -> int:
    """Bytes of the rehearsal in a phase of the plan."""
    return max(peaks[part].total() for part in PHASES[phase])


def compare(name: str) -> list[tuple[str, float, float]]:
    """Phase, rehearsed bytes, estimated bytes."""
    plan = plan_of(name)
    peaks = rehearse_memory(plan)
    return [(phase.name, peak_of(peaks, phase.name), phase.bytes) for phase in plan.phases]


def main() -> None:
    words = sys.argv[1:]
    print(f"{'case':42}{'phase':16}{'rehearsed':>10}{'estimate':>10}{'ratio':>7}")
    for name in CASES:
        if words and not any(word in name for word in words):
            continue
        for phase, rehearsed, estimate in compare(name):
            sizes = f"{rehearsed / GIB:10.2f}{estimate / GIB:10.2f}{estimate / rehearsed:7.2f}"
            print(f"{name:42}{phase:16}{sizes}", flush=True)


if __name__ == "__main__":
    main()
