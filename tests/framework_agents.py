"""Agents of public clients in tests, given as `env.agent=tests.framework_agents:NAME`."""

import math
from typing import Any

import openai
import orjson

from envs.example import Example
from tests.run_agents import MUL


async def stream_products(example: Example) -> None:
    """Plays as the environment `products_by_tool`, by streams of an asynchronous client."""
    messages: list[Any] = list(example.messages)
    async with openai.AsyncOpenAI() as client:
        calls = await _stream_turn(client, messages)
        if calls:
            await _stream_turn(client, messages)


async def _stream_turn(client: openai.AsyncOpenAI, messages: list[Any]) -> list[Any]:
    """Appends a turn and the results of its calls; returns the calls."""
    stream = await client.chat.completions.create(model="policy", messages=messages, tools=[MUL], stream=True)
    text, calls, reason = "", [], None
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        calls += [call.model_dump(include={"id", "type", "function"}) for call in choice.delta.tool_calls or ()]
        reason = choice.finish_reason or reason
    assert reason == ("tool_calls" if calls else "stop")
    messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
    for call in calls:
        product = math.prod(orjson.loads(call["function"]["arguments"]).values())
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(product)})
    return calls
