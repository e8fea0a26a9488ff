"""docs/doctor.md holds every rule, and rules name settings and metrics that exist."""

import re
from dataclasses import fields, is_dataclass
from typing import Any

from config.schema import Config
from monitoring.doctor.doctor import RULES
from monitoring.doctor.trends import NO_PARTS
from tests.rules import PAGE, page
from tests.scripts import ROOT


def keys(kind: Any, prefix: str = "") -> set[str]:
    """Every dotted key of the config."""
    found = set()
    for field in fields(kind):
        found.add(f"{prefix}{field.name}")
        if isinstance(field.type, type) and is_dataclass(field.type):
            found |= keys(field.type, f"{prefix}{field.name}.")
    return found


def test_the_page_holds_the_rules() -> None:
    assert PAGE.read_text() == page(), "python -m tests.rules --write"


def test_rules_have_names_of_their_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z_]+", name) for name in names)


def test_settings_that_rules_name_are_settings() -> None:
    known = keys(Config)
    for rule in RULES:
        named = re.findall(r"`([a-z_.]+)[*=`]", f"{rule.cause} {rule.knob}")
        assert rule.name in ("control_tokens",) or named, rule.name
        for name in named:
            assert any(key == name or (name.endswith("_") and key.startswith(name)) for key in known), name


def test_metrics_that_rules_read_are_explained() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in {name for rule in RULES for name in rule.metrics} | NO_PARTS:
        known = name.replace("eval/SET/pass@1", "eval/SET/...").replace("reward/accuracy", "reward/PART")
        assert f"`{known}`" in page, name
