"""Rows of any local file: one a line with a prompt or messages, and an answer or test cases.

{"prompt": "...", "answer": "..."}
{"messages": {"role": "user", "content": "..."} or a list of them, "gt_answer": "..."}
{"messages": ..., "test_cases": {"inputs": [...], "outputs": [...]}}
"""

from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from config.errors import ConfigError
from envs.data import Row, is_message, load_rows, shown
from envs.task import Completion, Example, Message, Reward, Task, register
from envs.tasks.code import tests_of
from envs.verifiers import code, equivalence
from envs.verifiers.rules import RULES

ANSWER_COLUMNS = ("answer", "gt_answer")
ROLES = ("system", "developer", "user", "assistant", "tool")
ASKING = ("user", "tool")
"""Roles of a message that the model replies to."""


@register("jsonl")
class JSONLines(Task):
    """Runs test cases; compares the final answer, however it is marked, with the gold as text, else as mathematics.

    `env.reward` puts any other judge in its place.
    """

    reads_hub = False

    def examples(self, split: str) -> Sequence[Example]:
        examples = [self._example(row) for row in load_rows(self.env, None, None, split)]
        tests = [example.answer for example in examples if not isinstance(example.answer, str)]
        if tests and self.env.reward is None:
            code.check_programs(self.env, tests)
        return examples

    def _example(self, row: Row) -> Example:
        if "test_cases" in row.values:
            return Example(self._messages(row), tests_of(row), row.index, row_data=self.row_data(row))
        column = row.first_of(ANSWER_COLUMNS)
        answer = row[column]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
            raise ConfigError(
                f"{row.place}: column {column!r} must be text or a number, it is {shown(answer)}"
            )
        gold = str(answer).strip()
        if not gold:
            raise ConfigError(f"{row.place}: column {column!r} is empty; give an answer, or remove the row")
        return Example(self._messages(row), gold, row.index, row_data=self.row_data(row))

    def _messages(self, row: Row) -> tuple[Message, ...]:
        if "messages" not in row.values:
            return self.messages(row.text("prompt"))
        given: Any = row["messages"]
        listed = [given] if isinstance(given, dict) else given
        if not isinstance(listed, list) or not listed or not all(is_message(entry) for entry in listed):
            raise ConfigError(
                f'{row.place}: "messages" must be {{"role": ..., "content": ...}} or a list of them, it is '
                f"{shown(given)}"
            )
        _check_roles([entry["role"] for entry in listed], row.place)
        if not listed[-1]["content"].strip():
            raise ConfigError(
                f'{row.place}: the last of "messages" is empty; give a question, or remove the row'
            )
        if listed[0]["role"] == "user" and len(listed) == 1:
            return self.messages(listed[0]["content"])
        return tuple({"role": entry["role"], "content": entry["content"]} for entry in listed)

    def reward(self, completion: Completion, example: Example) -> Reward:
        if isinstance(example.answer, str) and completion.text.strip() == example.answer:
            return Reward(1.0, {"accuracy": 1.0})
        if not isinstance(example.answer, str):
            return code.code_reward(completion, example, self.env)
        return RULES["math"].reward(completion, example, self.env)

    def warm_up(self) -> None:
        equivalence.warm_up()
        with suppress(ConfigError):  # only rows with tests need a sandbox; their verdicts say why not
            code.warm_up(self.env)


def _check_roles(roles: list[str], place: str) -> None:
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ConfigError(f'{place}: "messages" has the role {shown(unknown[0])}; known: {", ".join(ROLES)}')
    if roles[-1] not in ASKING:
        raise ConfigError(
            f'{place}: the last of "messages" is of the {roles[-1]}, but the model is to answer it; end with one of '
            f"the user, and put the answer that is wanted into the column {ANSWER_COLUMNS[0]!r}"
        )
