"""Token sequences of an episode that grow with its turns, and their completion.

    sequence A   prompt | turn 1 | replies | turn 3
    sequence B   prompt | turn 2

The completion holds B, then A: the sequence of the last turn stands at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envs.chat import ChatEncoder
from envs.chat_suffix import GrowingChat
from envs.example import Message
from envs.group import FinishReason, SampledCompletion, SequenceStart, Turn


@dataclass(eq=False)
class GrowingSequence:
    """Token sequence under construction.

    context: token ids, of the prompt and the tokens after it. The other lists have one entry for each token after the
    prompt.
    """

    prompt: tuple[int, ...]
    chat: GrowingChat
    context: list[int] = field(init=False)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    sampled_mask: list[bool] = field(default_factory=list)
    text: str = ""
    num_decoded: int = 0

    def __post_init__(self) -> None:
        self.context = list(self.prompt)

    def append_replies(self, suffix: Sequence[int]) -> None:
        """Appends token ids of the chat template, with the policy version of the token before."""
        self.context += suffix
        self.log_probs += [0.0] * len(suffix)
        self.policy_versions += self.policy_versions[-1:] * len(suffix)
        self.sampled_mask += [False] * len(suffix)

    def append_sample(self, sample: SampledCompletion) -> None:
        """Appends the sampled tokens of a turn."""
        self.context += sample.token_ids
        self.log_probs += sample.log_probs
        self.policy_versions += sample.policy_versions
        self.sampled_mask += [True] * len(sample.token_ids)

    def decode_context(self, encoder: ChatEncoder) -> str:
        """Returns the text of the context; decodes only tokens that came after the last call."""
        self.text += encoder.prompt_text(self.context[self.num_decoded :])
        self.num_decoded = len(self.context)
        return self.text


@dataclass(frozen=True, eq=False)
class RecordedTurn:
    """Sampled turn with the messages up to it.

    end: length of the sequence's context after the turn. record: with indices in the sequence. engine: its
    name. ended_at: time of the answer, in seconds of `time.perf_counter()`.
    """

    sequence: GrowingSequence
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    end: int
    record: Turn
    engine: str
    ended_at: float


def join_sequences(
    answers: Sequence[RecordedTurn], group_prompt: tuple[int, ...], finish_reason: FinishReason
) -> SampledCompletion:
    """Returns the completion of an episode: its sequences, in the order of their last turns.

    answers: in the order of time. group_prompt: prompt that a single sequence need not repeat.
    """
    last_turns = {id(answer.sequence): number for number, answer in enumerate(answers)}
    sequences = {id(answer.sequence): answer.sequence for answer in answers}
    completion = SampledCompletion([], [], [], finish_reason)
    offsets: dict[int, int] = {}
    for key in sorted(sequences, key=last_turns.__getitem__):
        sequence, offsets[key] = sequences[key], len(completion.token_ids)
        completion.sequence_starts.append(SequenceStart(len(completion.token_ids), sequence.prompt))
        completion.token_ids += sequence.context[len(sequence.prompt) :]
        completion.log_probs += sequence.log_probs
        completion.policy_versions += sequence.policy_versions
        completion.sampled_mask += sequence.sampled_mask
    if completion.sequence_starts == [SequenceStart(0, group_prompt)]:
        completion.sequence_starts = []
    for answer in answers:
        turn, offset = answer.record, offsets[id(answer.sequence)]
        completion.turns.append(replace(turn, start=turn.start + offset, end=turn.end + offset))
        completion.engine = answer.engine
    return completion
