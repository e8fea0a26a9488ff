"""The generator of the table of docs/plans.md: every shipped GPU config on machines of several sizes.

python -m tests.plans            prints the table
python -m tests.plans --write    writes it

It is what `run=plan plan.gpus=… plan.gpu_memory_gib=…` says, one row for each; no GPU is needed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir

from config.cli.composition import CONFIG_DIR, register_schema, to_config
from config.schema.config import Config
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.memory import gib, kv_bytes_per_sequence
from torchgrpo.plan.plan import Plan, cache_on_device
from torchgrpo.plan.problems import Problem, planned
from torchgrpo.plan.remedies import remedy

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plans.md"
BEGIN, END = "<!-- table: python -m tests.plans --write -->\n\n", "\n\n<!-- end of the table -->"
HEAD = "| config | GPUs x GiB | fits | learner's fullest GPU | reference | engine: share, full sequences | changes |"
SIZES = ((1, 1, 24.0), (1, 1, 80.0), (1, 2, 80.0), (1, 4, 80.0), (1, 8, 80.0), (8, 8, 80.0))
"""Nodes, GPUs of each, GiB of a GPU."""


def recorded() -> str:
    """The table that the page holds."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


def machines() -> dict[str, Machine]:
    """Machines of `SIZES` by their labels, with memory and disk as such machines have them."""
    return {
        f"{nodes * gpus} x {memory:g}": Machine(
            num_gpus=gpus,
            gpu_memory_gib=memory,
            host_memory_gib=max(64.0, 128.0 * gpus),
            disk_gib=4096.0,
            vllm="0.32.0",
            gpu_ids=tuple(map(str, range(gpus))),
            nodes=nodes,
            imagined=True,
        )
        for nodes, gpus, memory in SIZES
    }


def configs() -> dict[str, Config]:
    """The shipped configs that want a GPU."""
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        names = sorted(path.stem for path in CONFIG_DIR.glob("grpo_*.yaml"))
        found = {name: to_config(compose(name)) for name in names}
    return {name: config for name, config in found.items() if config.device == "cuda"}


def rows() -> Iterator[str]:
    """The lines of the table."""
    yield HEAD
    yield "|" + "---|" * (HEAD.count("|") - 1)
    for name, config in configs().items():
        for label, machine in machines().items():
            plan, found = planned(config, False, machine, ROOT)
            yield f"| {name.removeprefix('grpo_')} | {label} | {' | '.join(_cells(plan, found, machine))} |"


def _cells(plan: Plan, found: list[Problem], machine: Machine) -> tuple[str, ...]:
    assert plan.shape is not None
    fullest = max(plan.phases, key=lambda phase: phase.bytes)
    sequences = (cache_on_device(plan, plan.shape) or 0.0) / kv_bytes_per_sequence(
        plan.config, plan.shape, plan.engine.dtype
    )
    settings = remedy(plan, machine) if found else ()
    advice = "another model" if settings is None else " ".join(f"`{setting}`" for setting in settings)
    return (
        "no" if found else "yes",
        f"{gib(fullest.bytes)} ({fullest.name})",
        plan.reference.home,
        f"{plan.engine.gpu_memory_utilization:g}, {max(0, int(sequences))}",
        advice,
    )


if __name__ == "__main__":
    table = "\n".join(rows())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(PAGE.read_text().replace(recorded(), table))
    else:
        print(table)
