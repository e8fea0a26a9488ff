"""Rows of any local file: a prompt or messages, an answer or test cases.

{"prompt": "...", "answer": "..."}
{"messages": {"role": "user", "content": "..."} or a list of them, "gt_answer": "..."}
{"messages": ..., "test_cases": {"inputs": [...], "outputs": [...]}}
{"prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": "..."}, "data_source": "..."}
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, time
from decimal import Decimal
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.conversations import conversation_in, read_messages, read_tools
from envs.data import Row, load_rows
from envs.row_files import is_json_object, read_json, shown
from envs.task import Completion, Example, Message, Reward, Task, register
from envs.tasks.code import checked_tests, tests_of
from envs.verifiers import code, equivalence
from envs.verifiers.extract import after_thinking
from envs.verifiers.reference_answers import check_references, reference_answer
from envs.verifiers.rules import RULES

PROMPT_COLUMNS = ("messages", "prompt")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "gt_answer")


@register("jsonl")
class JSONLines(Task):
    """Runs test cases; compares the final answer, however it is marked, with the gold as text, else as mathematics.

    `env.reward` puts any other judge in its place. Options: `prompt` and `answer`, the columns of both or a path in one
    (`extra_info.answer`), and those of `CodeOptions`.
    """

    reads_hub = False
    reads_prefill = True

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        for key in ("prompt", "answer"):
            if not isinstance(env.options.get(key, ""), str):
                raise ConfigError(
                    f"env.options.{key}={env.options[key]!r}: the name of a column, or a path in one (a.b.c)"
                )

    def examples(self, split: str) -> Sequence[Example]:
        rows = load_rows(self.env, None, None, split)
        examples = [self._example(row) for row in rows]
        check_references([row.place for row in rows], examples, self.env)
        tests = [example.answer for example in examples if not isinstance(example.answer, str)]
        if tests and self.env.reward is None:
            code.check_programs(self.env, tests)
        return examples

    def _example(self, row: Row) -> Example:
        judged_here = not self.judged_by_user and "answer" not in self.env.options
        messages = self._messages(row)
        answer = tests_of(row) if judged_here and "test_cases" in row.values else self._answer(row)
        row_data, prefill = (
            self.row_data(row),
            row["prefill"] if row.has("prefill") else self.env.prefill or "",
        )
        if not isinstance(prefill, str):
            raise ConfigError(f"{row.place}: column 'prefill' must be text, it is {shown(prefill)}")
        return Example(messages, answer, row.index, row_data=row_data, prefill=prefill, tools=read_tools(row))

    def _answer(self, row: Row) -> Any:
        """The reference answer: text, tests, or any value where a reward of the user's judges."""
        chosen = self.env.options.get("answer")
        known = (*ANSWER_COLUMNS, "test_cases")
        path = chosen or next((path for path in known if row.has(path)), "answer")
        if self.judged_by_user:
            return json.loads(json.dumps(row.at(path), default=str)) if chosen or row.has(path) else None
        found = row.at(path)
        tests = read_json(found, row.place) if is_json_object(found) else found
        has_tests = isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys()
        if has_tests and self.env.reward in (None, "code"):
            return checked_tests(tests, row.place)
        answer = reference_answer(found, self.env)
        if isinstance(answer, date | time):
            answer = str(answer)
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
            raise ConfigError(
                f"{row.place}: column {path!r} must be text or a number, it is {shown(answer)}; other values are for a "
                "reward of your own (env.reward=module:function)"
            )
        gold = str(answer).strip()
        if not gold:
            raise ConfigError(f"{row.place}: column {path!r} is empty; give an answer, or remove the row")
        return gold

    def _messages(self, row: Row) -> tuple[Message, ...]:
        column = self.env.options.get("prompt") or next(filter(row.has, PROMPT_COLUMNS), "prompt")
        given = conversation_in(row.at(column), f"{row.place}: column {column!r}")
        if column != "messages" and not isinstance(given, list | dict):
            if not isinstance(given, str) or not given.strip():
                raise ConfigError(
                    f"{row.place}: column {column!r} must be a non-empty string, it is {shown(given)}"
                )
            return self.messages(given)
        messages = read_messages(row, given, column)
        if len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user":
            return self.messages(messages[0]["content"])
        return self.conversation(messages)

    def reward(self, completion: Completion, example: Example) -> Reward:
        if not isinstance(example.answer, str):
            return code.code_reward(completion, example, self.env)
        if (after_thinking(completion.full_text) or "").strip() == example.answer:
            return Reward(1.0, {"accuracy": 1.0})
        return RULES["math"].reward(completion, example, self.env)

    def warm_up(self) -> None:
        equivalence.warm_up()
        with suppress(ConfigError):  # only rows with tests need a sandbox; their verdicts say why not
            code.warm_up(self.env)
