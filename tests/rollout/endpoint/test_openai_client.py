"""Tests of the endpoint with the clients of the openai package."""

import asyncio
from typing import Any

import openai
import pytest

from tests.rollout.endpoint.strict_conversation import HELLO, Service, StrictConversation, run_with_service
from torchgrpo.rollout.conversation import EpisodeOverError, LimitError, PromptError

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
CALLING = {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True},
}


def client(service: Service, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=service.endpoint.url, api_key=service.key, **options)


def test_a_synchronous_client_gets_replies_and_models() -> None:
    def ask(service: Service) -> tuple[Any, Any]:
        with openai.OpenAI(base_url=service.endpoint.url, api_key=service.key) as sync:
            return sync.chat.completions.create(model="m", messages=HELLO), sync.models.list()

    async def use(service: Service) -> Any:
        return await asyncio.to_thread(ask, service)

    reply, models = run_with_service(use)
    assert reply.choices[0].message.content == "Grüße"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "m"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 7, 14)
    assert [model.id for model in models] == ["policy"]


def test_a_stream_has_the_parts_of_the_reply() -> None:
    async def use(service: Service) -> list[Any]:
        async with client(service) as api:
            stream = await api.chat.completions.create(
                model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True
            )
            return [chunk async for chunk in stream]

    chunks = run_with_service(use)
    *parts, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == "Grüße"
    assert [chunk.choices[0].finish_reason for chunk in parts][-1] == "stop"
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in parts if chunk.choices[0].logprobs) == 7
    assert not last.choices
    assert last.usage.total_tokens == 14
    assert len({chunk.id for chunk in chunks}) == 1


def test_tool_calls_and_thoughts_go_out_and_come_back() -> None:
    async def use(service: Service) -> Any:
        async with client(service) as api:
            first = await api.chat.completions.create(model="m", messages=HELLO, tools=[TOOL])
            stream = await api.chat.completions.create(model="m", messages=HELLO, tools=[TOOL], stream=True)
            chunks = [chunk async for chunk in stream]
            message = first.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
            await api.chat.completions.create(
                model="m", messages=[*HELLO, message.model_dump(), result], tools=[TOOL], tool_choice="none"
            )
        return first, chunks, service.conversation.requests

    first, chunks, requests = run_with_service(use, lambda: StrictConversation(CALLING))
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    assert first.choices[0].message.reasoning_content == "I add."
    assert first.choices[0].message.tool_calls[0].function.arguments == '{"a":1,"b":"ü"}'
    (streamed,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert streamed.function.arguments == '{"a":1,"b":"ü"}'
    assert requests[0].tools[0]["function"] == {
        key: TOOL["function"][key] for key in ("name", "description", "parameters")
    }
    assert requests[2].messages[1] == CALLING
    assert requests[2].messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    assert requests[2].tools == []


def test_choices_log_probs_token_ids_and_limits() -> None:
    async def use(service: Service) -> Any:
        async with client(service) as api:
            reply = await api.chat.completions.create(
                model="m",
                messages=HELLO,
                n=3,
                tools=[TOOL],
                logprobs=True,
                stop="\n",
                max_tokens=9,
                max_completion_tokens=5,
                extra_body={"return_token_ids": True},
            )
        return reply, service.conversation.requests

    reply, requests = run_with_service(use)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage.completion_tokens == 21
    assert len(requests) == 3
    assert (requests[0].max_tokens, requests[0].stop) == (5, ("\n",))
    for choice in reply.choices:
        entries = choice.logprobs.content
        assert choice.token_ids == list("Grüße".encode())
        assert [entry.logprob for entry in entries] == [-0.25 * index for index in range(7)]
        assert (entries[0].token, entries[0].bytes) == ("G", [71])
        assert entries[2].bytes is None  # half of a character


def test_a_cut_turn_ends_with_length() -> None:
    async def use(service: Service) -> Any:
        async with client(service) as api:
            return await api.chat.completions.create(model="m", messages=HELLO)

    reply = run_with_service(use, lambda: StrictConversation(CALLING, "length"))
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls


@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (LimitError("the episode has had its 3 turns (env.max_steps)", "turns"), openai.RateLimitError, 429),
        (PromptError("the chat template refuses two users"), openai.BadRequestError, 400),
        (EpisodeOverError("the episode is over"), openai.APIStatusError, 410),
        (RuntimeError("/home/secret/path"), openai.InternalServerError, 500),
    ],
)
def test_errors_of_a_conversation_are_statuses_that_the_client_does_not_retry(
    error: Exception, expected: type[Exception], status: int
) -> None:
    async def use(service: Service) -> Any:
        service.conversation.error = error
        async with client(service) as api:
            with pytest.raises(expected) as caught:
                await api.chat.completions.create(model="m", messages=HELLO)
        return caught.value, service.conversation.requests

    caught, requests = run_with_service(use)
    assert caught.status_code == status
    assert len(requests) == 1
    assert ("secret" in str(caught)) is False
    assert status == 500 or str(error) in caught.message


def test_the_responses_form_serves_a_conversation_with_tools() -> None:
    tool = {"type": "function"} | TOOL["function"]

    async def use(service: Service) -> Any:
        async with client(service) as api:
            first = await api.responses.create(
                model="m", input="hello", instructions="Be brief.", tools=[tool], max_output_tokens=5
            )
            items = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in first.output)]
            items.append({"type": "function_call_output", "call_id": "call_1", "output": "2"})
            await api.responses.create(model="m", input=items, instructions="Be brief.", tools=[tool])
            async with api.responses.stream(model="m", input="hello") as stream:
                events = [event async for event in stream]
            final = await stream.get_final_response()
        return first, events, final, service.conversation.requests

    message = CALLING | {"content": "Well,"}
    first, events, final, requests = run_with_service(use, lambda: StrictConversation(message))
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "Well,"
    assert first.output[2].call_id == "call_1"
    assert first.status == "completed"
    assert requests[0].messages == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert requests[0].max_tokens == 5
    assert requests[0].tools[0]["function"]["name"] == "add"
    assert requests[1].messages[2] == message
    assert requests[1].messages[3] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    assert events[0].type == "response.created"
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["Well,"]
    assert final.output_text == "Well,"
    assert final.output[2].arguments == '{"a":1,"b":"ü"}'


def test_the_responses_form_refuses_what_needs_a_store() -> None:
    async def use(service: Service) -> Any:
        async with client(service) as api:
            with pytest.raises(openai.BadRequestError, match="stores no responses"):
                await api.responses.create(model="m", input="hello", previous_response_id="resp_1")
            with pytest.raises(openai.BadRequestError, match="send functions"):
                await api.responses.create(model="m", input="hello", tools=[{"type": "web_search"}])

    run_with_service(use)
