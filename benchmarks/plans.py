"""Every shipped GPU config on machines of several sizes: what fits, how full it is, and what would make the rest fit.

    python benchmarks/plans.py           prints the table of docs/plans.md
    python benchmarks/plans.py --write   puts it there

No GPU is needed: it is what `run=plan plan.gpus=… plan.gpu_memory_gib=…` says, one row for each.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.pages import Recorded  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from config.schema import Config  # noqa: E402
from plan.machine import Machine  # noqa: E402
from plan.memory import gib, kv_bytes_per_sequence  # noqa: E402
from plan.plan import Plan, cache_on_device  # noqa: E402
from plan.problems import Problem, planned  # noqa: E402
from plan.remedies import remedy  # noqa: E402

RECORDED = Recorded(__file__, "plans.md")
HEAD = "| config | GPUs x GiB | fits | learner's fullest GPU | reference | engine: share, full sequences | changes |"


def machines() -> dict[str, Machine]:
    """1 x 24 GiB to 8 nodes of 8 x 80 GiB, with memory and disk as such machines have them."""
    sizes = ((1, 1, 24.0), (1, 1, 80.0), (1, 2, 80.0), (1, 4, 80.0), (1, 8, 80.0), (8, 8, 80.0))
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
        for nodes, gpus, memory in sizes
    }


def configs() -> dict[str, Config]:
    """The shipped configs that want a GPU."""
    register_schema()
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        names = sorted(path.stem for path in (ROOT / "config").glob("grpo_*.yaml"))
        found = {name: to_config(compose(name)) for name in names}
    return {name: config for name, config in found.items() if config.device == "cuda"}


def rows() -> Iterator[str]:
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
    RECORDED.print_or_write(__doc__, lambda: "\n".join(rows()))
