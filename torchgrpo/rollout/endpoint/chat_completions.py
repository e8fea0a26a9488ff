"""Checks chat completion requests, and builds their replies and streams.

The other forms of requests are translated to this one, so that a rule is written once.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.example import Message
from torchgrpo.rollout.conversation import SampledTurn
from torchgrpo.rollout.endpoint.replies import encode_json
from torchgrpo.rollout.endpoint.request_body import (
    Warn,
    bad_request,
    parse_json_object,
    read_content,
    read_field,
    read_objects,
    refuse_fields,
    require_text,
    short_repr,
)

DecodeTokens = Callable[[list[int]], list[str]]
"""Function that returns the text of each token."""
MAX_CHOICES, MAX_STOPS = 128, 16
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role of a request -> role for the chat template."""
_READ_FIELDS = (
    *("messages", "tools", "tool_choice", "n", "logprobs", "stop", "max_tokens", "max_completion_tokens", "stream"),
    *("stream_options", "return_token_ids", "model"),
)
_IGNORED_FIELDS = (
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")
_RUN_SETTING = "set it in the run's configuration"
_DISTRIBUTION_REMEDY = "leave it out; the policy is trained on the distribution that the run samples from"
_REMEDIES = {
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "min_tokens"), _DISTRIBUTION_REMEDY
    ),
    **dict.fromkeys(("ignore_eos", "structured_outputs", "guided_json", "guided_regex"), _DISTRIBUTION_REMEDY),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message"), _RUN_SETTING),
    **dict.fromkeys(("functions", "function_call"), "send `tools` and `tool_choice`"),
    **dict.fromkeys(("echo", "prompt_logprobs", "prediction", "web_search_options"), "leave it out"),
    "audio": "the policy reads and writes text",
    "top_logprobs": "send 0; `logprobs` has the log-probs of the sampled tokens",
    "stop_token_ids": "send the texts as `stop`",
}
_MESSAGE_REMEDIES = dict.fromkeys(("audio", "function_call"), "the policy reads text and tool calls")
_SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "parallel_tool_calls": ((None, True), "leave it out; a reply has the calls that the model wrote"),
    "response_format": ((None, {"type": "text"}), "ask for the format in a message, and check it in the reward"),
    "modalities": ((None, ["text"]), "the policy reads and writes text"),
    "repetition_penalty": ((None, 1), _DISTRIBUTION_REMEDY),
    "tool_choice": ((None, "auto", "none"), "send `auto` or `none`; " + _DISTRIBUTION_REMEDY),
}
"""Name -> supported values, remedy."""


@dataclass(frozen=True)
class ChatRequest:
    """Checked request for chat completions.

    messages, tools: as the chat template takes them. max_tokens: None without a limit.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop: tuple[str, ...]
    n: int
    model: str
    has_log_probs: bool
    has_token_ids: bool


def parse_chat_request(body: Mapping[str, Any], warn: Warn) -> ChatRequest:
    """Checks a request body.

    warn: logs settings without an effect.

    Raises:
        RequestError: a field with a wrong or unsupported value.
    """
    refuse_fields(body, _REMEDIES)
    for name, (values, remedy) in _SUPPORTED_VALUES.items():
        if name in body and body[name] not in values:
            raise bad_request(f"{name}={short_repr(body[name])} is not supported: {remedy}", name)
    for name in body.keys() - {*_READ_FIELDS, *_IGNORED_FIELDS, *_REMEDIES, *_SUPPORTED_VALUES}:
        if body[name] is not None and name in _SAMPLING_FIELDS:
            warn(name, f"agents send {name}, which has no effect: the sampling settings of the run apply")
        elif body[name] is not None:
            warn(name, f"agents send the field {short_repr(name)}, which has no effect")
    for name in ("stream", "logprobs", "return_token_ids"):
        read_field(body, name, bool, "true or false")
    messages = read_objects(body, "messages")
    if not messages:
        raise bad_request("messages is empty; send at least one message", "messages")
    tools = [_parse_tool(tool, f"tools[{index}].") for index, tool in enumerate(read_objects(body, "tools"))]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise bad_request("tools has two functions of one name; rename one", "tools")
    completion_limit, limit = (_read_count(body, name) for name in ("max_completion_tokens", "max_tokens"))
    read_field(read_field(body, "stream_options", dict, "an object") or {}, "include_usage", bool, "true or false")
    n = _read_count(body, "n") or 1
    if n > MAX_CHOICES:
        raise bad_request(f"n={short_repr(n)} is more than {MAX_CHOICES}; send several requests", "n")
    return ChatRequest(
        messages=[_parse_message(message, f"messages[{index}].") for index, message in enumerate(messages)],
        tools=[] if body.get("tool_choice") == "none" else tools,
        max_tokens=completion_limit or limit,
        stop=_parse_stop(body),
        n=n,
        model=read_field(body, "model", str, "a text") or "policy",
        has_log_probs=bool(body.get("logprobs")),
        has_token_ids=bool(body.get("return_token_ids")),
    )


def _read_count(body: Mapping[str, Any], name: str) -> int | None:
    value: int | None = read_field(body, name, int, "a whole number")
    if value is not None and value < 1:
        raise bad_request(f"{name}={short_repr(value)} is less than 1; send at least 1", name)
    return value


def _parse_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = read_field(body, "stop", (str, list), "a text or a list of texts")
    texts = [stop] if isinstance(stop, str) else stop or []
    if not all(isinstance(text, str) and text for text in texts) or len(texts) > MAX_STOPS:
        raise bad_request(f"stop is no list of at most {MAX_STOPS} texts with a character or more", "stop")
    return tuple(texts)


def _parse_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a tool's schema as the chat template takes it, without settings for structured output."""
    function = read_field(tool, "function", dict, "an object", place)
    if tool.get("type") != "function" or function is None:
        raise bad_request(f"{place}type is {short_repr(tool.get('type'))}; send functions", place + "type")
    place += "function."
    schema = {"name": require_text(function, "name", place)}
    if (description := read_field(function, "description", str, "a text", place)) is not None:
        schema["description"] = description
    if (parameters := read_field(function, "parameters", dict, "a JSON schema", place)) is not None:
        schema["parameters"] = parameters
    return {"type": "function", "function": schema}


