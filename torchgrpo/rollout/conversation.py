"""Samples the turns of one episode, and keeps their token sequences.

    messages ─▶ longest answer that they repeat ─┬─ at the end of a sequence ─▶ its ids + suffix ─┐
                                                 ├─ earlier: a branch ─▶ ids up to there + suffix ├─▶ engine ─▶ turn
                                                 └─ none, or rewritten ─▶ ids of a new prompt ────┘

An environment and an HTTP client go through `Conversation.sample_turn`. A token sequence is only extended: sampled ids
stay as they were sampled, and the template's text between two answers is appended. A branch copies ids as its prompt,
so that every sampled token is in exactly one sequence. Calls may run concurrently; a cancelled call records nothing.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from config.schema.errors import ConfigError
from envs.chat import ChatEncoder
from envs.chat_responses import ResponseParser
from envs.chat_suffix import GrowingChat, appended_suffix_ids
from envs.equal_messages import are_equal_messages, restore_call_ids
from envs.example import Example, Message
from envs.group import FinishReason, SampledCompletion, Turn
from torchgrpo.rollout.engines.interface import Request, Sampler
from torchgrpo.rollout.growing_sequences import GrowingSequence, RecordedTurn, join_sequences


class LimitError(Exception):
    """Request beyond the turns or tokens of an episode.

    finish_reason: `turns` or `length`.
    """

    def __init__(self, message: str, finish_reason: FinishReason) -> None:
        super().__init__(message)
        self.finish_reason = finish_reason


class PromptError(Exception):
    """Messages that the chat template refuses, or a first prompt beyond its limit."""


class EpisodeOverError(Exception):
    """Request after the end of an episode."""


@dataclass(frozen=True)
class TurnLimits:
    """Limits of the turns of an episode.

    The request's `max_tokens` bounds the tokens after the first prompt.

    prompt_tokens: of the first prompt. turns: of the model. turn_tokens: sampled tokens of a turn, None without a
    limit. turn_ends: strings after which a turn ends.
    """

    prompt_tokens: int
    turns: int
    turn_tokens: int | None
    turn_ends: tuple[str, ...]


@dataclass(frozen=True)
class ConversationParts:
    """Parts that the conversations of a run share.

    Args:
        parser: parses a turn's tokens to a message with reasoning and tool calls.
        append_history: whether new messages are appended where the chat template rewrites earlier messages; otherwise
            a new sequence begins.
    """

    sampler: Sampler
    encoder: ChatEncoder
    parser: ResponseParser
    limits: TurnLimits
    append_history: bool


@dataclass(frozen=True)
class SampledTurn:
    """Turn of the model.

    Args:
        message: `role`, `content`, and `reasoning_content` and `tool_calls` where the model wrote them.
        malformed: one text for each call that cannot be parsed; the text of the call stays in `content`.
        token_ids, log_probs: of the sampled tokens, with the end token.
        context: token ids before the turn.
        is_last: whether the episode has no room for another turn after an abort or a cut at its token limit.
        record: turn of the completion, whose replies, reward and seconds the caller may set.
    """

    message: Message
    malformed: tuple[str, ...]
    finish_reason: FinishReason
    token_ids: list[int]
    log_probs: list[float]
    context: tuple[int, ...]
    is_last: bool
    record: Turn


@dataclass(frozen=True)
class _NextTurn:
    """Chat and context of the next turn.

    context: token ids. answer: the answer that the messages follow; None if they follow none. suffix: token ids after
    this answer; None for a new prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    context: tuple[int, ...]
    answer: RecordedTurn | None
    suffix: list[int] | None
    prefill: str = ""


class TurnSource(Protocol):
    """Source of turns, such as a `Conversation`."""

    async def sample_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> SampledTurn:
        """Samples the model's next turn after these messages, as `Conversation.sample_turn`."""
        ...


