"""Generates the table of docs/plans.md: each shipped GPU config on machines of several sizes.

python -m tests.plans            prints the table
python -m tests.plans --write    writes the table to the page

Each row has the result of `run=plan machine.gpus=… machine.gpu_memory_gib=…`; no GPU is needed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir

from config.cli.composition import CONFIG_DIR, register_schema, to_config
from config.schema.config import Config
from torchgrpo.plan.machine import ASSUMED_BITSANDBYTES, Machine
from torchgrpo.plan.memory import format_gib, kv_bytes_per_sequence
from torchgrpo.plan.plan import Plan, kv_cache_per_device
from torchgrpo.plan.problems import Problem, plan_with_problems
from torchgrpo.plan.remedies import find_remedy

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plans.md"
BEGIN, END = "<!-- table: python -m tests.plans --write -->\n\n", "\n\n<!-- end of the table -->"
TABLE_HEADER = (
    "| config | GPUs x GiB | fits | learner: peak | reference | engine: share, full sequences | changes that fit |"
)
SIZES = ((1, 1, 24.0), (1, 1, 80.0), (1, 2, 80.0), (1, 4, 80.0), (1, 8, 80.0), (8, 8, 80.0))
"""Sizes of machines: nodes, GPUs per node, GiB of a GPU."""


def recorded_table() -> str:
    """Returns the table that is on the page."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


def machines() -> dict[str, Machine]:
    """Returns the machines of `SIZES` by label, with typical host memory and disk."""
    return {
        f"{nodes * gpus} x {memory:g}": Machine(
            num_gpus=gpus,
            gpu_memory_gib=memory,
            host_memory_gib=max(64.0, 128.0 * gpus),
            disk_gib=4096.0,
            vllm="0.32.0",
            gpu_ids=tuple(map(str, range(gpus))),
            nodes=nodes,
            is_hypothetical=True,
            bitsandbytes=ASSUMED_BITSANDBYTES,
        )
        for nodes, gpus, memory in SIZES
    }


def gpu_configs() -> dict[str, Config]:
    """Returns the shipped configs that need a GPU."""
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        names = sorted(path.stem for path in CONFIG_DIR.glob("grpo_*.yaml"))
        shipped = {name: to_config(compose(name)) for name in names}
    return {name: config for name, config in shipped.items() if config.device == "cuda"}


def table_lines() -> Iterator[str]:
    """Yields the lines of the table."""
    yield TABLE_HEADER
    yield "|" + "---|" * (TABLE_HEADER.count("|") - 1)
    for name, config in gpu_configs().items():
        for label, machine in machines().items():
            plan, problems = plan_with_problems(config, False, machine, ROOT)
            yield f"| {name.removeprefix('grpo_')} | {label} | {' | '.join(_cells(plan, problems, machine))} |"


def _cells(plan: Plan, problems: list[Problem], machine: Machine) -> tuple[str, ...]:
    assert plan.shape is not None
    fullest = max(plan.phases, key=lambda phase: phase.bytes)
    sequences = (kv_cache_per_device(plan, plan.shape) or 0.0) / kv_bytes_per_sequence(
        plan.config, plan.shape, plan.engine.dtype
    )
    settings = find_remedy(plan, machine) if problems else ()
    advice = "another model" if settings is None else " ".join(f"`{setting}`" for setting in settings)
    return (
        "no" if problems else "yes",
        f"{format_gib(fullest.bytes)} ({fullest.name})",
        plan.reference.home,
        f"{plan.engine.gpu_memory_utilization:g}, {max(0, int(sequences))}",
        advice,
    )


if __name__ == "__main__":
    table = "\n".join(table_lines())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(PAGE.read_text().replace(recorded_table(), table))
    else:
        print(table)
