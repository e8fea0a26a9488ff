"""Replaces the last user message of a prompt by the template `policy.teacher_prompt`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Number

from config.schema.errors import ConfigError
from config.schema.policy import PolicyConfig
from envs.example import Example
from envs.row_files import format_value

PROMPT, ANSWER = "{prompt}", "{answer}"
_REMEDY = "set another model as teacher (policy=opd ref_model.name=MODEL), or another dataset"
_PLACEHOLDERS = re.compile(f"{re.escape(PROMPT)}|{re.escape(ANSWER)}")


@dataclass(frozen=True)
class TeacherPrompt:
    """Template of the teacher's user message.

    text: template in which {prompt} is the replaced user message and {answer} the reference answer.
    """

    text: str

    def teacher_example(self, example: Example) -> Example:
        """Returns the example with the teacher's prompt.

        Raises:
            ConfigError: the example has no user message, or its answer is neither a text nor a number.
        """
        place = f"{example.source} row {example.row}".strip()
        users = [index for index, message in enumerate(example.messages) if message["role"] == "user"]
        if not users:
            roles = ", ".join(message["role"] for message in example.messages)
            raise ConfigError(
                f"{place}: the row has no user message (roles: {roles}), so policy.teacher_prompt has no "
                f"message to replace; {_REMEDY}"
            )
        last = example.messages[users[-1]]
        answer = example.answer
        if isinstance(answer, bool) or not isinstance(answer, str | Number) or not str(answer).strip():
            raise ConfigError(
                f"{place}: the reference answer is {format_value(answer)}, but policy.teacher_prompt can "
                f"show only a text or a number to the teacher; {_REMEDY}"
            )
        values = {PROMPT: last["content"], ANSWER: str(answer)}
        # One pass, so that a placeholder spelled in a message or an answer is not replaced.
        text = _PLACEHOLDERS.sub(lambda match: values[match[0]], self.text)
        messages = list(example.messages)
        messages[users[-1]] = last | {"content": text}
        return replace(example, messages=tuple(messages))

    def check(self, examples: Sequence[Example], name: str) -> None:
        """Raises ConfigError as `teacher_example`, if any example fails. name: data set, for messages."""
        for example in examples:
            try:
                self.teacher_example(example)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error


def teacher_prompt(policy: PolicyConfig) -> TeacherPrompt | None:
    """Returns the template of the teacher's prompt; None if the teacher sees the policy's prompt."""
    return None if policy.teacher_prompt is None else TeacherPrompt(policy.teacher_prompt)
