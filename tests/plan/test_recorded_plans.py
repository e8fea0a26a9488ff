"""What `run=plan` says of the shipped configs, from one card of 24 GiB to 64 of 80 GiB: as docs/plans.md has it."""

import re

from tests.plan.test_plan import machine
from tests.plans import ROOT, configs, recorded, rows
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.problems import problems

NUMBERS = {"one": 1, "two": 2, "three": 3, "eight": 8}
NAMED = r"(?:(eight) nodes of )?(one|two|three|eight) GPUs? of (24|80) GB"
CARD_GIB = {"24": 23.6, "80": 79.1}
"""What CUDA says of a card, by its name in GB."""


def named_machine(config: str) -> Machine:
    """The machine that the head of a shipped config names."""
    head = re.match(r"(#.*\n)+", (ROOT / "config" / f"{config}.yaml").read_text())
    assert head is not None, config
    named = re.search(NAMED, head.group().replace("\n# ", " "), re.IGNORECASE)
    assert named is not None, f"{config}: its head names no machine"
    nodes, gpus, card = named.groups()
    many = {"nodes": NUMBERS[nodes.lower()], "imagined": True} if nodes else {}
    return machine(NUMBERS[gpus.lower()], CARD_GIB[card], host_memory_gib=256.0, disk_gib=4096.0, **many)


def test_the_plans_of_the_shipped_configs_are_those_on_the_page() -> None:
    assert recorded().splitlines() == list(rows()), (
        "if the change is meant: python -m tests.plans --write, and look at it"
    )


def test_each_config_fits_the_machine_that_its_head_names() -> None:
    for name, config in configs().items():
        plan = make_plan(config, False, named_machine(name))
        assert not problems(plan), (name, [problem.text for problem in problems(plan)])
