"""Translates Anthropic's messages form to chat completions, and the replies back.

Blocks of thoughts, text, tool use and tool results become messages; other kinds of blocks are refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchgrpo.rollout.endpoint.replies import encode_json, encode_named_events
from torchgrpo.rollout.endpoint.request_body import (
    bad_request,
    read_content,
    read_field,
    read_objects,
    require_text,
    short_repr,
    without_fields,
)

_TRANSLATED_FIELDS = ("system", "messages", "tools", "tool_choice", "stop_sequences", "output_config", "metadata")
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of the chat completion request.

    Raises:
        RequestError: a block or tool of another kind.
    """
    chat = without_fields(body, _TRANSLATED_FIELDS) | {"n": 1}
    messages: list[dict[str, Any]] = []
    if (system := read_field(body, "system", (str, list), "a text or text blocks")) is not None:
        messages.append({"role": "system", "content": read_content(system, "system")})
    for index, message in enumerate(read_objects(body, "messages")):
        messages += _chat_messages(message, f"messages[{index}].")
    chat["messages"] = messages
    chat["tools"] = [_chat_tool(tool, f"tools[{index}].") for index, tool in enumerate(read_objects(body, "tools"))]
    if (choice := read_field(body, "tool_choice", dict, "an object")) is not None:
        kind = require_text(choice, "type", "tool_choice.")
        chat["tool_choice"] = _TOOL_CHOICES.get(kind, kind)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    chat["stop"] = body.get("stop_sequences")
    chat["response_format"] = (read_field(body, "output_config", dict, "an object") or {}).get("format")
    return chat


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"{place}type={short_repr(tool['type'])} is not supported: send tools of your own", "tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _chat_messages(message: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """Yields the messages of one message: results of tools first, then the texts."""
    role, content, place = message.get("role"), message.get("content"), place + "content"
    if not isinstance(content, list):
        yield {"role": role, "content": read_content(content, place)}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    has_results = False
    for index, block in enumerate(read_objects(message, "content", place.removesuffix("content"))):
        block_place = f"{place}[{index}]."
        match block.get("type"):
            case "text":
                texts.append(require_text(block, "text", block_place))
            case "thinking":
                thoughts.append(require_text(block, "thinking", block_place))
            case "tool_use":
                arguments = read_field(block, "input", dict, "an object", block_place) or {}
                function = {"name": block.get("name"), "arguments": encode_json(arguments).decode()}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                has_results = True
                result = read_content(block.get("content") or "", block_place + "content")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            case kind:
                raise bad_request(f"{block_place}type={short_repr(kind)} is not supported: send text blocks", place)
    if texts or calls or thoughts or not has_results:
        chat: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if thoughts:
            chat["reasoning_content"] = "\n".join(thoughts)
        yield chat | ({"tool_calls": calls} if calls else {})


def messages_reply(reply: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message form of a chat completion with one choice."""
    (choice,) = reply["choices"]
    message, usage = choice["message"], reply["usage"]
    content: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return {
        "id": reply["id"].replace("chatcmpl", "msg"),
        "type": "message",
        "role": "assistant",
        "model": reply["model"],
        "content": content,
        "stop_reason": _STOP_REASONS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def messages_stream(reply: dict[str, Any], body: Mapping[str, Any]) -> bytes:
    """Returns a reply as server-sent events."""
    return encode_named_events(_events(reply))


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage = reply["usage"] | {"output_tokens": 0}
    yield {"type": "message_start", "message": reply | {"content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(reply["content"]):
        match block["type"]:
            case "thinking":
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                deltas.append({"type": "signature_delta", "signature": ""})
                start = block | {"thinking": ""}
            case "text":
                deltas, start = [{"type": "text_delta", "text": block["text"]}], block | {"text": ""}
            case _:
                arguments = encode_json(block["input"]).decode()
                deltas, start = [{"type": "input_json_delta", "partial_json": arguments}], block | {"input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield from ({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": reply["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}
