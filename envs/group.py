"""Group record: one prompt with its completions, log-probs, verdicts and times.

Rollouts pass groups to the learner, evaluation and monitoring. A rollout makes a group with its verdicts, then
`MinimumScores` lowers the scores of invalid completions; afterwards a group does not change. `batches/batch.py` makes
tensors of groups. This module does not import torch.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from envs.example import Message
from envs.task import Completion, Example, Outcome

FinishReason = Literal["stop", "length", "abort", "turns", "deadline", "error"]
"""End of a completion: an end token or its environment, the token limit, an aborted request, the limit of turns, the
episode's deadline, or a failure of the environment."""
SINGLE_ENGINE_NAME = "the engine"
"""Name of an engine outside a pool."""
OUTCOMES: tuple[Outcome, ...] = ("scored", "invalid", "error")
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "turns", "deadline", "error")
ToolOutcome = Literal["ok", "error", "unknown", "malformed", "timeout"]
"""Result of a tool call: answered, the tool failed, no such tool, a call that cannot be parsed, the time limit."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an engine, in the order of their use; `temperature=0` is greedy.

    Args:
        top_p: 1 keeps the full vocabulary, as `top_k=0` and `min_p=0`.
        min_p: least probability of a token relative to the most likely token, applied before top-k and top-p.
        stop: strings whose completion in the decoded text ends a completion, with the token that completes them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(self.stop))  # a list in JSON and in a config


@dataclass(frozen=True)
class Verdict:
    """Verdict of the reward service on one completion.

    Args:
        score: the reward to train on.
        components: unweighted reward components by name.
        seconds: time that the reward took.

    Attributes:
        success: 0 unless the outcome is `scored`; then the `accuracy` component (0 to 1), or without this component 1
            for a score of at least 1.
    """

    score: float
    components: dict[str, float]
    outcome: Outcome
    seconds: float = 0.0
    success: float = field(init=False)

    def __post_init__(self) -> None:
        success = self.components.get("accuracy", float(self.score >= 1)) if self.outcome == "scored" else 0.0
        object.__setattr__(self, "success", success)

    @property
    def has_score(self) -> bool:
        """Whether the score is valid; False if the reward failed."""
        return self.outcome != "error"


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """Start of a token sequence inside a completion, and the prompt of this sequence.

    start: index in the completion's tokens. prompt: token ids.
    """

    start: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token sequence to train on: a prompt and the tokens after it.

    The values are those of `SampledCompletion`.
    """

    prompt: tuple[int, ...]
    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason
    sampled_mask: list[bool]


@dataclass(slots=True)
class Turn:
    """One turn of the model in an episode, and the environment's answer to it.

    Args:
        message: the parsed message of the model.
        start, end: the sampled tokens of the turn, as indices in the completion's tokens.
        opening: messages of the environment's reset, before the first turn.
        replies: messages of the environment after the turn.
        reward: reward of the turn; 0 if the environment gives none.
        engine_seconds, env_seconds: time that engine and environment took.
        start_seconds: time of the episode before its first turn; 0 for later turns.
        tool_outcomes: outcome of each tool call, first those in the message's `tool_calls`, then malformed ones; empty
            if the environment answers calls itself.
    """

    message: Message
    start: int
    end: int
    replies: tuple[Message, ...] = ()
    opening: tuple[Message, ...] = ()
    reward: float = 0.0
    engine_seconds: float = 0.0
    env_seconds: float = 0.0
    start_seconds: float = 0.0
    tool_outcomes: tuple[ToolOutcome, ...] = ()


