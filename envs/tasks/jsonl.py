"""Any local file: one row a line with a prompt or messages, and an answer that is compared as text or number."""

from collections.abc import Sequence
from typing import Any

from config.errors import ConfigError
from envs.data import Row, load_rows
from envs.task import Completion, Example, Message, Reward, Task, register
from envs.verifiers.numbers import final_number, same_number

ANSWER_COLUMNS = ("answer", "gt_answer")


@register("jsonl")
class JSONLines(Task):
    """`prompt` (text) or `messages` (one object or a list), and `answer` or `gt_answer`.

    Judged by the final number where the gold is one (after `####`, in `<answer>`, or the whole text), else by
    equality of the stripped text. `env.reward` puts any other judge in its place.
    """

    in_process = True

    def examples(self, split: str) -> Sequence[Example]:
        return [self._example(row) for row in load_rows(self.env, None, None, split)]

    def _example(self, row: Row) -> Example:
        column = next((name for name in ANSWER_COLUMNS if name in row.values), ANSWER_COLUMNS[0])
        answer = row[column]
        if answer is None or isinstance(answer, dict | list):
            raise ConfigError(f"{row.place}: column {column!r} must be text or a number, it is {answer!r}")
        return Example(self._messages(row), str(answer).strip(), row.index)

    def _messages(self, row: Row) -> tuple[Message, ...]:
        if "messages" not in row.values:
            return self.messages(row.text("prompt"))
        given: Any = row["messages"]
        listed = [given] if isinstance(given, dict) else given
        if not isinstance(listed, list) or not listed or not all(_is_message(entry) for entry in listed):
            raise ConfigError(
                f'{row.place}: "messages" must be {{"role": ..., "content": ...}} or a list of them, it is {given!r}'
            )
        if listed[0]["role"] == "user" and len(listed) == 1:
            return self.messages(listed[0]["content"])
        return tuple({"role": entry["role"], "content": entry["content"]} for entry in listed)

    def reward(self, completion: Completion, example: Example) -> Reward:
        text = completion.text.strip()
        given = final_number(text)
        same = text == example.answer or same_number(given if given is not None else text, example.answer)
        return Reward(float(same), {"accuracy": float(same)})


def _is_message(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("role"), str) and isinstance(entry.get("content"), str)
