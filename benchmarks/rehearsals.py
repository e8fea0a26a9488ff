"""What `run=rehearse` says of the recipes: the lines of docs/scaling.md.

    python benchmarks/rehearsals.py           prints them: two minutes on two cores, no GPU
    python benchmarks/rehearsals.py --write   puts them there

Of the phases only the fullest is kept, and what is the same for all is left out.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.pages import Recorded  # noqa: E402

RECORDED = Recorded(__file__, "scaling.md")
HALF = ("train_model.num_devices=4", "inference_model.num_devices=4")
NODES = ("plan.nodes=8", "plan.gpus=8", "plan.gpu_memory_gib=80")
FOUR_NODES = (
    *("train_model.num_devices=32", "train_model.num_nodes=4", "train.gradient_accumulation_steps=4"),
    *("train.optim_batch_size=512", "inference_model.num_devices=32"),
)
RECIPES = (
    ("grpo_gsm8k_24gb", "plan.gpus=1", "plan.gpu_memory_gib=24"),
    ("grpo_gsm8k", "plan.gpus=2", "plan.gpu_memory_gib=80"),
    ("grpo_gsm8k", *HALF, "plan.gpus=8", "plan.gpu_memory_gib=80"),
    ("grpo_math", "plan.gpus=3", "plan.gpu_memory_gib=80"),
    ("grpo_math", *FOUR_NODES, *NODES),
    ("grpo_math", *FOUR_NODES, "train_model.shard_size=8", *NODES),
    ("grpo_dapo", *NODES),
    ("grpo_dapo", "inference_model.max_tokens=40960", *NODES),
)
"""Each once as shipped; then more ranks, copies of a node each, answers twice as long."""
SECTIONS = ("one learner rank:", "memory:", "sent in a microbatch:", "time of an optimizer step:")


def blocks() -> Iterator[str]:
    for name, *overrides in RECIPES:
        command = f"python grpo.py --config-name {name} run=rehearse {' '.join(overrides)}"
        yield f"```\n$ {command}\n" + "\n".join(key_lines(printed(command))) + "\n```"


def printed(command: str) -> list[str]:
    """Also where it ends with 2: that a recipe does not fit is to be seen."""
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 2), done.stderr
    return done.stdout.splitlines()


def key_lines(lines: list[str]) -> Iterator[str]:
    section, peak = "", False
    for line in lines:
        if not line.startswith(" "):
            section = line
            if line in SECTIONS:
                yield line
        elif section == "memory:":
            of_a_phase = line.startswith("    ")
            peak = peak if of_a_phase else "the peak" in line
            if peak or line.startswith(("  usable", "  run=plan says")):
                yield line
        elif section in SECTIONS:
            yield line


if __name__ == "__main__":
    RECORDED.print_or_write(__doc__, lambda: "\n\n".join(blocks()))
