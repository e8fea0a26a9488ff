"""Conversation with scripted messages that checks its inputs, and an endpoint that serves it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from envs.group import FinishReason, Turn
from torchgrpo.rollout.conversation import SampledTurn
from torchgrpo.rollout.endpoint.server import Endpoint

DEADLINE_S = 120.0
HELLO = [{"role": "user", "content": "hello"}]
GREETING = {"role": "assistant", "content": "Grüße"}
FIELDS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}


def decode_bytes(ids: list[int]) -> list[str]:
    return [bytes([one]).decode(errors="replace") for one in ids]


def make_turn(message: dict[str, Any], finish_reason: FinishReason = "stop") -> SampledTurn:
    """Returns a sampled turn whose tokens are the bytes of the content."""
    ids = list(message["content"].encode())
    log_probs = [-0.25 * index for index in range(len(ids))]
    record = Turn(message, 0, len(ids))
    return SampledTurn(message, (), finish_reason, ids, log_probs, tuple(range(7)), False, record)


class StrictConversation:
    """Conversation that answers with the same turn, and checks messages and tools.

    Clear `gate` to hold turns in the engine.
    """

    def __init__(self, message: dict[str, Any] = GREETING, finish_reason: FinishReason = "stop") -> None:
        self.message, self.finish_reason = message, finish_reason
        self.error: Exception | None = None
        self.requests: list[SimpleNamespace] = []
        self.num_in_flight = self.num_cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def sample_turn(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> SampledTurn:
        for message in messages:
            check_message(message)
        for tool in tools:
            assert tool.keys() == {"type", "function"}
            assert tool["function"].keys() <= {"name", "description", "parameters"}
        self.requests.append(SimpleNamespace(messages=messages, tools=tools, max_tokens=max_tokens, stop=stop))
        self.num_in_flight += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_in_flight -= 1
        if self.error is not None:
            raise self.error
        return make_turn(self.message, self.finish_reason)


def check_message(message: dict[str, Any]) -> None:
    assert message.keys() <= FIELDS[message["role"]]
    assert all(isinstance(value, str) for name, value in message.items() if name != "tool_calls")
    for call in message.get("tool_calls", ()):
        assert call.keys() == {"id", "type", "function"}
        assert isinstance(call["function"]["arguments"], dict)


@dataclass
class Service:
    """Running endpoint with one open episode."""

    endpoint: Endpoint
    conversation: StrictConversation
    key: str
    http: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return int(self.endpoint.url.split(":")[2].partition("/")[0])

    async def post(
        self, body: object, path: str = "/chat/completions", key: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Posts a body as JSON, or bytes as they are; returns status and reply."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"} | headers
        async with self.http.post(self.endpoint.url + path, data=data, headers=headers) as response:
            return response.status, orjson.loads(await response.read())

    async def send_bytes(self, data: bytes) -> bytes:
        """Sends bytes over a new connection; returns the bytes until it closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), DEADLINE_S)
        finally:
            writer.close()

    async def check_next_request(self) -> None:
        """Checks that the endpoint still answers a good request."""
        status, reply = await self.post({"messages": HELLO})
        assert status == 200
        assert reply["choices"][0]["message"]["content"] == self.conversation.message["content"]


@asynccontextmanager
async def serve(
    conversation: StrictConversation | None = None, deadline_s: float = DEADLINE_S
) -> AsyncIterator[Service]:
    endpoint = Endpoint(decode_bytes, deadline_s=deadline_s)
    await endpoint.start()
    conversation = conversation or StrictConversation()
    async with aiohttp.ClientSession() as http:
        yield Service(endpoint, conversation, endpoint.open_episode(conversation), http)
    await endpoint.stop()


def run_with_service(
    use: Callable[[Service], Coroutine[Any, Any, Any]],
    conversation: Callable[[], StrictConversation] = StrictConversation,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """Runs a coroutine function with a service, under a deadline."""

    async def run() -> Any:
        async with serve(conversation(), deadline_s) as service:
            return await asyncio.wait_for(use(service), DEADLINE_S)

    return asyncio.run(run())


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
