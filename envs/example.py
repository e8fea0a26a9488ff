"""Records exchanged by tasks and rewards: example, completion, reward.

Users import these names from `envs.task`. This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SYSTEM_ROLES = ("system", "developer")
"""Roles of a message that precedes a conversation and instructs the model."""
Outcome = Literal["scored", "invalid", "error"]
Message = dict[str, Any]
"""Chat message with the texts `role` and `content`; optional `name`, `tool_calls`, `tool_call_id` for templates."""


@dataclass(frozen=True)
class Example:
    """One prompt with its reference answer.

    Args:
        messages: chat messages, including the system prompt.
        answer: reference answer in the form that the task's reward reads (a number, a list of tests, ...).
        row: index of the example in its data set, for reports and the ledger.
        source: name of the example's member in a mixture; empty without a mixture.
        row_data: columns of the example's data row by name, for rewards that need more than `answer`.
        prefill: beginning of the completion that is part of the prompt.
        tools: function schemas for the chat template.
        problem_id: differs between problems with equal messages; empty if the messages are the whole problem.
    """

    messages: tuple[Message, ...]
    answer: Any
    row: int
    source: str = ""
    row_data: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    problem_id: str = ""


class MixedExamples(list[Example]):
    """Examples of several data sets, one after the other.

    `source` of each example is the name of its member.

    bounds: name -> (first index, one past the last index). weights: name -> relative number of prompts.
    """

    def __init__(self, members: Mapping[str, Sequence[Example]], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.weights = weights
        self.bounds: dict[str, tuple[int, int]] = {}
        for name, examples in members.items():
            self.bounds[name] = (len(self), len(self) + len(examples))
            self += [replace(example, source=name) for example in examples]


@dataclass(frozen=True)
class Completion:
    """Completion as the input of a reward.

    Args:
        text: text of the last turn, without the prefill.
        num_tokens: tokens sampled in all turns.
        truncated: the completion reached the token limit without an end token.
        control_tokens: the model sampled control tokens inside a turn, or ids without a token. Such a completion has
            the outcome `invalid` without a call of the reward, and `text` is empty.
        prefill: beginning of the answer that the prompt holds: a `<think>` of the chat template and `Example.prefill`.
        turns: messages after the prompt, of the model and the environment in turn, with `tool_calls` and
            `reasoning_content` where the model wrote them.
    """

    text: str
    num_tokens: int = 0
    truncated: bool = False
    control_tokens: bool = False
    prefill: str = ""
    turns: tuple[Message, ...] = ()

    @property
    def full_text(self) -> str:
        """The whole answer: the prefill and the sampled text."""
        return self.prefill + self.text


@dataclass(frozen=True)
class CompletionInRun(Completion):
    """Completion with its tokens and the run's progress, for rewards that read them.

    token_ids: sampled tokens; empty if no reward reads them, or if a file provides the completion (`run=rewards`).
    step, total_steps: optimizer steps done, and of the whole run; 0 of 1 in `run=rewards`.
    """

    token_ids: tuple[int, ...] = ()
    step: int = 0
    total_steps: int = 1


def as_completion_in_run(completion: Completion) -> CompletionInRun:
    """Returns the completion as a `CompletionInRun`."""
    return completion if isinstance(completion, CompletionInRun) else CompletionInRun(**vars(completion))


def without_run_fields(completion: Completion) -> Completion:
    """Returns the completion without its tokens and the progress of a run."""
    if type(completion) is Completion:
        return completion
    return Completion(**{name: getattr(completion, name) for name in Completion.__dataclass_fields__})


@dataclass(frozen=True)
class Reward:
    """Result of a reward function.

    Args:
        score: the reward to train on.
        components: unweighted reward components by name (accuracy, format, ...), logged beside the score.
        outcome: `scored`; `invalid` by the completion's fault; `error` by the reward's or the data's fault.
    """

    score: float
    components: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = "scored"
