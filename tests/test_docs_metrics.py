"""Checks that the metric table is complete and that diagnostics rules name existing metrics."""

import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from config.schema.config import Config
from tests.script_runner import read_metrics
from torchgrpo.monitoring.diagnostics.rules import RULES
from torchgrpo.monitoring.metric_table import METRICS, meaning_of, pattern_of


@pytest.mark.parametrize("run", ["lockstep_run", "overlapped_run"])
def test_every_metric_is_in_the_table(run: str, request: pytest.FixtureRequest) -> None:
    metric_names = {name for row in read_metrics(request.getfixturevalue(run)) for name in row}
    assert "eval/held_out/pass@2" in metric_names
    assert {name for name in metric_names if not meaning_of(name)} == set()
    components = {name for name in metric_names if pattern_of(name) == "reward/COMPONENT"}
    assert components == {"reward/accuracy"}


@pytest.mark.parametrize(
    ("metric_name", "pattern"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/brief", "reward/COMPONENT"),
        ("reward/mean/near", "reward/mean/MEMBER"),
        ("ess/age_12", "ess/age_K"),
        ("ess/age_x", None),
        ("age/histogram/3", "age/histogram/K"),
        ("eval/a/b", "eval/SET/METRIC"),
        ("new", None),
    ],
)
def test_names_with_placeholders_match_logged_names(metric_name: str, pattern: str | None) -> None:
    assert pattern_of(metric_name) == pattern


def test_a_meaning_has_no_links_and_quotes() -> None:
    assert meaning_of("reward/control_tokens").endswith("ids of no token (rewards). They are invalid")
    assert meaning_of("new") == ""


def config_keys(kind: Any, prefix: str = "") -> set[str]:
    """Returns every dotted key of a config dataclass."""
    found = set()
    for field in fields(kind):
        found.add(f"{prefix}{field.name}")
        if isinstance(field.type, type) and is_dataclass(field.type):
            found |= config_keys(field.type, f"{prefix}{field.name}.")
    return found


def test_names_are_unique() -> None:
    names = [rule.name for rule in RULES]
    metrics = [name for metric in METRICS for name in metric.names]
    assert len(set(names)) == len(names) and len(set(metrics)) == len(metrics)


def test_rules_read_metrics_of_the_table() -> None:
    metrics = {name for metric in METRICS for name in metric.names}
    for rule in RULES:
        assert {name.replace("pass@1", "METRIC") for name in rule.metrics} <= metrics, rule.name


def test_settings_that_rules_name_are_settings() -> None:
    known = config_keys(Config)
    for rule in RULES:
        named = re.findall(r"`([a-z_.]+)[*=`]", f"{rule.cause} {rule.setting}")
        assert named, rule.name
        for name in named:
            assert any(key == name or (name.endswith("_") and key.startswith(name)) for key in known), name
