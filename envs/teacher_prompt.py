"""The teacher's prompt: the last user message, told by `policy.teacher_prompt`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Number

from config.schema.errors import ConfigError
from config.schema.policy import PolicyConfig
from envs.example import Example
from envs.row_files import shown

PROMPT, ANSWER = "{prompt}", "{answer}"
_OTHERWISE = "take another model as teacher (policy=opd ref_model.name=MODEL), or another dataset"
_PLACES = re.compile(f"{re.escape(PROMPT)}|{re.escape(ANSWER)}")


@dataclass(frozen=True)
class TeacherPrompt:
    """The user message that a teacher sees.

    text: {prompt} stands for the message that it replaces, {answer} for the reference answer.
    """

    text: str

    def example(self, example: Example) -> Example:
        """The example as the teacher sees it.

        Raises:
            ConfigError: no message is the user's, or the answer is neither a text nor a number.
        """
        place = f"{example.source} row {example.row}".strip()
        users = [index for index, message in enumerate(example.messages) if message["role"] == "user"]
        if not users:
            roles = ", ".join(message["role"] for message in example.messages)
            raise ConfigError(
                f"{place}: none of its messages ({roles}) is the user's, so there is none that "
                f"policy.teacher_prompt could replace: {_OTHERWISE}"
            )
        last = example.messages[users[-1]]
        answer = example.answer
        if isinstance(answer, bool) or not isinstance(answer, str | Number) or not str(answer).strip():
            raise ConfigError(
                f"{place}: its reference answer is {shown(answer)}, neither a text nor a number, and "
                f"policy.teacher_prompt shows it to the teacher: {_OTHERWISE}"
            )
        parts = {PROMPT: last["content"], ANSWER: str(answer)}
        # In one pass, so that what a message or an answer spells stays as it is.
        text = _PLACES.sub(lambda found: parts[found[0]], self.text)
        messages = list(example.messages)
        messages[users[-1]] = last | {"content": text}
        return replace(example, messages=tuple(messages))

    def check(self, examples: Sequence[Example], name: str) -> None:
        """Raises ConfigError as `example`, for any of them. name: the data set, for messages."""
        for example in examples:
            try:
                self.example(example)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error


def teacher_prompt(policy: PolicyConfig) -> TeacherPrompt | None:
    """The prompt that the policy's teacher sees, None where it is the policy's own."""
    return None if policy.teacher_prompt is None else TeacherPrompt(policy.teacher_prompt)
