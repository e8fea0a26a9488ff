"""Plays episodes: an engine samples turns, and an environment replies to them.

    reset ─▶ messages ─▶ prompt ids ─▶ engine ─▶ token ids ─▶ parser ─▶ message ─▶ step ─▶ replies, reward
                              ▲                                                       │
                              └── ids that the chat template adds, or a new sequence ◀┘

Every episode is a coroutine with an environment of its own, so a slow episode delays no other episode. A token sequence
is only extended: the template renders the messages before and after the replies, and what it adds is appended to the
sampled ids. Where the second rendering does not begin with the first, a new sequence begins. A failure of a user's
environment is the outcome of its episode and does not end the run.
"""

import asyncio
import hashlib
import logging
import math
import time
from dataclasses import dataclass, field, replace

from config.schema.errors import ConfigError
from envs.chat import ChatEncoder
from envs.chat_responses import ResponseParser
from envs.chat_suffix import GrowingChat, appended_suffix_ids
from envs.environments.episode_environments import EpisodeEnvironments
from envs.environments.interface import Environment, EpisodeError, Step
from envs.environments.replies import first_messages
from envs.example import Example, Message
from envs.group import FinishReason, SampledCompletion, SequenceStart, Turn, Verdict
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.reward_workers.scoring import ScoringResult
from torchgrpo.rollout.engines.interface import Request, Sampler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode; the request's `max_tokens` bounds the tokens after the first prompt.

    prompt_tokens: of the first prompt. turns: of the model. turn_tokens: sampled tokens of a turn, None without a
    limit. turn_ends: strings after which a turn ends. seconds: for the whole episode. alive: episodes at a time.
    """

    prompt_tokens: int
    turns: int
    turn_tokens: int | None
    turn_ends: tuple[str, ...]
    seconds: float
    alive: int


class _Episode:
    """Messages and completion of one episode.

    opening: messages of the environment's reset. context: token ids of the present sequence, its prompt and the tokens
    after it. has_invalid_turn: whether the last turn has control tokens before its end.
    """

    def __init__(
        self, encoder: ChatEncoder, example: Example, prompt: tuple[int, ...], group_prompt: tuple[int, ...]
    ) -> None:
        self.encoder, self.example, self.group_prompt = encoder, example, group_prompt
        self.messages: list[Message] = list(example.messages)
        self.chat = GrowingChat(encoder.tokenizer, example.tools)
        self.first_prompt = self.prompt = prompt
        self.context = list(prompt)
        self.completion = SampledCompletion([], [], [], "stop")
        if prompt != group_prompt:
            self.completion.sequence_starts = [SequenceStart(0, prompt)]
        self.opening: tuple[Message, ...] = ()
        self.components: dict[str, float] = {}
        self.has_reward = self.has_invalid_turn = False
        self._text, self._num_decoded = "", 0

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens of the context after the first prompt, which `max_tokens` bounds."""
        return len(self.context) - len(self.first_prompt)

    def context_text(self) -> str:
        """Returns the text of the context; decodes only tokens that came after the last call."""
        self._text += self.encoder.prompt_text(self.context[self._num_decoded :])
        self._num_decoded = len(self.context)
        return self._text

    def append_sample(self, sample: SampledCompletion) -> None:
        """Appends the sampled tokens of a turn."""
        one = self.completion
        one.token_ids += sample.token_ids
        one.log_probs += sample.log_probs
        one.policy_versions += sample.policy_versions
        one.sampled_mask += [True] * len(sample.token_ids)
        one.engine = sample.engine
        self.context += sample.token_ids

    def append_replies(self, suffix: list[int]) -> None:
        """Appends token ids of the environment, with the policy version of the token before."""
        one = self.completion
        one.token_ids += suffix
        one.log_probs += [0.0] * len(suffix)
        one.policy_versions += one.policy_versions[-1:] * len(suffix)
        one.sampled_mask += [False] * len(suffix)
        self.context += suffix

    def start_sequence(self, prompt: tuple[int, ...]) -> None:
        """Starts a new token sequence with this prompt."""
        one = self.completion
        one.sequence_starts = one.sequence_starts or [SequenceStart(0, self.prompt)]
        one.sequence_starts.append(SequenceStart(len(one.token_ids), prompt))
        self.prompt, self.context = prompt, list(prompt)
        self._text, self._num_decoded = "", 0

    def remove_unanswered_replies(self) -> None:
        """Removes tokens and a sequence after the last sampled token."""
        one = self.completion
        while one.sampled_mask and not one.sampled_mask[-1]:
            for values in (one.token_ids, one.log_probs, one.policy_versions, one.sampled_mask):
                values.pop()
        if len(one.sequence_starts) > 1 and one.sequence_starts[-1].start == len(one.token_ids):
            one.sequence_starts.pop()
        if one.sequence_starts == [SequenceStart(0, self.group_prompt)]:
            one.sequence_starts = []

    def environment_verdict(self) -> Verdict | None:
        """Returns the verdict of the environment; None where the task's reward scores the completion."""
        one = self.completion
        seconds = sum(turn.env_seconds for turn in one.turns)
        if one.finish_reason == "error":
            return Verdict(0.0, self.components, "error", seconds)
        if self.has_reward and self.has_invalid_turn:
            return Verdict(0.0, {"control_tokens": 1.0}, "invalid", seconds)
        if self.has_reward:
            return Verdict(math.fsum(turn.reward for turn in one.turns), self.components, "scored", seconds)
        return Verdict(0.0, {}, "invalid", seconds) if one.finish_reason == "deadline" else None