@dataclass(slots=True)
class SampledCompletion:
    """One sampled completion, an episode with one verdict: tokens, log-probs, turns, text and verdict.

    An engine fills the first four fields. The ledger writes the fields under these names (docs/rollouts.md).

    Args:
        token_ids: all tokens, including a sampled end token; those of several sequences one after the other.
        log_probs: per token, in nats, of the sampling distribution (after temperature, min-p, top-k and top-p).
        policy_versions: per token, the version of the weights that sampled the token.
        finish_reason: see `FinishReason`.
        sampled_mask: per token, False if the environment wrote the token (a tool's result); empty if the model sampled
            all.
        text: decoded text of all turns. Control tokens appear only if they are not at the end of a turn.
        reward_input: input of the reward.
        verdict: result of the reward.
        engine: name and devices of the engine of the last turn. Not compared: samples do not depend on the engine.
        sequence_starts: start and prompt of each sequence; empty for one sequence after the group's prompt. A new
            sequence starts where the chat template or the environment rewrites earlier messages.
        turns: turns of an episode in an environment; empty for a completion of one turn.
        error: failure of the environment, empty without one.
    """

    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason
    sampled_mask: list[bool] = field(default_factory=list)
    text: str = ""
    reward_input: Completion | None = None
    verdict: Verdict | None = None
    engine: str = field(default=SINGLE_ENGINE_NAME, compare=False)
    sequence_starts: list[SequenceStart] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    error: str = ""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled by the model, in all turns."""
        return sum(self.sampled_mask) if self.sampled_mask else len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """Number of token sequences."""
        return max(1, len(self.sequence_starts))

    def sequences(self, prompt: tuple[int, ...]) -> Iterator[TokenSequence]:
        """Yields the token sequences in order. prompt: the group's prompt."""
        starts = self.sequence_starts or [SequenceStart(0, prompt)]
        ends = [*(one.start for one in starts[1:]), len(self.token_ids)]
        for one, end in zip(starts, ends, strict=True):
            part = slice(one.start, end)
            yield TokenSequence(
                one.prompt,
                self.token_ids[part],
                self.log_probs[part],
                self.policy_versions[part],
                self.finish_reason,
                self.sampled_mask[part],
            )


@dataclass(frozen=True)
class GroupTimes:
    """Times of a group, in seconds of `time.time()`.

    started_at: the prompt was encoded. sampled_at: the last token was sampled. scored_at: the last verdict arrived.
    """

    started_at: float
    sampled_at: float
    scored_at: float


@dataclass
class Group:
    """One prompt and its completions, the unit of advantages, dispatch and buffering.

    Args:
        group_id: unique; a prompt may recur, an id never does.
        prompt: token ids, ending where the assistant's answer begins.
        prompt_text: decoded, including the chat template.
        completions: the `env.repeats` completions to train on.
        unselected_candidates: sampled candidates that were not chosen (`env.oversample`).
        replaces: group that dynamic sampling rejected in favour of this group; a chain if several were rejected.
        teacher_prompt: token ids of the teacher's prompt; empty if the teacher sees `prompt`.
    """

    group_id: int
    example: Example
    prompt: tuple[int, ...]
    prompt_text: str
    sampling: Sampling
    completions: list[SampledCompletion]
    times: GroupTimes
    unselected_candidates: list[SampledCompletion] = field(default_factory=list)
    replaces: "Group | None" = None
    teacher_prompt: tuple[int, ...] = ()

    @property
    def oldest_version(self) -> int:
        """Oldest policy version of the tokens in the completions.

        A group without tokens is never too old.
        """
        versions = chain.from_iterable([one.policy_versions for one in self.completions])
        return min(versions, default=sys.maxsize)

    @property
    def num_sequences(self) -> int:
        """Number of token sequences of the completions."""
        return sum([one.num_sequences for one in self.completions])

    def replacement_chain(self) -> Iterator["Group"]:
        """Yields this group and the groups it replaces, the newest first."""
        group: Group | None = self
        while group is not None:
            yield group
            group = group.replaces

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the completions, in their order."""
        return [one.verdict for one in self.completions if one.verdict is not None]

    @property
    def candidates(self) -> list[SampledCompletion]:
        """Sampled completions, first those to train on, then the unselected."""
        return self.completions + self.unselected_candidates

    @property
    def candidate_verdicts(self) -> list[Verdict]:
        """Verdicts on the candidates, in their order."""
        return [one.verdict for one in self.candidates if one.verdict is not None]

    @property
    def success_rate(self) -> float:
        """Mean success of the candidates, 0 to 1, without those whose reward failed."""
        verdicts = [verdict for verdict in self.candidate_verdicts if verdict.has_score]
        return sum([verdict.success for verdict in verdicts]) / max(1, len(verdicts))

    def attempts(self) -> Iterator[dict[str, Any]]:
        """Yields one JSON object for each completion, with its verdict, text and length."""
        for sample, (one, verdict) in enumerate(zip(self.completions, self.verdicts, strict=True)):
            yield {
                "row": self.example.row,
                "sample": sample,
                "correct": verdict.success >= 1,
                "score": verdict.score,
                "outcome": verdict.outcome,
                "components": verdict.components,
                "finish_reason": one.finish_reason,
                "tokens": one.num_sampled_tokens,
                "prompt": self.prompt_text,
                "completion": one.text,
            }
