"""Holds replies of the endpoint, and encodes errors and server-sent events."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from torchgrpo.rollout.endpoint.request_body import RequestError

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


@dataclass(frozen=True)
class Reply:
    """Status, body and headers of a reply.

    sampling_s: seconds of sampling its turns.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    sampling_s: float = 0.0

    def response(self) -> web.Response:
        """Returns a new response for one client."""
        return web.Response(status=self.status, body=self.body, headers=self.headers, content_type=self.content_type)


def encode_json(value: object) -> bytes:
    """Encodes JSON.

    Calls and tools may hold integers beyond 64 bits, deep nesting and lone surrogates, which orjson refuses.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def json_reply(value: object, sampling_s: float = 0.0) -> Reply:
    """Returns a successful reply with a JSON value."""
    return Reply(200, encode_json(value), sampling_s=sampling_s)


def error_reply(error: RequestError, headers: Mapping[str, str] | None = None) -> Reply:
    """Returns an error in OpenAI's form.

    headers: further headers.
    """
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    code = error.code or HTTPStatus(error.status).name.lower()
    value = {"message": error.message, "type": kind, "code": code, "param": error.param}
    headers = {**(headers or {}), **({} if error.may_retry else {"x-should-retry": "false"})}
    text = orjson.dumps({"type": "error", "error": value})  # `type` is that of Anthropic's form
    return Reply(error.status, text, headers)


def encode_named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Encodes events as server-sent events with the names of their types."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event)) for event in events)
