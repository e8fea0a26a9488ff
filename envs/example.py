"""Records that tasks and rewards exchange: example, completion, reward. No torch here.

Users import these names from `envs.task`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SYSTEM_ROLES = ("system", "developer")
"""Roles of a message that precedes a conversation and instructs the model."""
Outcome = Literal["scored", "invalid", "error"]
Message = dict[str, Any]
"""A role and a content, both text; perhaps `name`, `tool_calls`, `tool_call_id`, as chat templates read them."""


@dataclass(frozen=True)
class Example:
    """One prompt.

    messages: chat messages, the system prompt included.
    answer: the gold: whatever the task's reward needs to judge (a number, a list of tests, ...).
    row: the example's index in its source, for reports and the ledger.
    source: in a mixture, the name of the member that the example comes from.
    row_data: the columns of the row that the example was made of, by name, for rewards that need more than `answer`.
    prefill: the beginning of the answer; it is part of the prompt.
    tools: schemas of functions, for the chat template.
    """

    messages: tuple[Message, ...]
    answer: Any
    row: int
    source: str = ""
    row_data: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""
    tools: tuple[dict[str, Any], ...] = ()


class Mixed(list[Example]):
    """The examples of several data sets, one after the other; each carries the name of its member in `source`.

    bounds: name -> (first index, one past the last). weights: name -> relative number of prompts.
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
    """A completion as a reward sees it: text, number of tokens, whether it was cut off.

    control_tokens: the model wrote control tokens where none belong, or ids of no token. No reward sees such a
    completion, whose text is empty here: it is `invalid`.
    prefill: the beginning of the answer that the prompt holds: a `<think>` of the chat template, `Example.prefill`.
    """

    text: str
    num_tokens: int = 0
    truncated: bool = False
    control_tokens: bool = False
    prefill: str = ""

    @property
    def full_text(self) -> str:
        """The whole answer: what the prompt holds of it, and what the model wrote."""
        return self.prefill + self.text


@dataclass(frozen=True)
class CompletionInRun(Completion):
    """A completion with its tokens and the run's progress, for rewards that ask.

    token_ids: empty where no reward asks for them, or a file gives the completion (`run=rewards`).
    step, total_steps: optimizer steps done, and of the whole run; 0 of 1 in `run=rewards`.
    """

    token_ids: tuple[int, ...] = ()
    step: int = 0
    total_steps: int = 1


def in_run(completion: Completion) -> CompletionInRun:
    """The completion as one of a run."""
    return completion if isinstance(completion, CompletionInRun) else CompletionInRun(**vars(completion))


def without_run(completion: Completion) -> Completion:
    """The completion without its tokens and the progress of a run."""
    if type(completion) is Completion:
        return completion
    return Completion(**{name: getattr(completion, name) for name in Completion.__dataclass_fields__})


@dataclass(frozen=True)
class Reward:
    """The result of a reward function.

    parts: unweighted named components (accuracy, format, ...), which are logged beside the score.
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = "scored"
