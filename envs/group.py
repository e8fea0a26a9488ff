"""The record of one prompt with its completions: what crosses from rollout to learner, evaluation and monitoring.

Plain Python, no torch. `run_group` makes a group and judges it, `LowestScores.settle` lowers scores of
invalid completions; nobody changes it afterwards, and nothing of it is thrown away. Tensors are made of it once, by
`batches/batch.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from envs.task import Completion, Example, Outcome

FinishReason = Literal["stop", "length", "abort"]
ALONE = "the engine"
"""The name of an engine that is not one of several."""
OUTCOMES: tuple[Outcome, ...] = ("scored", "invalid", "error")
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    `top_k=0` and `top_p=1` mean the full vocabulary; `temperature=0` is greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256


@dataclass(frozen=True)
class Verdict:
    """The reward service's verdict on one completion.

    seconds: that judging took. success: 0 unless a judge scored it; then the `accuracy` part (0 to 1), or where there
    is none 1 for a score of at least 1.
    """

    score: float
    parts: dict[str, float]
    outcome: Outcome
    seconds: float = 0.0
    success: float = field(init=False)

    def __post_init__(self) -> None:
        success = self.parts.get("accuracy", float(self.score >= 1)) if self.outcome == "scored" else 0.0
        object.__setattr__(self, "success", success)

    @property
    def judged(self) -> bool:
        """False where judging failed, so that the score says nothing about the completion."""
        return self.outcome != "error"


@dataclass(slots=True)
class SampledCompletion:
    """One sampled completion: every token of it, who wrote it, and what became of it.

    The ledger writes its fields as they are named here (docs/rollouts.md).

    token_ids: the end-of-sequence token included where one was drawn.
    log_probs: one a token, of the distribution it was sampled from (after temperature, top-p and top-k).
    policy_versions: one a token, the version of the weights that drew it.
    finish_reason: "stop" (end of sequence drawn), "length" (max_tokens reached), "abort".
    sampled: one a token, false where the environment wrote it (a tool's result); empty: the model drew all.
    text: the whole completion decoded, every turn of it. Control tokens show only where they do not belong.
    shown: what the reward saw. verdict: what it said.
    engine: its name and devices, as a pool knows them, of the last turn.
        Completions that differ in nothing else are equal: what is drawn does not depend on it.
    """

    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason
    sampled: list[bool] = field(default_factory=list)
    text: str = ""
    shown: Completion | None = None
    verdict: Verdict | None = None
    engine: str = field(default=ALONE, compare=False)

    @property
    def num_drawn(self) -> int:
        """Tokens that the model drew, in all its turns."""
        return sum(self.sampled) if self.sampled else len(self.token_ids)


@dataclass(frozen=True)
class Times:
    """Seconds of `time.time()`: the prompt is encoded, the last token is there, the last verdict is there."""

    begun: float
    drawn: float
    judged: float


@dataclass
class Group:
    """One prompt and its completions: the unit of advantage, dispatch, re-queueing and of the buffer.

    group_id: unique; prompts may recur, ids never do.
    prompt: token ids, ending where the assistant's answer begins. prompt_text: decoded, chat template included.
    teacher_prompt: token ids of what the teacher sees in its place; none where it sees the same.
    completions: those that are trained on, `env.repeats` of them.
    left_out: candidates that were generated and not chosen (`env.oversample`).
    in_place_of: the group that dynamic sampling refused, which this one replaces; it may replace another in turn.
    """

    group_id: int
    example: Example
    prompt: tuple[int, ...]
    prompt_text: str
    sampling: Sampling
    completions: list[SampledCompletion]
    times: Times
    left_out: list[SampledCompletion] = field(default_factory=list)
    in_place_of: "Group | None" = None
    teacher_prompt: tuple[int, ...] = ()

    @property
    def version(self) -> int:
        """The oldest policy version that drew one of its tokens."""
        return min(chain.from_iterable([one.policy_versions for one in self.completions]))

    def chain(self) -> Iterator["Group"]:
        """This group, and those that it is in place of, the newest first."""
        group: Group | None = self
        while group is not None:
            yield group
            group = group.in_place_of

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on its completions, in their order."""
        return [one.verdict for one in self.completions if one.verdict is not None]

    @property
    def candidates(self) -> list[SampledCompletion]:
        """Completions generated for the prompt, the trained ones first."""
        return self.completions + self.left_out

    @property
    def candidate_verdicts(self) -> list[Verdict]:
        """Verdicts on its candidates, in their order."""
        return [one.verdict for one in self.candidates if one.verdict is not None]

    @property
    def success_rate(self) -> float:
        """Mean success of its candidates, 0 to 1; those that could not be judged do not count."""
        verdicts = [verdict for verdict in self.candidate_verdicts if verdict.judged]
        return sum([verdict.success for verdict in verdicts]) / max(1, len(verdicts))

    def attempts(self) -> Iterator[dict[str, Any]]:
        """One JSON object for each completion: its verdict, text and length."""
        for sample, (one, verdict) in enumerate(zip(self.completions, self.verdicts, strict=True)):
            yield {
                "row": self.example.row,
                "sample": sample,
                "correct": verdict.success >= 1,
                "score": verdict.score,
                "outcome": verdict.outcome,
                "parts": verdict.parts,
                "finish_reason": one.finish_reason,
                "tokens": one.num_drawn,
                "prompt": self.prompt_text,
                "completion": one.text,
            }
