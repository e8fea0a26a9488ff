"""Builds the schema of a function for chat templates, from its signature and docstring."""

import inspect
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from config.schema.errors import ConfigError
from envs.user_code import describe_exception

JSON_TYPES = (int, float, str, bool, NoneType, list, tuple, dict, Any)
_NO_DESCRIPTION = "no description"
_EXAMPLE = (
    "write it like `def capital(country: str) -> str:` with a docstring that describes the tool to the model, and "
    "lines `country: its English name` below `Args:`"
)


def function_schema(
    place: str, name: str, function: Callable[..., Any], description: str | None = None
) -> dict[str, Any]:
    """Returns `{"type": "function", "function": {name, description, parameters}}`.

    The description is the docstring up to `Args:`; the lines below `Args:` describe the parameters.

    Args:
        place: config key and value, for messages.
        function: not a method; of a bound method the instance is no parameter.
        description: replaces that of the docstring.

    Raises:
        ConfigError: no docstring, a parameter without annotation, or a type that JSON does not have.
    """
    from transformers.utils.chat_template_utils import get_json_schema, parse_google_format_docstring

    docstring = inspect.getdoc(function) or ""
    own_description, documented, _ = parse_google_format_docstring(docstring.strip())
    text = description or own_description
    if not text:
        raise ConfigError(f"{place}: {name} has no docstring, so the tool has no description; {_EXAMPLE}")
    hints = _parameter_hints(place, name, function)
    lines = [f"    {parameter}: {(documented or {}).get(parameter) or _NO_DESCRIPTION}" for parameter in hints]

    def schema_source() -> None: ...

    schema_source.__name__ = name
    schema_source.__doc__ = "\n".join([text, "", *(["Args:", *lines] if lines else [])])
    schema_source.__annotations__ = hints
    schema_source.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    try:
        schema: dict[str, Any] = get_json_schema(schema_source)
    except Exception as error:  # the library has several exceptions of its own
        raise ConfigError(f"{place}: no schema for {name}: {describe_exception(error)}; {_EXAMPLE}") from error
    for parameter in schema["function"]["parameters"]["properties"].values():
        if parameter.get("description") == _NO_DESCRIPTION:
            del parameter["description"]
    return schema


def _parameter_hints(place: str, name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of the parameters by name.

    Raises:
        ConfigError: a parameter cannot be in a schema.
    """
    try:
        hints = get_type_hints(function)
    except Exception as error:  # an annotation is any expression
        raise ConfigError(f"{place}: the annotations of {name} fail: {describe_exception(error)}") from error
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{place}: {name} takes {parameter}, which has no schema; give every parameter a name of its own"
            )
        if parameter.name not in hints:
            raise ConfigError(f"{place}: the parameter {parameter.name} of {name} has no annotation; {_EXAMPLE}")
        wrong_types = [hint for hint in _leaf_types(hints[parameter.name]) if hint not in JSON_TYPES]
        if wrong_types:
            raise ConfigError(
                f"{place}: the parameter {parameter.name} of {name} has the type {wrong_types[0]}, which JSON does "
                "not have; use str, int, float, bool, list, dict, Literal, or unions of them"
            )
    return {parameter.name: hints[parameter.name] for parameter in parameters}


def _leaf_types(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        return
    if not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from _leaf_types(part)
