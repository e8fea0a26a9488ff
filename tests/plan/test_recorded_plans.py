"""What `run=plan` says of the shipped configs, from one card of 24 GiB to 64 of 80 GiB: as docs/plans.md has it."""

import re

from benchmarks.plans import BEGIN, END, PAGE, ROOT, configs, rows
from plan.plan import make_plan
from plan.problems import problems
from tests.plan.test_plan import machine

NUMBERS = {"one": 1, "two": 2, "three": 3}
CARD_GIB = 79.1  # what CUDA says of a card of 80 GB


def test_the_plans_of_the_shipped_configs_are_those_on_the_page() -> None:
    recorded = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert recorded == list(rows()), (
        "if the change is meant: python benchmarks/plans.py --write, and look at it"
    )


def test_each_config_fits_the_machine_that_its_head_names() -> None:
    for name, config in configs().items():
        head = re.match(r"(#.*\n)+", (ROOT / "config" / f"{name}.yaml").read_text())
        assert head is not None, name
        text = head.group().replace("\n# ", " ")
        named = re.search(r"(one|two|three) GPUs? of 80 GB", text, re.IGNORECASE)
        assert named is not None, f"{name}: its head names no machine"
        gpus = NUMBERS[named.group(1).lower()]
        plan = make_plan(config, False, machine(gpus, CARD_GIB, host_memory_gib=256.0))
        assert not problems(plan), name
