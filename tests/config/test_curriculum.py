"""Tests of the error messages for bad values of `env.curriculum`."""

from typing import Any

import pytest

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig, EnvConfig
from config.schema.errors import ConfigError
from tests.script_runner import compose_run_config


@pytest.mark.parametrize(("fields", "message"), [
    ({"gate": 1.5}, r"env\.curriculum\.gate=1\.5: must be a share from 0 to 1"),
    ({"gate": float("nan")}, r"env\.curriculum\.gate=nan"),
    ({"replay": 1.0}, r"env\.curriculum\.replay=1\.0: must be a share from 0 to below 1"),
    ({"floor": -0.1}, r"env\.curriculum\.floor=-0\.1"),
    ({"window": 0}, r"env\.curriculum\.window=0: must be at least 1"),
    ({"bins": 1, "column": "a"}, r"env\.curriculum\.bins=1: must be at least 2"),
    ({"bins": 3}, r"env\.curriculum\.bins=3: there is no column to make levels from; set env\.curriculum\.column"),
    ({"bins": 3, "column": "a", "order": [1, 2]},
     r"bins=3: env\.curriculum\.order=.* already lists the levels; remove one of the two"),
    ({"order": "upwards"}, r"env\.curriculum\.order='upwards': choose one of ascending, descending"),
    ({"order": []},
     r"env\.curriculum\.order=\[\]: the list is empty or repeats a value; list the values of the "
     r"column, easiest first"),
    ({"order": ["a", "a"]}, r"each once"),
    ({"open": "all"}, r"env\.curriculum\.open='all': choose one of reached, newest"),
    ({"priority": "p"}, r"env\.curriculum\.priority='p': choose one of learnability, failure"),
    ({"column": 3}, r"env\.curriculum\.column=3: not the name of a column; set a column name"),
    ({"column": {"a": ""}}, r"env\.curriculum\.column=\{'a': ''\}"),
])  # fmt: skip
def test_bad_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CurriculumConfig(**fields)


@pytest.mark.parametrize(("curriculum", "more", "message"), [
    ({"sources": "failure"}, {},
     r"sources=failure: only the members .* env\.dataset=arithmetic is not a mixture; set env\.dat"),
    ({"column": {"math": "level"}}, {}, r"math is not a member of env\.mixture; set the name of the column"),
    (
        {"column": {"math": "level"}}, {"dataset": "mixture", "mixture": {"gsm8k": 1}},
        r"math is not a member of env\.mixture; .*members of gsm8k",
    ),
    (
        {"priority": "failure"}, {"difficulty": DifficultyConfig(low=0.1)},
        r"env\.curriculum\.priority=failure and env\.difficulty both",
    ),
])  # fmt: skip
def test_contradictions_with_the_data_are_named(curriculum: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(**({"dataset": "arithmetic"} | more), curriculum=CurriculumConfig(**curriculum))


def test_an_evaluation_has_no_curriculum() -> None:
    config = compose_run_config(
        "env.curriculum.column=operand", "env.curriculum.bins=4", "eval.sets={test:{dataset:arithmetic}}"
    )
    assert config.env.curriculum.column == "operand"
    assert config.eval.sets["test"].env("eval.sets.test", config.env).curriculum == CurriculumConfig()
