"""Tests of the endpoint on a real engine: rows of broken requests, account of turns."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from envs.chat_responses import ResponseParser
from envs.group import Sampling
from tests.group_collection import make_group_rollout
from tests.rollout.recording import RecordingEngine, RecordingRewards, addition_examples
from torchgrpo.rollout.conversation import Conversation, ConversationParts, TurnLimits
from torchgrpo.rollout.endpoint.server import Endpoint
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Response

EPISODES, TURNS, BROKEN = 50, 20, 20
"""1,000 requests, of which every twentieth is broken off."""


class CountingEngine(RecordingEngine):
    """Engine that counts its steps."""

    num_steps = 0

    def step(self, timeout: float = 0.0) -> list[Response]:
        self.num_steps += 1
        return super().step(timeout)


@pytest.fixture
def engine(model: Any) -> CountingEngine:
    return CountingEngine(model)


@pytest.fixture
def loop(engine: CountingEngine) -> Iterator[EngineLoop]:
    started = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    yield started
    started.close()


def make_conversations(loop: EngineLoop, tokenizer: Any, count: int, max_tokens: int) -> list[Conversation]:
    rollout = make_group_rollout(loop, RecordingRewards(), 1, Sampling(max_tokens=max_tokens), tokenizer=tokenizer)
    limits = TurnLimits(prompt_tokens=64, turns=1000, turn_tokens=None, turn_ends=())
    parts = ConversationParts(loop, rollout.encoder, ResponseParser(tokenizer), limits, False)
    return [
        Conversation(parts, example, rollout.make_request(rollout.encoder.encode(example), number), 0)
        for number, example in enumerate(addition_examples(count))
    ]


async def start_request(url: str, key: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Sends a whole request over a connection of its own, and reads nothing."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
    writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return writer


def test_a_broken_request_frees_its_row_within_a_step(loop: EngineLoop, engine: CountingEngine, tokenizer: Any) -> None:
    (conversation,) = make_conversations(loop, tokenizer, 1, max_tokens=200)
    endpoint = Endpoint(conversation.parts.encoder.token_texts)

    async def break_off() -> int:
        await endpoint.start()
        key = endpoint.open_episode(conversation)
        body = {"messages": list(conversation.example.messages)}
        with loop.outside_engine():
            writer = await start_request(endpoint.url, key, body)
            while not engine.in_flight:
                await asyncio.sleep(0)
            num_steps = engine.num_steps
            writer.transport.abort()
            while engine.in_flight:
                await asyncio.sleep(0)
        await endpoint.stop()
        return engine.num_steps - num_steps

    assert loop.run(break_off()) <= 1
    assert conversation.turns == []


def test_a_thousand_requests_lose_nothing(loop: EngineLoop, engine: CountingEngine, tokenizer: Any) -> None:
    """Every turn is a reply that a client received, and the reverse."""
    conversations = make_conversations(loop, tokenizer, EPISODES, max_tokens=4)
    endpoint = Endpoint(conversations[0].parts.encoder.token_texts)
    num_requests = 0

    async def play(session: aiohttp.ClientSession, conversation: Conversation) -> list[list[int]]:
        nonlocal num_requests
        key, received = endpoint.open_episode(conversation), []
        for _ in range(TURNS):
            num_requests += 1
            body = {"messages": list(conversation.example.messages), "return_token_ids": True}
            if num_requests % BROKEN == 0:  # the client repeats a request whose connection broke
                writer = await start_request(endpoint.url, key, body)
                if num_requests % (2 * BROKEN) == 0:
                    while not engine.in_flight:
                        await asyncio.sleep(0)
                writer.transport.abort()
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{endpoint.url}/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                received.append((await reply.json())["choices"][0]["token_ids"])
        endpoint.close_episode(key)
        return received

    async def play_all() -> list[list[list[int]]]:
        await endpoint.start()
        with loop.outside_engine():
            async with aiohttp.ClientSession() as session:
                results = await asyncio.gather(*[play(session, one) for one in conversations])
        await endpoint.stop()
        return results

    received = loop.run(play_all())
    assert num_requests == EPISODES * TURNS and engine.in_flight == 0
    for conversation, ids in zip(conversations, received, strict=True):
        one = conversation.completion("stop")
        assert sorted(one.token_ids[turn.start : turn.end] for turn in one.turns) == sorted(ids)
        assert one.num_sampled_tokens == sum(map(len, ids)) == len(one.token_ids)