class Conversation:
    """Token sequences of one episode.

    request: of the group, with the prompt of the example. row: index of the completion in the group.

    Attributes:
        has_invalid_turn: whether the last turn has control tokens before its end.
        end_reason: limit that refused the last request, or cut after which no turn can follow; None without.
    """

    def __init__(self, parts: ConversationParts, example: Example, request: Request, row: int) -> None:
        self.parts, self.example, self.request, self.row = parts, example, request, row
        self.has_invalid_turn = False
        self._answers: list[RecordedTurn] = []
        self._first_prompt: tuple[int, ...] | None = None
        self.end_reason: FinishReason | None = None
        self._num_requests = self._num_in_flight = 0
        self._end_message = ""
        self._created_at = time.perf_counter()

    @property
    def turns(self) -> list[Turn]:
        """Turns in the order of their ends."""
        return [answer.record for answer in self._answers]

    def repeats(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the messages repeat an answer of this conversation, and so continue it."""
        return self._longest_answer(messages, tools) is not None

    def end(self, reason: str) -> None:
        """Ends the episode: later requests raise EpisodeOverError with this reason."""
        self._end_message = reason

    async def sample_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> SampledTurn:
        """Samples the model's next turn after these messages.

        Args:
            messages: the whole chat, as the chat template takes it.
            tools: schemas of functions.
            max_tokens: further limit of the turn's tokens.
            stop: strings that end the turn, in addition to those of the run.

        Raises:
            LimitError: the episode has no turn or token left.
            PromptError: the chat template refuses the messages, or the first prompt is too long.
            EpisodeOverError: the episode has ended.
        """
        if self._end_message:
            raise EpisodeOverError(self._end_message)
        limits = self.parts.limits
        if len(self._answers) + self._num_in_flight >= limits.turns:
            self.end_reason = "turns"
            raise LimitError(f"the episode has had its {limits.turns} turns (env.max_steps)", "turns")
        turn = self._next_turn(tuple(messages), tuple(tools))
        room = self._room(turn.context)
        self.end_reason = None
        limit = min(room, limits.turn_tokens or room, max_tokens or room)
        request = self._turn_request(turn.context, limit, stop)
        self._num_in_flight += 1
        started_at = time.perf_counter()
        try:
            (sample,) = await self.parts.sampler.generate(request)
        finally:
            self._num_in_flight -= 1
        if self._end_message:
            raise EpisodeOverError(self._end_message)
        return self._record(turn, sample, started_at, stop, limit == room)

    def _next_turn(self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> _NextTurn:
        """Returns the next turn, which continues an answer or begins with a new prompt."""
        example, answer = self.example, self._longest_answer(messages, tools)
        if answer is not None:
            messages = (*answer.messages, *restore_call_ids(messages, answer.messages))
            suffix = self._suffix(answer, messages)
            if suffix is not None:
                context = (*answer.sequence.context[: answer.end], *suffix)
                return _NextTurn(messages, tools, context, answer, suffix)
        prefill = "" if self._answers else example.prefill
        if prefill == example.prefill and messages == example.messages and tools == example.tools:
            return _NextTurn(messages, tools, self.request.prompt, answer, None, prefill)
        try:
            prompt = self.parts.encoder.encode(replace(example, messages=messages, tools=tools, prefill=prefill))
        except ConfigError as error:
            raise PromptError(str(error)) from error
        return _NextTurn(messages, tools, prompt, answer, None, prefill)

    def _longest_answer(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> RecordedTurn | None:
        """Returns the last answer that the messages repeat; the latest of equal ones."""
        repeated_answers = [
            answer
            for answer in self._answers
            if len(answer.messages) < len(messages)
            and (answer.tools is tools or answer.tools == tools)
            and all(map(are_equal_messages, answer.messages, messages))
        ]
        return max(reversed(repeated_answers), key=lambda answer: len(answer.messages), default=None)

    def _suffix(self, answer: RecordedTurn, messages: tuple[Message, ...]) -> list[int] | None:
        """Encodes what the chat template writes after an answer; None where it rewrites what precedes."""
        tokenizer, ends, sequence = self.parts.encoder.tokenizer, self.parts.encoder.ends, answer.sequence
        last = sequence.context[answer.end - 1]
        end_token = last if answer.record.end > answer.record.start and last in ends else None
        is_branch = answer.end < len(sequence.context)
        chat = GrowingChat(tokenizer, answer.tools) if is_branch else sequence.chat
        try:
            suffix = chat.suffix_ids(answer.messages, messages, end_token)
            if suffix is None and self.parts.append_history:
                suffix = appended_suffix_ids(tokenizer, answer.messages, messages, answer.tools, end_token)
        except ConfigError as error:
            raise PromptError(f"the chat template cannot render the new messages: {error}") from error
        return suffix

    def _room(self, context: tuple[int, ...]) -> int:
        """Returns the number of tokens that the next turn may have.

        The first prompt has a limit of its own; the context of every later turn is at most `max_tokens` longer.
        """
        limits, limit = self.parts.limits, self.request.sampling.max_tokens
        if self._first_prompt is None and len(context) > limits.prompt_tokens:
            raise PromptError(
                f"the first prompt of the episode has {len(context)} tokens, more than env.max_prompt_tokens="
                f"{limits.prompt_tokens}; raise env.max_prompt_tokens, or shorten the first messages"
            )
        room = limit - (len(context) - len(self._first_prompt or context))
        if room <= 0:
            self.end_reason = "length"
            raise LimitError(
                f"the messages have {limit - room} tokens after the first prompt, and an episode has at most {limit} "
                "(env.max_episode_tokens, else inference_model.max_tokens)",
                "length",
            )
        return room

    def _turn_request(self, context: tuple[int, ...], max_tokens: int, stop: Sequence[str]) -> Request:
        """Returns the request of one turn.

        Its seed depends on group, completion and number of the request only, not on what else is generated at the same
        time.
        """
        text = f"{self.request.seed}/{self.row}/{self._num_requests}"
        self._num_requests += 1
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        sampling = self.request.sampling
        stops = tuple(dict.fromkeys((*sampling.stop, *self.parts.limits.turn_ends, *stop)))
        return replace(
            self.request,
            prompt=context,
            n=1,
            sampling=replace(sampling, max_tokens=max_tokens, stop=stops),
            seed=int.from_bytes(digest, "little") >> 1,
        )

    def _record(
        self, turn: _NextTurn, sample: SampledCompletion, started_at: float, stop: Sequence[str], fills_episode: bool
    ) -> SampledTurn:
        """Appends a sampled turn to the sequence that it continues, or to a new sequence."""
        encoder, answer = self.parts.encoder, turn.answer
        self._first_prompt = self._first_prompt or turn.context
        if answer is not None and turn.suffix is not None and answer.end == len(answer.sequence.context):
            sequence = answer.sequence
            sequence.append_replies(turn.suffix)
        else:  # also where a concurrent request has extended the sequence
            sequence = GrowingSequence(turn.context, GrowingChat(encoder.tokenizer, turn.tools))
        prompt_text, start = sequence.decode_context(encoder), len(sequence.sampled_mask)
        sequence.append_sample(sample)
        parsed = self.parts.parser.parse(sample.token_ids, prompt_text, turn.tools, turn.prefill)
        message = _without_stop(parsed.message, stop)
        record, ended_at = Turn(message, start, len(sequence.sampled_mask)), time.perf_counter()
        record.engine_seconds = ended_at - started_at
        record.start_seconds = 0.0 if self._answers else started_at - self._created_at
        self._link_messages(record, turn, started_at)
        self._answers.append(
            RecordedTurn(
                sequence, (*turn.messages, message), turn.tools, len(sequence.context), record, sample.engine, ended_at
            )
        )
        if encoder.control.has_control_tokens(sample.token_ids, encoder.ends):
            self.has_invalid_turn = True
            self.end("the model sampled control tokens inside a turn, which ends the episode")
        is_cut = sample.finish_reason != "stop"
        is_last = self.has_invalid_turn or sample.finish_reason == "abort" or (is_cut and fills_episode)
        if is_last:
            self.end_reason = sample.finish_reason
        return SampledTurn(
            message,
            parsed.malformed,
            sample.finish_reason,
            sample.token_ids,
            sample.log_probs,
            turn.context,
            is_last,
            record,
        )

    def _link_messages(self, record: Turn, turn: _NextTurn, started_at: float) -> None:
        """Records the new messages as replies to an answer, else as opening of the turn."""
        answer, messages = turn.answer, self.example.messages
        if answer is None:
            is_prompt = turn.messages[: len(messages)] == messages
            record.opening = turn.messages[len(messages) :] if is_prompt else turn.messages
        elif answer.record.replies:
            record.opening = turn.messages[len(answer.messages) :]
        else:
            answer.record.replies = turn.messages[len(answer.messages) :]
            answer.record.env_seconds = started_at - answer.ended_at

    def completion(self, finish_reason: FinishReason) -> SampledCompletion:
        """Returns the completion of the turns so far."""
        return join_sequences(self._answers, self.request.prompt, finish_reason)


def _without_stop(message: Message, stop: Sequence[str]) -> Message:
    """Returns a message without the stop string at its end."""
    stop_text = next((text for text in stop if message["content"].endswith(text)), "")
    return message | {"content": message["content"].removesuffix(stop_text)} if stop_text else message
