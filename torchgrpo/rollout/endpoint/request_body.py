"""Checks JSON, types and texts of request bodies."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts with a `text`."""
Warn = Callable[[str, str], None]
"""Function of a setting's name and a message, which logs the message for the first use of the setting."""


class RequestError(Exception):
    """Refusal of a request.

    Args:
        status: HTTP status.
        message: names the value and the remedy.
        param: field of the body.
        code: short name of the reason for programs.
        may_retry: whether the same request may succeed later, so that clients may send it again by themselves.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, may_retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.may_retry = status, message, param, code, may_retry


def bad_request(message: str, param: str | None = None) -> RequestError:
    """Returns the error of a body that cannot be answered."""
    return RequestError(400, message, param)


def parse_json_object(text: bytes | str, place: str, param: str | None = None) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        RequestError: no JSON object, a key that occurs twice, a number beyond a double, a lone surrogate, or objects
            nested too deeply.
    """
    try:
        orjson.loads(text)  # refuses the NaN, infinities, lone surrogates and encodings that `json` accepts
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise bad_request(f"{place} is nested too deeply", param) from None
    except ValueError as error:
        raise bad_request(f"{place} is not valid JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise bad_request(f"{place} is {_kind(value)}; send an object", param)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def read_field(
    body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], expected: str, place: str = ""
) -> Any:
    """Returns a field that may be absent or null.

    kinds: types of valid values; a boolean is no number. expected: the kinds in words. place: path of the body.

    Raises:
        RequestError: a value of another type.
    """
    value = body.get(name)
    is_boolean = isinstance(value, bool) and kinds is not bool
    if value is not None and (is_boolean or not isinstance(value, kinds)):
        raise bad_request(f"{place}{name} is {_kind(value)}; send {expected}", place + name)
    return value


def require_text(body: Mapping[str, Any], name: str, place: str) -> str:
    """Returns a field that must be a text.

    Raises:
        RequestError: no text.
    """
    value: str | None = read_field(body, name, str, "a text", place)
    if value is None:
        raise bad_request(f"{place}{name} is missing; send a text", place + name)
    return value


def read_objects(body: Mapping[str, Any], name: str, place: str = "") -> list[dict[str, Any]]:
    """Returns a list of objects; empty if absent.

    Raises:
        RequestError: no list of objects.
    """
    value: list[Any] = read_field(body, name, list, "a list of objects", place) or []
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise bad_request(f"{place}{name}[{index}] is {_kind(entry)}; send an object", f"{place}{name}")
    return value


def read_content(content: object, place: str) -> str:
    """Returns the text of a message's content.

    content: a text, or a list of text parts, which are joined by newlines.

    Raises:
        RequestError: another type, or a part that is no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place} is {_kind(content)}; send a text or a list of text parts", place)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            described = f"of the type {short_repr(kind)}" if isinstance(part, dict) else _kind(part)
            raise bad_request(f"{place}[{index}] is {described}; the policy reads parts of type text only", place)
        texts.append(require_text(part, "text", f"{place}[{index}]."))
    return "\n".join(texts)


def short_repr(value: object, length: int = 80) -> str:
    """Returns the representation of a client's value, cut to a length."""
    text = repr(value[:length] if isinstance(value, str | list) else value)
    return text if len(text) <= length else text[: length - 3] + "..."


def refuse_fields(body: Mapping[str, Any], remedies: Mapping[str, str], place: str = "") -> None:
    """Refuses fields that are set to more than null, false, zero or an empty value.

    remedies: by name.

    Raises:
        RequestError: such a field.
    """
    for name in body.keys() & remedies.keys():
        if body[name]:
            raise bad_request(f"{place}{name} is not supported: {remedies[name]}", place + name)


def without_fields(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the body without some fields."""
    return {name: value for name, value in body.items() if name not in names}
