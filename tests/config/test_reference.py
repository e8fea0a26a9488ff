"""docs/config.md is what the dataclasses say, docs/metrics.md what the tables say; every field has a meaning."""

import re

from config.cli.error_messages import known_keys
from config.schema.config import Config
from config.schema.evaluation import EvalSetConfig
from tests.config.test_schema import composed
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


def test_defaults_as_they_are_written_are_taken() -> None:
    """What the page gives as a default can be typed."""
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+(?: \\\|[^|]+)* \| `([^`]+)` \|", page(), re.MULTILINE)
    assert len(rows) > 100
    plain = composed("grpo_quickstart")
    typed = {
        key: value for key, value in rows if key.startswith(("policy.", "optimizer.")) and "'" not in value
    }
    given = [f"{key}={value}" for key, value in typed.items()]
    config = composed("grpo_quickstart", "policy=grpo", *given)
    for key in typed:
        section, name = key.split(".")
        if key not in (
            "optimizer.lr",
            "optimizer.warmup_steps",
            "optimizer.schedule",
            "optimizer.min_lr_fraction",
        ):
            assert vars(getattr(config, section))[name] == vars(getattr(plain, section))[name], key


def test_meanings_are_read_from_beneath_the_fields() -> None:
    told = meanings(EvalSetConfig)
    assert told["n"].startswith("Completions per problem; pass@k")
    assert "\n" not in "".join(told.values())


def test_types_are_told_as_yaml_has_them() -> None:
    assert type_name(int | None) == "whole number or null"
    assert type_name(dict[str, float]) == "{text: number}"
    assert type_name(list[str]) == "[text, …]"
