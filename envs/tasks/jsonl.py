"""Task `jsonl`: rows of a local file with prompts and answers or tests.

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
from envs.conversations import parse_conversation, read_messages, read_tools
from envs.data import Row, load_rows
from envs.row_files import format_value, is_json_object, read_json
from envs.task import Completion, Example, Message, Reward, Task, register
from envs.tasks.code import check_tests, read_tests
from envs.verifiers import code, equivalence
from envs.verifiers.extract import text_after_thinking
from envs.verifiers.reference_answers import check_references, unwrap_reference
from envs.verifiers.rules import RULES

PROMPT_COLUMNS = ("messages", "prompt")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "gt_answer")


@register("jsonl")
class JSONLines(Task):
    """Task that scores final answers as text or mathematics, and programs by tests.

    The final answer may have any notation. `env.reward` replaces the reward. Options: `prompt` and `answer`, which name
    a column or a path in a column (`extra_info.answer`), and those of `CodeOptions`.
    """

    reads_hub = False
    reads_prefill = True

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        for key in ("prompt", "answer"):
            if not isinstance(env.options.get(key, ""), str):
                raise ConfigError(
                    f"env.options.{key}={env.options[key]!r}: must be the name of a column, or a path in a "
                    "column (a.b.c)"
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
        can_have_tests = not self.accepts_any_answer_form and "answer" not in self.env.options
        messages = self._messages(row)
        answer = read_tests(row) if can_have_tests and "test_cases" in row.values else self._answer(row)
        row_data, prefill = (self.row_data(row), row["prefill"] if row.has_value("prefill") else self.env.prefill or "")
        if not isinstance(prefill, str):
            raise ConfigError(f"{row.place}: column 'prefill' must be text, but is {format_value(prefill)}")
        return Example(messages, answer, row.index, row_data=row_data, prefill=prefill, tools=read_tools(row))

    def _answer(self, row: Row) -> Any:
        """Returns the reference answer: text or tests, or any value for user rewards."""
        chosen = self.env.options.get("answer")
        known = (*ANSWER_COLUMNS, "test_cases")
        path = chosen or next((path for path in known if row.has_value(path)), "answer")
        if self.accepts_any_answer_form:
            return json.loads(json.dumps(row.value_at(path), default=str)) if chosen or row.has_value(path) else None
        found = row.value_at(path)
        tests = read_json(found, row.place) if is_json_object(found) else found
        has_tests = isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys()
        if has_tests and self.env.reward in (None, "code"):
            return check_tests(tests, row.place)
        answer = unwrap_reference(found, self.env)
        if isinstance(answer, date | time):
            answer = str(answer)
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
            raise ConfigError(
                f"{row.place}: column {path!r} must be text or a number, but is {format_value(answer)}; set "
                "a reward of your own for other values (env.reward=module:function)"
            )
        reference = str(answer).strip()
        if not reference:
            raise ConfigError(f"{row.place}: column {path!r} is empty; write an answer, or remove the row")
        return reference

    def _messages(self, row: Row) -> tuple[Message, ...]:
        column = self.env.options.get("prompt") or next(filter(row.has_value, PROMPT_COLUMNS), "prompt")
        messages_or_text = parse_conversation(row.value_at(column), f"{row.place}: column {column!r}")
        if column != "messages" and not isinstance(messages_or_text, list | dict):
            if not isinstance(messages_or_text, str) or not messages_or_text.strip():
                raise ConfigError(
                    f"{row.place}: column {column!r} must be a non-empty string, but is "
                    f"{format_value(messages_or_text)}"
                )
            return self.messages(messages_or_text)
        messages = read_messages(row, messages_or_text, column)
        if len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user":
            return self.messages(messages[0]["content"])
        return self.conversation(messages)

    def reward(self, completion: Completion, example: Example) -> Reward:
        if not isinstance(example.answer, str):
            return code.code_reward(completion, example, self.env)
        if (text_after_thinking(completion.full_text) or "").strip() == example.answer:
            return Reward(1.0, {"accuracy": 1.0})
        return RULES["math"].reward(completion, example, self.env)

    def warm_up(self) -> None:
        equivalence.warm_up()
        with suppress(ConfigError):  # only rows with tests need a sandbox; without one their verdicts are errors
            code.warm_up(self.env)
