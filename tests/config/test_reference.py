"""Tests that docs/config.md and docs/metrics.md are current and complete."""

import re

from config.cli.error_messages import known_keys
from config.schema.config import Config
from config.schema.evaluation import EvalSetConfig
from tests.config.test_schema import make_config
from tests.reference import METRICS_PAGE, PAGE, meanings, metrics_page, page, type_name


def test_the_pages_are_current() -> None:
    assert PAGE.read_text() == page(), "python -m tests.reference --write"
    assert METRICS_PAGE.read_text() == metrics_page(), "python -m tests.reference --write"


def test_every_key_has_a_row_with_a_type_a_default_and_a_meaning() -> None:
    found = {}
    for row in re.findall(r"^\| `(.*)$", page(), re.MULTILINE):
        key, rest = row.split("` | ", 1)
        kind, default, meaning = re.split(r"(?<!\\)\|", rest.rstrip(" |"), maxsplit=2)
        found[key] = (kind.strip(), default.strip(), meaning.strip())
    sets = {f"eval.sets.NAME.{key}" for key in known_keys(EvalSetConfig)}
    assert set(found) == {*known_keys(Config), *sets}
    assert all(all(cells) for cells in found.values()), found
    assert found["optimizer.lr"][:2] == ("number", "`1e-06`")
    assert found["model.name"][1] == "none: it must be given"
    assert found["optimizer.betas"][:2] == ("[number, number]", "`[0.9, 0.95]`")
    assert "compat" not in found


def test_defaults_on_the_page_are_valid_overrides() -> None:
    """Checks that the defaults on the page are valid overrides."""
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+(?: \\\|[^|]+)* \| `([^`]+)` \|", page(), re.MULTILINE)
    assert len(rows) > 100
    plain = make_config("grpo_quickstart")
    default_values = {
        key: value for key, value in rows if key.startswith(("policy.", "optimizer.")) and "'" not in value
    }
    overrides = [f"{key}={value}" for key, value in default_values.items()]
    config = make_config("grpo_quickstart", "policy=grpo", *overrides)
    for key in default_values:
        section, name = key.split(".")
        if key not in ("optimizer.lr", "optimizer.warmup_steps", "optimizer.schedule", "optimizer.min_lr_fraction"):
            assert vars(getattr(config, section))[name] == vars(getattr(plain, section))[name], key


def test_meanings_are_read_from_beneath_the_fields() -> None:
    texts = meanings(EvalSetConfig)
    assert texts["n"].startswith("Completions per problem; pass@k")
    assert "\n" not in "".join(texts.values())


def test_type_names_are_those_of_yaml() -> None:
    assert type_name(int | None) == "whole number or null"
    assert type_name(dict[str, float]) == "{text: number}"
    assert type_name(list[str]) == "[text, …]"
