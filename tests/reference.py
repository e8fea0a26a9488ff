"""Generates docs/config.md and docs/metrics.md from the config dataclasses and metric tables.

Each key has its type, its default and the docstring below its field.

python -m tests.reference            prints the pages
python -m tests.reference --write    writes them
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from omegaconf import MISSING as UNSET

from config.schema.config import Config
from config.schema.evaluation import EvalSetConfig
from torchgrpo.monitoring.diagnostics.rule import Bound, CustomCheck, Rule, Trend
from torchgrpo.monitoring.diagnostics.rules import RULES
from torchgrpo.monitoring.metric_table import METRICS, Metric

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, METRICS_PAGE = DOCS / "config.md", DOCS / "metrics.md"
HEAD = """# Every key

Generated from the dataclasses in `config/` by `python -m tests.reference --write`; a test checks that the page is
current. `KEY=VALUE` on the command line sets a key; a YAML file sets the keys that differ from their defaults
([Hydra](hydra.md)). Values in backquotes are the values that a key accepts. `null` means no value.
"""
METRICS_HEAD = """# What the numbers mean

Generated from `torchgrpo/monitoring/metric_table.py` and `torchgrpo/monitoring/diagnostics/rules.py` by
`python -m tests.reference --write`; a test checks that the page is current.

`metrics.jsonl` has one row for each optimizer step and one for each evaluation. Means are over tokens or completions
without padding. K stands for a number; COMPONENT, MEMBER, LEVEL, SET and METRIC stand for names. The last column has
the bounds that the [diagnostics](diagnostics.md) check.

| metric | meaning | bound of a rule |
|---|---|---|
"""
RULES_HEAD = """
## Rules of the diagnostics

| rule | severity | holds when | likely cause | remedy |
|---|---|---|---|---|
"""


def page() -> str:
    """Returns the text of docs/config.md, with one table for each section."""
    sections = [
        HEAD,
        *_section(Config, ""),
        _heading("eval.sets.NAME.", EvalSetConfig),
        _table(EvalSetConfig, "eval.sets.NAME."),
    ]
    return "\n".join(sections)


def _section(kind: type[Any], prefix: str) -> list[str]:
    """Returns the table of a dataclass, then the tables of the dataclasses in its fields."""
    plain = [field for field in fields(kind) if not is_dataclass(field.type)]
    sections = [_heading(prefix, kind), _table(kind, prefix)] if plain else []
    for field in fields(kind):
        if is_dataclass(field.type):
            assert isinstance(field.type, type)
            sections += _section(field.type, f"{prefix}{field.name}.")
    return sections


def _heading(prefix: str, kind: type[Any]) -> str:
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    return f"## {title}\n\n{inspect.cleandoc(kind.__doc__ or '')}\n"


def _table(kind: type[Any], prefix: str) -> str:
    field_meanings = meanings(kind)
    rows = [
        f"| `{prefix}{field.name}` | {_escape_bars(type_name(field.type))} | {_default(field)} | "
        f"{_escape_bars(field_meanings[field.name])} |"
        for field in fields(kind)
        if not is_dataclass(field.type)
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def meanings(kind: type[Any]) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass, in one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            texts[statement.target.id] = " ".join(str(text).split())
    return texts


def type_name(kind: Any) -> str:
    """Returns the name of a field's type in YAML terms."""
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any", type(None): "null"}
    if kind in names:
        return names[kind]
    inner = [type_name(argument) for argument in get_args(kind)]
    if get_origin(kind) is dict:
        return f"{{{inner[0]}: {inner[1]}}}"
    if get_origin(kind) in (list, tuple):
        return f"[{', '.join(inner)}{', …' if get_origin(kind) is list else ''}]"
    return " or ".join(inner)


def _default(field: Field[Any]) -> str:
    value = field.default if field.default is not MISSING else None
    if field.default_factory is not MISSING:
        value = field.default_factory()
    if value == UNSET:
        return "none: it must be given"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`" if value != "" else '`""`'


def _escape_bars(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    """Returns the text of docs/metrics.md: tables of the metrics and of the diagnostics rules."""
    return f"{METRICS_HEAD}{_rows(map(_metric_cells, METRICS))}{RULES_HEAD}{_rows(map(_rule_cells, RULES))}"


def _metric_cells(metric: Metric) -> tuple[str, str, str]:
    """Returns the names, the meaning, and the bounds of the rules on a metric.

    If a bound applies only to some of the names, the cell lists these names.
    """
    bounds = []
    for rule in RULES:
        bounded = [name for name in metric.names if name in rule.metrics]
        if isinstance(rule.check, Bound) and bounded:
            names = "" if [*metric.names] == bounded else f"{_quote_names(bounded)} "
            bounds.append(f"{names}{rule.condition_text}")
    return _quote_names(metric.names), metric.meaning, "; ".join(bounds)


def _rule_cells(rule: Rule) -> tuple[str, ...]:
    prefixes = {Bound: f"{_quote_names(rule.metrics)} ", Trend: f"{_quote_names(rule.metrics[:1])}: ", CustomCheck: ""}
    return (
        f"`{rule.name}`",
        rule.severity,
        f"{prefixes[type(rule.check)]}{rule.condition_text}",
        rule.cause,
        rule.setting,
    )


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rows(cells: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(map(_escape_bars, row))} |\n" for row in cells)


if __name__ == "__main__":
    for path, text in ((PAGE, page()), (METRICS_PAGE, metrics_page())):
        if sys.argv[1:] == ["--write"]:
            path.write_text(text)
        else:
            print(text)
