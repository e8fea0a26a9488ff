"""Bad values of `env.curriculum`: one message each, with the value, the place and a remedy."""

from typing import Any

import pytest

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig, EnvConfig
from config.schema.errors import ConfigError
from tests.scripts import configured


@pytest.mark.parametrize(("given", "message"), [
    ({"gate": 1.5}, r"env\.curriculum\.gate=1\.5: a share, 0 to 1"),
    ({"gate": float("nan")}, r"env\.curriculum\.gate=nan"),
    ({"replay": 1.0}, r"env\.curriculum\.replay=1\.0: a share, 0 to below 1"),
    ({"floor": -0.1}, r"env\.curriculum\.floor=-0\.1"),
    ({"window": 0}, r"env\.curriculum\.window=0: must be at least 1"),
    ({"bins": 1, "column": "a"}, r"env\.curriculum\.bins=1: must be at least 2"),
    ({"bins": 3}, r"env\.curriculum\.bins=3 makes levels of a column: set env\.curriculum\.column"),
    ({"bins": 3, "column": "a", "order": [1, 2]}, r"bins=3: a list of values .* leave one of the two out"),
    ({"order": "upwards"}, r"env\.curriculum\.order='upwards': choose one of ascending, descending"),
    ({"order": []}, r"env\.curriculum\.order=\[\]: the values of the column, easiest first"),
    ({"order": ["a", "a"]}, r"each once"),
    ({"open": "all"}, r"env\.curriculum\.open='all': choose one of reached, newest"),
    ({"priority": "p"}, r"env\.curriculum\.priority='p': choose one of learnability, failure"),
    ({"column": 3}, r"env\.curriculum\.column=3: the name of a column"),
    ({"column": {"a": ""}}, r"env\.curriculum\.column=\{'a': ''\}"),
])  # fmt: skip
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CurriculumConfig(**given)


@pytest.mark.parametrize(("curriculum", "more", "message"), [
    ({"sources": "failure"}, {}, r"sources=failure weighs .* env\.dataset=arithmetic is none: set env\.dat"),
    ({"column": {"math": "level"}}, {}, r"math is no member of env\.mixture; give the name of the column"),
    (
        {"column": {"math": "level"}}, {"dataset": "mixture", "mixture": {"gsm8k": 1}},
        r"math is no member of env\.mixture; .*members of gsm8k",
    ),
    (
        {"priority": "failure"}, {"difficulty": DifficultyConfig(low=0.1)},
        r"env\.curriculum\.priority=failure and env\.difficulty both",
    ),
])  # fmt: skip
def test_what_data_cannot_have(curriculum: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(**({"dataset": "arithmetic"} | more), curriculum=CurriculumConfig(**curriculum))


def test_an_evaluation_has_none() -> None:
    config = configured(
        "env.curriculum.column=operand", "env.curriculum.bins=4", "eval.sets={test:{dataset:arithmetic}}"
    )
    assert config.env.curriculum.column == "operand"
    assert config.eval.sets["test"].env("eval.sets.test", config.env).curriculum == CurriculumConfig()
