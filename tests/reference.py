"""The generator of docs/config.md and docs/metrics.md: every key, every metric, every rule of the doctor.

A key has its type, its default and the docstring beneath its field.

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
from torchgrpo.monitoring.doctor.rules import RULES, Bound, Other, Rule, Trend
from torchgrpo.monitoring.metric_table import METRICS, Metric

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, METRICS_PAGE = DOCS / "config.md", DOCS / "metrics.md"
HEAD = """# Every key

Made from the dataclasses in `config/` by `python -m tests.reference --write`; a test keeps it current. `KEY=VALUE` on
the command line sets one, a YAML file says what differs ([Hydra](hydra.md)). Values that stand in backquotes in a
meaning are those that a key takes. `null` is no value.
"""
METRICS_HEAD = """# What the numbers mean

Made from `torchgrpo/monitoring/metric_table.py` and `torchgrpo/monitoring/doctor/rules.py` by
`python -m tests.reference --write`; a test
keeps it current.

`metrics.jsonl` has one row for each optimizer step, and one for each evaluation. Every mean is over real tokens or
completions, never padding. K stands for a number; PART, MEMBER, LEVEL, SET and METRIC stand for names.
[The doctor](doctor.md) watches what stands in the last column.

| metric | meaning | worry when |
|---|---|---|
"""
RULES_HEAD = """
## The doctor's rules

| rule | severity | holds when | likely cause | what helps |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page, with one table for each section."""
    parts = [
        HEAD,
        *_section(Config, ""),
        _heading("eval.sets.NAME.", EvalSetConfig),
        _table(EvalSetConfig, "eval.sets.NAME."),
    ]
    return "\n".join(parts)


def _section(kind: type[Any], prefix: str) -> list[str]:
    """The table of a dataclass, then those of the dataclasses in it."""
    plain = [field for field in fields(kind) if not is_dataclass(field.type)]
    parts = [_heading(prefix, kind), _table(kind, prefix)] if plain else []
    for field in fields(kind):
        if is_dataclass(field.type):
            assert isinstance(field.type, type)
            parts += _section(field.type, f"{prefix}{field.name}.")
    return parts


def _heading(prefix: str, kind: type[Any]) -> str:
    title = f"`{prefix.rstrip('.')}`" if prefix else "The whole"
    return f"## {title}\n\n{inspect.cleandoc(kind.__doc__ or '')}\n"


def _table(kind: type[Any], prefix: str) -> str:
    told = meanings(kind)
    rows = [
        f"| `{prefix}{field.name}` | {_escaped(type_name(field.type))} | {_default(field)} | "
        f"{_escaped(told[field.name])} |"
        for field in fields(kind)
        if not is_dataclass(field.type)
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def meanings(kind: type[Any]) -> dict[str, str]:
    """The docstring beneath each field of a dataclass, on one line; empty where there is none."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    told = {}
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else ""
            )
            told[statement.target.id] = " ".join(str(text).split())
    return told


def type_name(kind: Any) -> str:
    """A field's type as YAML has it."""
    names = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        Any: "any",
        type(None): "null",
    }
    if kind in names:
        return names[kind]
    inner = [type_name(part) for part in get_args(kind)]
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
    return f"`{value}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    """Two tables: the metrics, and the rules that read them."""
    return f"{METRICS_HEAD}{_rows(map(_metric_cells, METRICS))}{RULES_HEAD}{_rows(map(_rule_cells, RULES))}"


def _metric_cells(metric: Metric) -> tuple[str, str, str]:
    """Names, meaning, and the bounds on one of the names; which of several is said."""
    worries = []
    for rule in RULES:
        bounded = [name for name in metric.names if name in rule.metrics]
        if isinstance(rule.check, Bound) and bounded:
            worries.append(rule.when if [*metric.names] == bounded else f"{_quoted(bounded)} {rule.when}")
    return _quoted(metric.names), metric.meaning, "; ".join(worries)


def _rule_cells(rule: Rule) -> tuple[str, ...]:
    about = {Bound: f"{_quoted(rule.metrics)} ", Trend: f"{_quoted(rule.metrics[:1])}: ", Other: ""}
    return f"`{rule.name}`", rule.severity, f"{about[type(rule.check)]}{rule.when}", rule.cause, rule.setting


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rows(cells: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in cells)


if __name__ == "__main__":
    for path, made in ((PAGE, page()), (METRICS_PAGE, metrics_page())):
        if sys.argv[1:] == ["--write"]:
            path.write_text(made)
        else:
            print(made)
