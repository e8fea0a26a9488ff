"""Tests of conversations: which sequence a request extends, branches, concurrency, limits."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from typing import Any

import pytest
import torch

from envs.chat import ChatEncoder
from envs.chat_responses import ResponseParser
from envs.example import Example, Message
from envs.group import FinishReason, SampledCompletion, Sampling
from envs.reward_workers.outcome_counts import OutcomeCounts
from tests.group_collection import make_group_rollout
from tests.rollout.recording import (
    EOS,
    RecordingEngine,
    RecordingRewards,
    addition_examples,
    assert_every_sampled_token_is_trained_once,
)
from torchgrpo.batches.batch import collate
from torchgrpo.monitoring.episode_text import turns_with_new_sequence
from torchgrpo.rollout.conversation import (
    Conversation,
    ConversationParts,
    EpisodeOverError,
    LimitError,
    PromptError,
    TurnLimits,
)
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.episode_player import EpisodePlayer, EpisodeReward
from torchgrpo.training.response_scorer import ResponseScorer

THREE, EIGHT, USER = 25, 30, 4
LIMITS = TurnLimits(prompt_tokens=64, turns=8, turn_tokens=None, turn_ends=())
(EXAMPLE,) = addition_examples(1)
QUESTION: Message = {"role": "user", "content": "again"}


class HeldSampler:
    """Sampler of fixed turns; `release` finishes requests in any order."""

    def __init__(self, *turns: Sequence[int]) -> None:
        self.turns = list(turns)
        self.requests: list[Request] = []
        self.is_held = False
        self.held_requests: list[asyncio.Future[None]] = []

    async def generate(self, request: Request) -> list[SampledCompletion]:
        self.requests.append(request)
        ids = list(self.turns.pop(0))
        if self.is_held:
            self.held_requests.append(asyncio.get_running_loop().create_future())
            await self.held_requests[-1]
        return [SampledCompletion(ids, [-1.0] * len(ids), [3] * len(ids), "stop" if ids[-1:] == [EOS] else "length")]

    def outside_engine(self) -> AbstractContextManager[None]:
        return nullcontext()


def make_conversation(
    tokenizer: Any, sampler: HeldSampler, limits: TurnLimits = LIMITS, append_history: bool = False
) -> Conversation:
    encoder = ChatEncoder(tokenizer)
    parts = ConversationParts(sampler, encoder, ResponseParser(tokenizer), limits, append_history)
    request = Request(0, encoder.encode(EXAMPLE), 4, Sampling(max_tokens=64), seed=5)
    return Conversation(parts, EXAMPLE, request, 0)


def follow_up(answer: Message, *messages: Message) -> list[Message]:
    """Returns the chat of the example with an answer and further messages."""
    return [*EXAMPLE.messages, answer, *messages]


def test_a_chat_in_another_form_extends_the_sequence(tokenizer: Any) -> None:
    conversation = make_conversation(tokenizer, HeldSampler([THREE, EOS], [EIGHT, EOS]))

    async def play() -> None:
        first = await conversation.sample_turn(list(EXAMPLE.messages))
        sent_back = {"content": first.message["content"], "tool_calls": None, "role": "assistant"}
        await conversation.sample_turn(follow_up(sent_back, QUESTION))

    asyncio.run(play())
    one = conversation.completion("stop")
    assert one.sequence_starts == [] and [turn.message["content"] for turn in one.turns] == ["3", "8"]
    assert one.sampled_mask[:2] == [True, True] and one.sampled_mask[-2:] == [True, True]
    assert sum(one.sampled_mask) == 4 and len(one.sampled_mask) > 4
    assert one.turns[0].replies == (QUESTION,) and one.turns[1].opening == ()


def test_a_question_that_is_asked_twice_is_a_branch(tokenizer: Any) -> None:
    sampler = HeldSampler([THREE, EOS], [EIGHT, EOS], [THREE, THREE, EOS])
    conversation = make_conversation(tokenizer, sampler)

    async def play() -> None:
        first = await conversation.sample_turn(EXAMPLE.messages)
        for _ in range(2):
            await conversation.sample_turn(follow_up(first.message, QUESTION))

    asyncio.run(play())
    one = conversation.completion("stop")
    assert one.num_sequences == 2 and one.num_sampled_tokens == 7
    branch = one.sequence_starts[1]
    assert branch.prompt == sampler.requests[2].prompt == sampler.requests[1].prompt
    assert branch.prompt[: len(sampler.requests[0].prompt) + 2] == (*sampler.requests[0].prompt, THREE, EOS)
    assert turns_with_new_sequence(one.turns, one.sequence_starts) == {2}
    assert one.turns[2].opening == (QUESTION,)
    seeds = [request.seed for request in sampler.requests]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_concurrent_requests_the_first_that_ends_extends_the_sequence(
    tokenizer: Any, order: tuple[int, int]
) -> None:
    sampler = HeldSampler([THREE, EOS], [EIGHT, EOS], [THREE, THREE, EOS])
    conversation = make_conversation(tokenizer, sampler)

    async def play() -> None:
        first = await conversation.sample_turn(EXAMPLE.messages)
        sampler.is_held = True
        chat = follow_up(first.message, QUESTION)
        tasks = [asyncio.create_task(conversation.sample_turn(chat)) for _ in range(2)]
        while len(sampler.held_requests) < 2:
            await asyncio.sleep(0)
        for number in order:
            sampler.held_requests[number].set_result(None)
            await tasks[number]

    asyncio.run(play())
    one = conversation.completion("stop")
    assert one.num_sequences == 2 and one.num_sampled_tokens == 7 and len(one.turns) == 3
    extended = one.token_ids[: one.sequence_starts[1].start]
    assert extended[-1] == EOS and len(extended) > 4
    assert one.sequence_starts[1].prompt == sampler.requests[1].prompt
    expected = [[THREE, EOS], *[([EIGHT, EOS], [THREE, THREE, EOS])[i] for i in order]]
    for turn, ids in zip(one.turns, expected, strict=True):
        assert one.token_ids[turn.start : turn.end] == ids


def test_the_sequence_of_the_last_turn_stands_at_the_end(tokenizer: Any) -> None:
    """Two chats of one episode take turns."""
    conversation = make_conversation(tokenizer, HeldSampler([THREE, EOS], [EIGHT, EOS], [THREE, THREE, EOS]))
    other = ({"role": "user", "content": "1+1="},)

    async def play() -> None:
        first = await conversation.sample_turn(EXAMPLE.messages)
        await conversation.sample_turn(other)
        await conversation.sample_turn(follow_up(first.message, QUESTION))

    asyncio.run(play())
    one = conversation.completion("stop")
    assert [one.token_ids[turn.start : turn.end] for turn in one.turns] == [
        [THREE, EOS],
        [EIGHT, EOS],
        [THREE, THREE, EOS],
    ]
    assert one.num_sequences == 2 and one.turns[1].start == 0 and one.turns[2].end == len(one.token_ids)
    assert turns_with_new_sequence(one.turns, one.sequence_starts) == {1}
    assert one.turns[1].opening == other
    decoded = [one]
    ChatEncoder(tokenizer).decode(decoded)
    assert decoded[0].reward_input is not None and decoded[0].reward_input.text == "33"


def test_other_tools_are_another_prompt(tokenizer: Any) -> None:
    conversation = make_conversation(tokenizer, HeldSampler([THREE, EOS], [EIGHT, EOS]))
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}

    async def play() -> None:
        first = await conversation.sample_turn(EXAMPLE.messages)
        await conversation.sample_turn(follow_up(first.message, QUESTION), [tool])

    asyncio.run(play())
    assert conversation.completion("stop").num_sequences == 2


def test_a_cancelled_request_records_nothing(tokenizer: Any) -> None:
    sampler = HeldSampler([THREE, EOS], [EIGHT, EOS], [THREE, THREE, EOS])
    conversation = make_conversation(tokenizer, sampler, TurnLimits(64, 2, None, ()))

    async def play() -> None:
        first = await conversation.sample_turn(EXAMPLE.messages)
        sampler.is_held = True
        task = asyncio.create_task(conversation.sample_turn(follow_up(first.message, QUESTION)))
        while not sampler.held_requests:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        sampler.is_held = False
        await conversation.sample_turn(follow_up(first.message, QUESTION))

    asyncio.run(play())
    one = conversation.completion("stop")
    assert one.num_sequences == 1 and len(one.turns) == 2 and one.token_ids[-3:] == [THREE, THREE, EOS]


def test_limits_and_refusals(tokenizer: Any) -> None:
    async def play() -> None:
        conversation = make_conversation(tokenizer, HeldSampler([THREE, EOS]), TurnLimits(64, 1, None, ()))
        first = await conversation.sample_turn(EXAMPLE.messages)
        with pytest.raises(LimitError, match=r"1 turns \(env.max_steps\)") as turns:
            await conversation.sample_turn(follow_up(first.message, QUESTION))
        assert turns.value.finish_reason == "turns"
        conversation = make_conversation(tokenizer, HeldSampler([THREE, EOS]))
        first = await conversation.sample_turn(EXAMPLE.messages)
        with pytest.raises(LimitError, match=r"at most 64 \(env.max_episode_tokens") as room:
            await conversation.sample_turn(follow_up(first.message, {"role": "user", "content": "1" * 80}))
        assert room.value.finish_reason == "length"
        conversation = make_conversation(tokenizer, HeldSampler([THREE, EOS]))
        with pytest.raises(PromptError, match=r"first prompt .* more than env.max_prompt_tokens=64"):
            await conversation.sample_turn([{"role": "user", "content": "1" * 80}])
        await conversation.sample_turn(EXAMPLE.messages)
        conversation.end("the agent has ended")
        with pytest.raises(EpisodeOverError, match="the agent has ended"):
            await conversation.sample_turn(EXAMPLE.messages)

    asyncio.run(play())


def test_shorter_messages_after_a_refusal_go_on(tokenizer: Any) -> None:
    conversation = make_conversation(tokenizer, HeldSampler([THREE, EOS], [EIGHT, EOS]))

    async def play() -> None:
        first = await conversation.sample_turn(EXAMPLE.messages)
        with pytest.raises(LimitError):
            await conversation.sample_turn(follow_up(first.message, {"role": "user", "content": "1" * 80}))
        assert conversation.end_reason == "length"
        await conversation.sample_turn(follow_up(first.message, QUESTION))
        assert conversation.end_reason is None

    asyncio.run(play())


def test_an_invalid_turn_ends_the_episode(tokenizer: Any) -> None:
    conversation = make_conversation(tokenizer, HeldSampler([USER, THREE, EOS], [EIGHT, EOS]))

    async def play() -> None:
        sampled = await conversation.sample_turn(EXAMPLE.messages)
        assert sampled.is_last and conversation.has_invalid_turn
        with pytest.raises(EpisodeOverError, match="control tokens"):
            await conversation.sample_turn(follow_up(sampled.message, QUESTION))

    asyncio.run(play())


def test_a_stop_string_is_no_part_of_the_message(tokenizer: Any) -> None:
    """The sampled tokens keep it, and the message without it continues the sequence."""
    sampler = HeldSampler([THREE, EIGHT], [EIGHT, EOS])
    conversation = make_conversation(tokenizer, sampler)

    async def play() -> None:
        first = await conversation.sample_turn(EXAMPLE.messages, stop=["8"])
        assert first.message["content"] == "3"
        await conversation.sample_turn(follow_up(first.message, QUESTION))

    asyncio.run(play())
    one = conversation.completion("stop")
    assert sampler.requests[0].sampling.stop == ("8",) and sampler.requests[1].sampling.stop == ()
    assert one.num_sequences == 1 and one.token_ids[:2] == [THREE, EIGHT]


class BranchingDriver:
    """Asks two follow-up questions on one answer, and then goes on with the first."""

    async def play(
        self, conversation: Conversation, example: Example, reward: EpisodeReward, on_end: AsyncExitStack
    ) -> FinishReason:
        first = await conversation.sample_turn(example.messages, max_tokens=5)
        chats = [[*example.messages, first.message, {"role": "user", "content": text}] for text in ("+1", "+2", "+1")]
        answers = await asyncio.gather(*[conversation.sample_turn(chat, max_tokens=4) for chat in chats])
        more = {"role": "user", "content": "?"}
        await conversation.sample_turn([*chats[0], answers[0].message, more], max_tokens=6)
        return "stop"

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Does nothing."""


def test_branches_train_every_sampled_token_once(model: Any, tokenizer: Any) -> None:
    engine = RecordingEngine(model)
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    try:
        rollout = make_group_rollout(loop, RecordingRewards(), 4, Sampling(max_tokens=64), tokenizer=tokenizer)
        parts = ConversationParts(loop, rollout.encoder, ResponseParser(tokenizer), LIMITS, False)
        rollout.player = EpisodePlayer(parts, BranchingDriver(), 600.0, 64, OutcomeCounts(1.0))
        examples = addition_examples(3)
        groups = loop.run_all([rollout.run_group(example, number) for number, example in enumerate(examples)])
    finally:
        loop.close()
    completions = [one for group in groups for one in group.completions]
    assert all(len(one.turns) == 5 and one.num_sequences == 3 for one in completions)
    batch = collate(groups)
    assert_every_sampled_token_is_trained_once(engine, batch)
    with torch.no_grad():
        scored = ResponseScorer(model, True, chunk_size=64)(batch.tokens).log_prob
    mask = batch.tokens.loss_mask
    torch.testing.assert_close(scored[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=1e-4)
