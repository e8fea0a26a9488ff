"""Tests whether a prompt fits the token limit, without tokenizing long texts in full."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from envs.chat import encode_prompt
from envs.chat_template import render_prompt
from envs.task import Example
from envs.teacher_prompt import TeacherPrompt

_PREFIX_TOKENS = 8
"""Bound on the tokens that a tokenizer adds before a prompt."""
_CHARACTERS_PER_TOKEN = 8
"""Characters per token of the limit in the beginning of a long prompt, which is tokenized first."""


@dataclass(frozen=True)
class PromptLimit:
    """Predicate of examples with prompts within the token limit, and description of longer prompts.

    teacher: builds the teacher's prompt, to which the limit applies as well; None if the teacher sees the policy's
    prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    limit: int
    teacher: TeacherPrompt | None = None

    def __call__(self, example: Example) -> bool:
        return all(self._fits(visible) for visible in self._visible_examples(example))

    def _visible_examples(self, example: Example) -> Iterator[Example]:
        """Yields the example of the policy, then the example of the teacher."""
        yield example
        if self.teacher is not None:
            yield self.teacher.teacher_example(example)

    def _fits(self, example: Example) -> bool:
        """Whether the prompt of an example is within the limit.

        The number of bytes bounds the number of tokens but for the tokenizer's prefix, and decides for most prompts.
        """
        if len(render_prompt(self.tokenizer, example).encode()) + _PREFIX_TOKENS <= self.limit:
            return True
        return self._count_tokens(example)[0] <= self.limit

    def _count_tokens(self, example: Example) -> tuple[int, bool]:
        """Counts the tokens of a prompt, or of its beginning beyond twice the limit.

        Returns the count, and whether the count covers the whole prompt. The beginning grows until its count is over
        twice the limit, so a text of megabytes is not tokenized in full.
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

    def describe_length(self, examples: Sequence[Example]) -> tuple[str, str]:
        """Describes the length of the first prompt, for a message on too long prompts.

        Returns the description, and a remedy beside a higher limit (empty if there is none).
        """
        policy_example, *teacher_examples = self._visible_examples(examples[0])
        view, long_example, remedy = "", policy_example, ""
        if teacher_examples and self._fits(policy_example):
            view, long_example = ", with policy.teacher_prompt for the teacher", teacher_examples[0]
            remedy = ", or shorten policy.teacher_prompt"
        count, is_exact = self._count_tokens(long_example)
        return f"prompt 1{view}: {'' if is_exact else 'more than '}{count} tokens, limit {self.limit}", remedy
