"""Tests of the fields of requests: read, overruled and refused ones."""

from typing import Any

import orjson
import pytest

from tests.log_capture import LogCapture
from tests.rollout.endpoint.strict_conversation import HELLO, Service, StrictConversation, run_with_service

TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def call(arguments: object = "{}", **fields: object) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}} | fields


def assistant(*calls: object, **fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


REFUSED_FIELDS = [
    ({"frequency_penalty": 0.5}, "distribution"),
    ({"presence_penalty": -1}, "distribution"),
    ({"repetition_penalty": 1.1}, "distribution"),
    ({"logit_bias": {"5": 100}}, "distribution"),
    ({"response_format": {"type": "json_object"}}, "check it in the reward"),
    ({"tool_choice": "required"}, "send `auto` or `none`"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "send `auto` or `none`"),
    ({"parallel_tool_calls": False}, "leave it out"),
    ({"functions": [FUNCTION]}, "send `tools`"),
    ({"modalities": ["text", "audio"]}, "reads and writes text"),
    ({"audio": {"voice": "alloy"}}, "reads and writes text"),
    ({"top_logprobs": 5, "logprobs": True}, "send 0"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "run's configuration"),
    ({"n": 0}, "at least 1"),
    ({"n": 10**9}, "more than 128"),
    ({"n": True}, "a whole number"),
    ({"n": 1.0}, "a whole number"),
    ({"max_tokens": -5}, "at least 1"),
    ({"max_completion_tokens": 0}, "at least 1"),
    ({"max_tokens": "10"}, "a whole number"),
    ({"stop": ""}, "with a character"),
    ({"stop": ["a"] * 17}, "at most 16"),
    ({"stop": [1]}, "list of at most"),
    ({"stream": "yes"}, "true or false"),
    ({"stream_options": []}, "an object"),
    ({"logprobs": 3}, "true or false"),
    ({"model": 5}, "send a text"),
    ({"tools": {"add": FUNCTION}}, "list of objects"),
    ({"tools": [None]}, "send an object"),
    ({"tools": [{"type": "web_search"}]}, "send functions"),
    ({"tools": [{"type": "function", "function": {}}]}, "name is missing"),
    ({"tools": [TOOL, TOOL]}, "rename one"),
    ({"messages": None}, "at least one"),
    ({"messages": "hello"}, "list of objects"),
    ({"messages": ["hello"]}, "send an object"),
    ({"messages": [{"content": "a"}]}, "role is missing"),
    ({"messages": [{"role": "system\n", "content": "a"}]}, "send one of"),
    ({"messages": [{"role": "function", "content": "a"}]}, "send one of"),
    ({"messages": [{"role": "user"}]}, "send a text"),
    ({"messages": [{"role": "user", "content": 5}]}, "send a text"),
    ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "send a text"),
    ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "'image_url'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is missing"),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "send a text"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [call()]}]}, "only an assistant"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "tool_call_id is missing"),
    ({"messages": [assistant(call("{"))]}, "not valid JSON"),
    ({"messages": [assistant(call("[1]"))]}, "send an object"),
    ({"messages": [assistant(call('{"a": 1, "a": 2}'))]}, "same key twice"),
    ({"messages": [assistant(call({"a": 1}))]}, "a JSON text"),
    ({"messages": [assistant(call(), reasoning=1)]}, "send a text"),
    ({"messages": [assistant(call(type="custom"))]}, "calls of functions"),
    ({"messages": [assistant(call(id=None))]}, "id is missing"),
    ({"messages": [assistant(audio={"id": "a"})]}, "text and tool calls"),
]


@pytest.mark.parametrize(("fields", "remedy"), REFUSED_FIELDS)
def test_a_field_without_support_is_refused_with_a_remedy(fields: dict[str, Any], remedy: str) -> None:
    async def use(service: Service) -> Any:
        async with service.http.post(
            service.endpoint.url + "/chat/completions",
            json={"messages": HELLO} | fields,
            headers={"Authorization": f"bearer {service.key}"},
        ) as response:
            assert response.headers["x-should-retry"] == "false"
            status, reply = response.status, await response.json()
        assert not service.conversation.requests
        await service.check_next_request()
        return status, reply["error"]

    status, error = run_with_service(use)
    assert status == 400
    assert remedy in error["message"]
    assert error.keys() == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0] in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}},
        {"tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0, "functions": None, "audio": None},
        {"user": "u", "store": False, "metadata": {"a": "b"}, "model": "gpt", "n": 1, "stop": None, "tools": None},
    ],
)
def test_neutral_values_are_accepted_without_a_warning(fields: dict[str, Any], log_capture: LogCapture) -> None:
    async def use(service: Service) -> None:
        status, reply = await service.post({"messages": HELLO} | fields)
        assert status == 200, reply

    run_with_service(use)
    assert "no effect" not in log_capture.text


def test_sampling_settings_of_agents_are_overruled_and_logged_once(log_capture: LogCapture) -> None:
    async def use(service: Service) -> None:
        for temperature in (0.1, 0.2):
            body = {"messages": HELLO, "temperature": temperature, "top_p": 1, "seed": None, "verbosity": "low"}
            assert (await service.post(body))[0] == 200
        for index in range(200):
            assert (await service.post({"messages": HELLO, f"field\n{index}": 1}))[0] == 200

    run_with_service(use)
    lines = [line for line in log_capture.messages if "no effect" in line]
    assert sum("temperature" in line for line in lines) == 1
    assert sum("top_p" in line for line in lines) == 1
    assert not any("seed" in line for line in lines)
    assert len(lines) == 32
    assert not any("\n" in line for line in lines)


