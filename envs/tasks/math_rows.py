"""The base of competition mathematics tasks: problems with a gold, judged by a rule of `envs.verifiers.rules`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row, load_rows
from envs.row_files import is_message, shown
from envs.task import Completion, Example, Reward, Task
from envs.verifiers.equivalence import warm_up
from envs.verifiers.reference_answers import check_references, reference_answer
from envs.verifiers.rules import RULES

log = logging.getLogger(__name__)

PROBLEM_COLUMNS = ("problem", "question", "prompt")


class MathTask(Task):
    """Problems whose final answer is compared with the reference answer by value.

    A row without a reference answer is left out and reported.
    """

    rule: ClassVar[str] = "math"
    """The rule of `envs.verifiers.rules` that judges and whose system prompt is used."""
    hub: ClassVar[tuple[str, str | None]]
    """Hub name and configuration."""
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}
    """Our name of a split and the hub's."""

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.system_prompt = RULES[self.rule].system_prompt
        self.weights = RULES[self.rule].weights

    def examples(self, split: str) -> Sequence[Example]:
        if split not in self.hub_splits and not (self.env.holdout or self.env.data_files):
            raise ConfigError(f"env.split={split!r}: {self.name} has {', '.join(self.hub_splits)}")
        rows = load_rows(self.env, *self.hub, self.hub_splits.get(split, split))
        made, places, without = [], [], []
        for row in rows:
            gold = reference_answer(self.gold(row), self.env, self.rule)
            if gold is None:
                without.append(row.place)
            else:
                messages = self.messages(self.problem(row))
                made.append(Example(messages, gold, row.index, row_data=self.row_data(row)))
                places.append(row.place)
        if without:
            log.warning("%d rows have no answer and are left out: %s", len(without), ", ".join(without[:5]))
        check_references(places, made, self.env, self.rule)
        return made

    def problem(self, row: Row) -> str:
        """The problem's text: a column of `PROBLEM_COLUMNS`, or the last user message of one."""
        column = row.first_of(PROBLEM_COLUMNS)
        value = row[column]
        if isinstance(value, list):
            spoken = (each for each in reversed(value) if is_message(each) and each["role"] == "user")
            value = next((each["content"] for each in spoken), None)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{row.place}: column {column!r} must be a non-empty text, it is {shown(value)}"
            )
        return value.strip()

    def gold(self, row: Row) -> str | None:
        """The gold, also in verl's column; None for a row that has none."""
        path = "reward_model.ground_truth"
        return text_or_none(row.at(path) if "reward_model" in row.values else row["answer"])

    def reward(self, completion: Completion, example: Example) -> Reward:
        return RULES[self.rule].reward(completion, example, self.env)

    def warm_up(self) -> None:
        warm_up()


def text_or_none(value: Any) -> str | None:
    """A text or number, or a list of one, as stripped text; else None."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, list | dict | bool):
        return None
    return str(value).strip() or None
