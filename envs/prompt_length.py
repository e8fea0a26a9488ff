"""The limit on the length of prompts in tokens, checked without tokenizing more of them than it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from envs.chat import encode_prompt
from envs.chat_template import render_prompt
from envs.task import Example
from envs.teacher_prompt import TeacherPrompt

_PREFIX_TOKENS = 8
_CHARACTERS_PER_TOKEN = 8
"""Of the beginning of a long prompt, which is looked at first."""


@dataclass(frozen=True)
class PromptLimit:
    """The limit on a prompt's tokens, and the message on a longer prompt.

    teacher: makes the prompt that a teacher sees, which the limit holds for as well; None: it sees the policy's own.
    """

    tokenizer: PreTrainedTokenizerBase
    limit: int
    teacher: TeacherPrompt | None = None

    def __call__(self, example: Example) -> bool:
        return all(self._fits(seen) for seen in self._seen(example))

    def _seen(self, example: Example) -> Iterator[Example]:
        """The example as the policy sees it, then as the teacher does."""
        yield example
        if self.teacher is not None:
            yield self.teacher.example(example)

    def _fits(self, example: Example) -> bool:
        """Most do by their bytes alone: a token covers one or more, the tokenizer's prefix apart."""
        if len(render_prompt(self.tokenizer, example).encode()) + _PREFIX_TOKENS <= self.limit:
            return True
        return self._tokens(example)[0] <= self.limit

    def _tokens(self, example: Example) -> tuple[int, bool]:
        """Tokens of the prompt and true, or of its beginning, which is far over the limit by itself, and false.

        The beginning grows until it is that or all: a text of megabytes is not tokenized to learn that it is too long.
        """
        longest = max(len(message["content"]) for message in example.messages)
        cut = _CHARACTERS_PER_TOKEN * max(self.limit, 8)
        while cut < longest:
            messages = tuple(message | {"content": message["content"][:cut]} for message in example.messages)
            count = len(encode_prompt(self.tokenizer, replace(example, messages=messages)))
            if count > 2 * self.limit:
                return count, False
            cut *= _CHARACTERS_PER_TOKEN
        return len(encode_prompt(self.tokenizer, example)), True

    def told(self, examples: Sequence[Example]) -> tuple[str, str]:
        """The length of the first prompt, for a message that says that all are too long.

        With it what helps beside a higher limit, which may be nothing.
        """
        own, *of_teacher = self._seen(examples[0])
        whose, long, helps = "", own, ""
        if of_teacher and self._fits(own):
            whose, long = ", as policy.teacher_prompt shows it to the teacher", of_teacher[0]
            helps = ", or shorten policy.teacher_prompt"
        count, exact = self._tokens(long)
        return f"prompt 1{whose}: {'' if exact else 'more than '}{count} tokens, limit {self.limit}", helps
