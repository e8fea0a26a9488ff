"""Translates OpenAI's stateless responses form to chat completions, and the replies back."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchgrpo.rollout.endpoint.replies import encode_named_events
from torchgrpo.rollout.endpoint.request_body import (
    bad_request,
    read_content,
    read_field,
    read_objects,
    refuse_fields,
    short_repr,
    without_fields,
)

_TRANSLATED_FIELDS = ("input", "instructions", "tools", "max_output_tokens", "text", "include", "truncation", "n")
_STATELESS = "send all items as `input`; the endpoint stores no responses"
_REMEDIES = dict.fromkeys(("previous_response_id", "conversation", "prompt", "background"), _STATELESS)


def responses_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of the chat completion request.

    Raises:
        RequestError: a stored conversation, or an item or tool of another kind.
    """
    refuse_fields(body, _REMEDIES)
    chat = without_fields(body, (*_TRANSLATED_FIELDS, *_REMEDIES))
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    instructions = read_field(body, "instructions", str, "a text")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    is_text = isinstance(body.get("input"), str)
    items = [{"role": "user", "content": body["input"]}] if is_text else read_objects(body, "input")
    chat["messages"] = messages + _chat_messages(items)
    chat["tools"] = [_chat_tool(tool, f"tools[{index}].") for index, tool in enumerate(read_objects(body, "tools"))]
    chat["response_format"] = (read_field(body, "text", dict, "an object") or {}).get("format")
    return chat


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f"{place}type={short_repr(tool.get('type'))} is not supported: send functions", "tools")
    return {"type": "function", "function": without_fields(tool, ("type",))}


def _chat_messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages of input items.

    Thoughts, text and calls of one turn are items of their own.
    """
    messages: list[dict[str, Any]] = []

    def last_turn(*later_fields: str) -> dict[str, Any]:
        """Returns the assistant's message that an item extends, without the fields that follow the item's."""
        if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & set(later_fields):
            messages.append({"role": "assistant"})
        return messages[-1]

    for index, item in enumerate(items):
        place = f"input[{index}]."
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                content = read_content(item.get("content"), place + "content")
                last_turn("content", "tool_calls")["content"] = content
            case "message":
                messages.append(
                    {"role": item.get("role"), "content": read_content(item.get("content"), place + "content")}
                )
            case "reasoning":
                parts = [*read_objects(item, "content", place), *read_objects(item, "summary", place)]
                texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
                last_turn("content", "tool_calls", "reasoning_content")["reasoning_content"] = "\n".join(texts)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                last_turn().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = read_content(item.get("output"), place + "output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case kind:
                raise bad_request(f"{place}type={short_repr(kind)} is not supported: send messages and calls", "input")
    return messages


def responses_reply(reply: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the responses form of a chat completion with one choice."""
    (choice,) = reply["choices"]
    message, usage, identity = choice["message"], reply["usage"], reply["id"].removeprefix("chatcmpl-")
    status = "incomplete" if choice["finish_reason"] == "length" else "completed"
    output: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        thoughts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        output.append({"id": f"rs_{identity}", "type": "reasoning", "summary": [], "content": thoughts})
    if message["content"]:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "status": status}
        output.append(head | {"content": [part]})
    for index, call in enumerate(message.get("tool_calls", ())):
        head = {"id": f"fc_{identity}_{index}", "type": "function_call", "call_id": call["id"], "status": "completed"}
        output.append(head | call["function"])
    num_tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    details = {"output_tokens_details": {"reasoning_tokens": 0}}
    details["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": reply["created"],
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": reply["model"],
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {"total_tokens": usage["total_tokens"], **num_tokens, **details},
    }


def responses_stream(reply: dict[str, Any], body: Mapping[str, Any]) -> bytes:
    """Returns a reply as server-sent events."""
    return encode_named_events(event | {"sequence_number": number} for number, event in enumerate(_events(reply)))


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = reply | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": start}
    for index, item in enumerate(reply["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            yield _item("added", index, item | {"arguments": "", "status": "in_progress"})
            yield {"type": "response.function_call_arguments.delta", "delta": arguments} | place
            yield {"type": "response.function_call_arguments.done", "arguments": arguments, "name": name} | place
        else:
            (part,) = item["content"]
            place |= {"content_index": 0}
            text, kind = {"logprobs": []} | place, part["type"]
            yield _item("added", index, item | {"content": []})
            yield {"type": "response.content_part.added", "part": part | {"text": ""}} | place
            yield {"type": f"response.{kind}.delta", "delta": part["text"]} | text
            yield {"type": f"response.{kind}.done", "text": part["text"]} | text
            yield {"type": "response.content_part.done", "part": part} | place
        yield _item("done", index, item)
    yield {"type": f"response.{reply['status']}", "response": reply}


def _item(event: str, index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"response.output_item.{event}", "output_index": index, "item": item}