def test_messages_reach_the_conversation_in_the_form_of_chat_templates() -> None:
    messages = [
        {"role": "developer", "content": [TEXT, TEXT]},
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "content": "b", "reasoning": "r", "refusal": None, "annotations": []},
        assistant(call(""), call('{"x": [1, null]}'), reasoning_content="first", reasoning="second"),
        {"role": "tool", "tool_call_id": "c", "content": [TEXT]},
    ]

    async def use(service: Service) -> Any:
        status, reply = await service.post({"messages": messages, "tools": [TOOL]})
        assert status == 200, reply
        return service.conversation.requests[0].messages

    parsed = run_with_service(use)
    assert parsed[0] == {"role": "system", "content": "a\na"}
    assert parsed[1] == {"role": "user", "content": "a", "name": "ann"}
    assert parsed[2] == {"role": "assistant", "content": "b", "reasoning_content": "r"}
    assert parsed[3] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "first",
        "tool_calls": [call({}), call({"x": [1, None]})],
    }
    assert parsed[4] == {"role": "tool", "tool_call_id": "c", "content": "a"}


@pytest.mark.parametrize("value", [2**70, "\ud800"])
@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_with_values_that_orjson_refuses(value: Any, path: str, stream: bool) -> None:
    """The model may write such calls."""
    message = {"role": "assistant", "content": "", "tool_calls": [call({"a": value})]}

    async def use(service: Service) -> None:
        body = {"model": "m", "messages": HELLO, "input": HELLO, "max_tokens": 9, "stream": stream}
        headers = {"Authorization": f"Bearer {service.key}"}
        async with service.http.post(service.endpoint.url + path, json=body, headers=headers) as response:
            text = await response.text()
        assert response.status == 200 and str(value).encode("ascii", "backslashreplace").decode() in text
        assert service.endpoint.close_episode(service.key) is None

    run_with_service(use, lambda: StrictConversation(message))


@pytest.mark.parametrize("value", [str(2**70), "[" * 300 + "]" * 300])
def test_requests_with_values_that_orjson_cannot_write(value: str) -> None:
    use_of_tool = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "VALUE"}}
    tool = {"type": "function", "name": "f", "parameters": {"a": "VALUE"}}
    bodies = {
        "/messages": {"messages": [{"role": "assistant", "content": [use_of_tool]}]},
        "/responses": {"input": "hello", "tools": [tool]},
    }

    async def use(service: Service) -> None:
        for path, body in bodies.items():
            data = orjson.dumps(body).replace(b'"VALUE"', value.encode())
            headers = {"Authorization": f"Bearer {service.key}"}
            async with service.http.post(service.endpoint.url + path, data=data, headers=headers) as response:
                assert response.status == 200
        assert service.endpoint.close_episode(service.key) is None

    run_with_service(use)


def test_the_messages_form_serves_a_conversation_with_tools() -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
    message = {"role": "assistant", "content": "Well,", "reasoning_content": "I add.", "tool_calls": [call({"a": 1})]}

    async def use(service: Service) -> Any:
        body = {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": HELLO, "tools": [tool]}
        keys = {"Authorization": "", "x-api-key": service.key}
        status, first = await service.post(body, "/messages", **keys)
        assert status == 200, first
        result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}
        messages = [
            *HELLO,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, TEXT]},
        ]
        body |= {"messages": messages, "tool_choice": {"type": "none"}, "stop_sequences": ["x"]}
        assert (await service.post(body, "/messages", **keys))[0] == 200
        status, error = await service.post(body | {"tool_choice": {"type": "any"}}, "/messages", **keys)
        assert (status, error["type"], error["error"]["param"]) == (400, "error", "tool_choice")
        for bad in ({"type": "image", "source": {}}, {"type": "text"}, {"type": "tool_use", "id": "c"}):
            status, error = await service.post({"messages": [{"role": "user", "content": [bad]}]}, "/messages", **keys)
            assert status == 400
        return first, service.conversation.requests

    first, requests = run_with_service(use, lambda: StrictConversation(message))
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["content"][2]["input"] == {"a": 1}
    assert (first["stop_reason"], first["usage"]) == ("tool_use", {"input_tokens": 7, "output_tokens": 5})
    assert requests[0].messages == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (requests[0].max_tokens, requests[1].stop, requests[1].tools) == (9, ("x",), [])
    assert requests[0].tools[0]["function"] == {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert requests[1].messages[2] == message
    assert requests[1].messages[3:] == [
        {"role": "tool", "tool_call_id": "c", "content": "a"},
        {"role": "user", "content": "a"},
    ]


def test_a_stream_of_the_messages_form_has_its_events() -> None:
    async def use(service: Service) -> Any:
        async with service.http.post(
            service.endpoint.url + "/messages",
            json={"messages": HELLO, "stream": True, "max_tokens": 5},
            headers={"x-api-key": service.key},
        ) as response:
            assert response.content_type == "text/event-stream"
            return [line.removeprefix("event: ") for line in (await response.text()).split("\n") if "event: " in line]

    message = {"role": "assistant", "content": "a", "tool_calls": [call({})]}
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert run_with_service(use, lambda: StrictConversation(message)) == [
        "message_start",
        *block,
        *block,
        "message_delta",
        "message_stop",
    ]
