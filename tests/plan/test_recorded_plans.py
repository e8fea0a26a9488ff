"""Compares the plans of the shipped configs with the table in docs/plans.md."""

import re

from tests.plan.test_plan import machine
from tests.plans import ROOT, gpu_configs, recorded_table, table_lines
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.problems import find_problems

NUMBERS = {"one": 1, "two": 2, "three": 3, "eight": 8}
MACHINE_PATTERN = r"(?:(eight) nodes of )?(one|two|three|eight) GPUs? of (24|80) GB"
CARD_GIB = {"24": 23.6, "80": 79.1}
"""Memory that CUDA reports for a card, by the nominal GB."""


def named_machine(config: str) -> Machine:
    """Returns the machine that the header comment of a shipped config names."""
    head = re.match(r"(#.*\n)+", (ROOT / "config" / f"{config}.yaml").read_text())
    assert head is not None, config
    match = re.search(MACHINE_PATTERN, head.group().replace("\n# ", " "), re.IGNORECASE)
    assert match is not None, f"{config}: its head names no machine"
    nodes, gpus, card = match.groups()
    cluster_fields = {"nodes": NUMBERS[nodes.lower()], "is_hypothetical": True} if nodes else {}
    return machine(NUMBERS[gpus.lower()], CARD_GIB[card], host_memory_gib=256.0, disk_gib=4096.0, **cluster_fields)


def test_the_plans_of_the_shipped_configs_equal_the_page() -> None:
    assert recorded_table().splitlines() == list(table_lines()), (
        "if the change is meant: python -m tests.plans --write, and look at it"
    )


def test_each_config_fits_the_machine_of_its_header() -> None:
    for name, config in gpu_configs().items():
        plan = make_plan(config, False, named_machine(name))
        assert not find_problems(plan), (name, [problem.text for problem in find_problems(plan)])
