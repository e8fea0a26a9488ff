"""Base class of mathematics tasks, whose reference answers are compared by a rule of `envs.verifiers.rules`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row, load_rows
from envs.row_files import format_value, is_message
from envs.task import Completion, Example, Reward, Task
from envs.verifiers.equivalence import warm_up
from envs.verifiers.reference_answers import check_references, unwrap_reference
from envs.verifiers.rules import RULES

log = logging.getLogger(__name__)

PROBLEM_COLUMNS = ("problem", "question", "prompt")


class MathTask(Task):
    """Base class of tasks that compare the final answer with the reference answer by value.

    Rows without a reference answer are skipped with a warning.
    """

    rule: ClassVar[str] = "math"
    """Name of the rule of `envs.verifiers.rules` that provides the reward and the system prompt."""
    hub: ClassVar[tuple[str, str | None]]
    """Name and configuration of the hub data set."""
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}
    """Hub name of each split."""

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.system_prompt = RULES[self.rule].system_prompt
        self.weights = RULES[self.rule].weights

    def examples(self, split: str) -> Sequence[Example]:
        if split not in self.hub_splits and not (self.env.holdout or self.env.data_files):
            raise ConfigError(f"env.split={split!r}: {self.name} has only the splits {', '.join(self.hub_splits)}")
        rows = load_rows(self.env, *self.hub, self.hub_splits.get(split, split))
        examples, places, places_without_answer = [], [], []
        for row in rows:
            reference = unwrap_reference(self.reference_answer(row), self.env, self.rule)
            if reference is None:
                places_without_answer.append(row.place)
            else:
                messages = self.messages(self.problem(row))
                examples.append(Example(messages, reference, row.index, row_data=self.row_data(row)))
                places.append(row.place)
        if places_without_answer:
            log.warning(
                "%d rows have no answer and are left out: %s",
                len(places_without_answer),
                ", ".join(places_without_answer[:5]),
            )
        check_references(places, examples, self.env, self.rule)
        return examples

    def problem(self, row: Row) -> str:
        """Returns the problem's text: a column of `PROBLEM_COLUMNS`, or its last user message."""
        column = row.first_column(PROBLEM_COLUMNS)
        value = row[column]
        if isinstance(value, list):
            user_messages = (each for each in reversed(value) if is_message(each) and each["role"] == "user")
            value = next((each["content"] for each in user_messages), None)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{row.place}: column {column!r} must be a non-empty text, but is {format_value(value)}")
        return value.strip()

    def reference_answer(self, row: Row) -> str | None:
        """Returns the reference answer of a row, also from verl's column; None without an answer."""
        path = "reward_model.ground_truth"
        return text_or_none(row.value_at(path) if "reward_model" in row.values else row["answer"])

    def reward(self, completion: Completion, example: Example) -> Reward:
        return RULES[self.rule].reward(completion, example, self.env)

    def warm_up(self) -> None:
        warm_up()


def text_or_none(value: Any) -> str | None:
    """Returns a text, a number or a list of one as stripped text, else None."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, list | dict | bool):
        return None
    return str(value).strip() or None