@dataclass(eq=False)
class EpisodePlayer:
    """Plays the episodes of a run.

    Args:
        parser: parses a turn's tokens to a message with reasoning and tool calls.
        environments: makes the environment of each episode.
        append_history: whether replies are appended where the chat template rewrites earlier messages; otherwise a new
            sequence begins.
        error_counts: counts failures of environments, and raises above `env.max_error_rate`.
    """

    sampler: Sampler
    encoder: ChatEncoder
    parser: ResponseParser
    environments: EpisodeEnvironments
    limits: EpisodeLimits
    append_history: bool
    error_counts: OutcomeCounts
    num_alive: int = 0
    has_logged_failure: bool = False
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.limits.alive)

    async def play(self, request: Request, example: Example, row: int) -> SampledCompletion:
        """Plays one episode and returns its completion, with a verdict if the environment gives rewards.

        request: of the group, with the prompt of the example. row: index of the completion in the group.

        Raises:
            ConfigError: too many environments failed.
        """
        async with self._places:
            self.num_alive += 1
            try:
                return await self._play_with_deadline(request, example, row)
            finally:
                self.num_alive -= 1

    async def _play_with_deadline(self, request: Request, example: Example, row: int) -> SampledCompletion:
        episode = _Episode(self.encoder, example, request.prompt, request.prompt)
        completion, environment = episode.completion, None
        try:
            async with asyncio.timeout(self.limits.seconds) as deadline:
                with self.sampler.outside_engine():
                    environment = await self.environments.make()
                episode = await self._reset(environment, episode, request.prompt)
                completion = episode.completion
                completion.finish_reason = await self._play_turns(environment, episode, request, row)
        except TimeoutError:
            if not deadline.expired():
                raise
            completion.finish_reason = "deadline"
        except EpisodeError as error:
            completion.finish_reason, completion.error = "error", str(error)
            if not self.has_logged_failure:
                self.has_logged_failure = True
                log.warning("the first failure of an environment, whose episode is left out: %s", error)
        finally:
            if environment is not None:
                with self.sampler.outside_engine():
                    await environment.close()
        episode.remove_unanswered_replies()
        completion.verdict = episode.environment_verdict()
        if (verdict := completion.verdict) is not None:
            result = ScoringResult(
                verdict.score, verdict.components, verdict.outcome, verdict.seconds, completion.error
            )
            self.error_counts.add(example, result)
            self.error_counts.check_error_rate()
        return completion

    async def _reset(self, environment: Environment, episode: _Episode, group_prompt: tuple[int, ...]) -> _Episode:
        """Resets the environment; returns the episode with the messages and tools of the observation."""
        with self.sampler.outside_engine():
            observation = await environment.reset(episode.example)
        example = episode.example
        tools = (*example.tools, *(tool for tool in observation.tools if tool not in example.tools))
        messages = first_messages(example.messages, observation)
        if messages == example.messages and tools == example.tools:
            return episode
        example = replace(example, messages=messages, tools=tools)
        started = _Episode(self.encoder, example, _encode(self.encoder, example), group_prompt)
        started.opening = observation.messages
        if len(started.prompt) > self.limits.prompt_tokens:
            raise EpisodeError(
                f"the prompt after reset has {len(started.prompt)} tokens, more than env.max_prompt_tokens="
                f"{self.limits.prompt_tokens}; raise env.max_prompt_tokens, or shorten the messages of reset"
            )
        return started

    async def _play_turns(
        self, environment: Environment, episode: _Episode, request: Request, row: int
    ) -> FinishReason:
        """Plays turns until the episode ends; returns the reason."""
        completion = episode.completion
        for number in range(self.limits.turns):
            room = request.sampling.max_tokens - episode.num_response_tokens
            limit = min(room, self.limits.turn_tokens or room)
            turn_request = self._turn_request(request, row, number, tuple(episode.context), limit)
            started_at, start = time.perf_counter(), len(completion.token_ids)
            (sample,) = await self.sampler.generate(turn_request)
            sampled_at = time.perf_counter()
            prompt_text = episode.context_text()
            episode.append_sample(sample)
            prefill = "" if number else episode.example.prefill
            parsed = self.parser.parse(sample.token_ids, prompt_text, episode.example.tools, prefill)
            turn = Turn(parsed.message, start, len(completion.token_ids), engine_seconds=sampled_at - started_at)
            turn.opening = () if number else episode.opening
            completion.turns.append(turn)
            if self.encoder.control.has_control_tokens(sample.token_ids, self.encoder.ends):
                episode.has_invalid_turn = True
                return sample.finish_reason
            is_cut = sample.finish_reason != "stop"
            notes = {"malformed": list(parsed.malformed)} if parsed.malformed else {}
            with self.sampler.outside_engine():
                step = await environment.step(parsed.message | notes | ({"truncated": True} if is_cut else {}))
            turn.env_seconds = time.perf_counter() - sampled_at
            self._record_step(episode, turn, step)
            if sample.finish_reason == "abort" or (is_cut and limit == room):
                return sample.finish_reason
            if step.ends_episode:
                return "stop"
            if number + 1 == self.limits.turns:
                return "turns"
            if not self._append_replies(episode, parsed.message, step, request.sampling.max_tokens):
                return "length"
        raise AssertionError("a limit of turns is at least 1")

    def _turn_request(
        self, request: Request, row: int, number: int, context: tuple[int, ...], max_tokens: int
    ) -> Request:
        """Returns the request of one turn.

        Its seed depends on group, completion and turn only, not on what else is generated at the same time.
        """
        digest = hashlib.blake2b(f"{request.seed}/{row}/{number}".encode(), digest_size=8).digest()
        stop = (*request.sampling.stop, *self.limits.turn_ends)
        sampling = replace(request.sampling, max_tokens=max_tokens, stop=stop)
        return replace(request, prompt=context, n=1, sampling=sampling, seed=int.from_bytes(digest, "little") >> 1)

    def _record_step(self, episode: _Episode, turn: Turn, step: Step) -> None:
        """Records reward, components and replies of a step."""
        turn.replies, turn.tool_outcomes = step.messages, step.tool_outcomes
        if step.reward is not None:
            turn.reward, episode.has_reward = step.reward, True
        for name, value in step.components.items():
            episode.components[name] = episode.components.get(name, 0.0) + value

    def _append_replies(self, episode: _Episode, message: Message, step: Step, max_tokens: int) -> bool:
        """Extends the token sequence by the replies, or starts a new sequence.

        Returns False, without a change, if no room for a sampled token is left.
        """
        completion, tools = episode.completion, episode.example.tools
        before = [*episode.messages, message]
        is_extended = step.history is None or list(step.history) == before
        after = [*(before if step.history is None else step.history), *step.messages]
        last = completion.token_ids[-1] if completion.token_ids else None
        end_token = last if last in self.encoder.ends else None
        tokenizer = self.encoder.tokenizer
        try:
            suffix = episode.chat.suffix_ids(before, after, end_token) if is_extended else None
            if suffix is None and is_extended and self.append_history:
                suffix = appended_suffix_ids(tokenizer, before, after, tools, end_token)
        except ConfigError as error:
            raise EpisodeError(f"the chat template cannot render the replies of the environment: {error}") from error
        if suffix is None:
            prompt = _encode(self.encoder, replace(episode.example, messages=tuple(after), prefill=""))
            if len(prompt) - len(episode.first_prompt) >= max_tokens:
                return False
            episode.start_sequence(prompt)
        else:
            if episode.num_response_tokens + len(suffix) >= max_tokens:
                return False
            episode.append_replies(suffix)
        episode.messages = after
        return True


def _encode(encoder: ChatEncoder, example: Example) -> tuple[int, ...]:
    """Encodes messages of an episode; messages that the template refuses are the episode's failure."""
    try:
        return encoder.encode(example)
    except ConfigError as error:
        raise EpisodeError(str(error)) from error