def _parse_message(message: dict[str, Any], place: str) -> Message:
    """Returns a message as the chat template takes it, with arguments as dictionaries."""
    role = ROLES.get(require_text(message, "role", place))
    if role is None:
        raise bad_request(
            f"{place}role is {short_repr(message['role'])}; send one of {', '.join(ROLES)}", place + "role"
        )
    refuse_fields(message, _MESSAGE_REMEDIES, place)
    calls = read_objects(message, "tool_calls", place)
    content = message.get("content")
    is_empty = content is None and role == "assistant"
    parsed: Message = {"role": role, "content": "" if is_empty else read_content(content, place + "content")}
    if (name := read_field(message, "name", str, "a text", place)) is not None:
        parsed["name"] = name
    if role == "tool":
        parsed["tool_call_id"] = require_text(message, "tool_call_id", place)
    if role != "assistant":
        if calls:
            raise bad_request(f"{place}tool_calls is in a message of the role {role}; only an assistant calls", place)
        return parsed
    for field in ("reasoning_content", "reasoning"):
        if (thoughts := read_field(message, field, str, "a text", place)) is not None:
            parsed.setdefault("reasoning_content", thoughts)
    if calls:
        parsed["tool_calls"] = [_parse_call(call, f"{place}tool_calls[{i}].") for i, call in enumerate(calls)]
    return parsed


def _parse_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    function = read_field(call, "function", dict, "an object", place)
    if call.get("type", "function") != "function" or function is None:
        raise bad_request(f"{place}type is {short_repr(call.get('type'))}; send calls of functions", place + "type")
    text = read_field(function, "arguments", str, "a JSON text", place + "function.")
    place += "function.arguments"
    arguments = parse_json_object(text, place, place) if text else {}
    name = require_text(function, "name", place.removesuffix("arguments"))
    return {"id": require_text(call, "id", place.removesuffix("function.arguments")), "type": "function"} | {
        "function": {"name": name, "arguments": arguments}
    }


def chat_reply(request: ChatRequest, turns: Sequence[SampledTurn], decode: DecodeTokens) -> dict[str, Any]:
    """Returns the reply to a request: one choice for each sampled turn."""
    num_prompt_tokens, num_sampled = len(turns[0].context), sum(len(turn.token_ids) for turn in turns)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [_choice(request, index, turn, decode) for index, turn in enumerate(turns)],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt_tokens + num_sampled,
        },
    }


def _choice(request: ChatRequest, index: int, turn: SampledTurn, decode: DecodeTokens) -> dict[str, Any]:
    calls = turn.message.get("tool_calls") or []
    message: dict[str, Any] = {"role": "assistant", "content": turn.message["content"]}
    if thoughts := turn.message.get("reasoning_content"):
        message["reasoning_content"] = thoughts
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [_call_with_json(call) for call in calls]
    is_cut = turn.finish_reason != "stop"
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": "length" if is_cut else "tool_calls" if calls else "stop",
    }
    if request.has_log_probs:
        choice["logprobs"] = {"content": _log_prob_entries(turn, decode), "refusal": None}
    if request.has_token_ids:
        choice["token_ids"] = turn.token_ids
    return choice


def _call_with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = encode_json(function["arguments"]).decode()
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _log_prob_entries(turn: SampledTurn, decode: DecodeTokens) -> list[dict[str, Any]]:
    """Returns text, bytes and log-prob of each token.

    The bytes of a part of a character are null.
    """
    return [
        {
            "token": text,
            "logprob": log_prob,
            "bytes": None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, log_prob in zip(decode(turn.token_ids), turn.log_probs, strict=True)
    ]


def chat_stream(reply: dict[str, Any], body: Mapping[str, Any]) -> bytes:
    """Returns a reply as server-sent events."""
    head = {name: reply[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    has_usage = (body.get("stream_options") or {}).get("include_usage", False)
    if has_usage:
        head["usage"] = None
    chunks = [
        head | {"choices": [{"index": choice["index"], "logprobs": None, "finish_reason": None} | part]}
        for choice in reply["choices"]
        for part in _choice_parts(choice)
    ]
    if has_usage:
        chunks.append(head | {"choices": [], "usage": reply["usage"]})
    return b"".join(b"data: %b\n\n" % encode_json(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


def _choice_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the changing fields of a choice's chunks."""
    message = choice["message"]
    yield {"delta": {"role": "assistant", "content": ""}}
    if "reasoning_content" in message:
        yield {"delta": {"reasoning_content": message["reasoning_content"]}}
    if message["content"] or choice["logprobs"]:
        yield {"delta": {"content": message["content"] or ""}, "logprobs": choice["logprobs"]}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"delta": {"tool_calls": [{"index": index} | call]}}
    end = {"delta": {}, "finish_reason": choice["finish_reason"]}
    yield end | ({"token_ids": choice["token_ids"]} if "token_ids" in choice else {})
