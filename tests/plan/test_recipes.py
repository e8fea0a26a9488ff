"""Tests that a plan accepts the commands of docs/recipes.md on their GPUs."""

import re

import pytest

from tests.plan.test_plan import PROJECT, config_of, machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.problems import find_problems

CARD_GIB = {24: 23.6, 48: 47.5, 80: 79.1, 141: 139.8}
"""Memory that CUDA reports for a card, by the nominal GB."""
ROWS = re.findall(
    r"^\| (\d+) GB \| (.+?) \| `python grpo\.py (.+?)` \|$", (PROJECT / "docs" / "recipes.md").read_text(), re.MULTILINE
)


def test_the_page_has_each_card() -> None:
    assert {int(card) for card, _, _ in ROWS} == set(CARD_GIB)


@pytest.mark.parametrize(("card", "method", "command"), ROWS)
def test_a_plan_accepts_the_command(card: str, method: str, command: str) -> None:
    named = re.match(r"--config-name (\S+) ?(.*)", command)
    name, overrides = named.groups() if named else ("grpo_gsm8k", command)
    config = config_of(name, *overrides.split())
    installed = {"host_memory_gib": 128.0, "bitsandbytes": "0.50.0"}
    plan = make_plan(config, False, machine(1, CARD_GIB[int(card)], **installed))
    assert [problem.text for problem in find_problems(plan)] == []
    assert plan.shape is not None and plan.devices.colocated
    assert config.train_model.lora.enabled == ("adapters" in method)
    assert plan.engine.sleeps == ("stays awake" not in method)
    size = re.match(r"[\d.]+", method)
    assert size is not None and plan.shape.parameters / 1e9 == pytest.approx(float(size.group()), rel=0.1)
