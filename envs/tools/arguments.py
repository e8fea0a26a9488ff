"""Checks the arguments of a tool call against the tool's schema."""

from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from config.schema.errors import ConfigError

NAME_RULES = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
)
"""Keys of a schema that allow further names."""


class ArgumentCheck:
    """Check of arguments against a JSON schema.

    Args:
        place: config key and value, for messages.
        schema: `{"type": "function", "function": {...}}`.

    Raises:
        ConfigError: the parameters are no JSON schema of an object.
    """

    def __init__(self, place: str, schema: dict[str, Any]) -> None:
        self.parameters = schema["function"]["parameters"]
        kind = validator_for(self.parameters, default=Draft202012Validator)
        try:
            kind.check_schema(self.parameters)
        except SchemaError as error:
            name = schema["function"]["name"]
            raise ConfigError(f"{place}: the parameters of {name} are no JSON schema: {error.message}") from error
        # An empty registry fetches no schema from the network.
        self.validator = kind(_with_null(_without_other_names(self.parameters)), registry=Registry())

    def problem(self, arguments: Any) -> str | None:
        """Returns a sentence on the first problem of the arguments, or None."""
        if not isinstance(arguments, dict):
            return f"the arguments must be an object, but are {type(arguments).__name__}"
        try:
            error = best_match(self.validator.iter_errors(arguments))
            if error is None:
                return None
            place = ".".join(map(str, error.absolute_path))
            return f"argument {place}: {error.message}" if place else error.message
        except RecursionError:
            return "the arguments are nested too deeply"
        except Unresolvable:  # the schema refers to another one; the server checks its arguments itself
            return None


def _without_other_names(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters as a schema that allows no names but its own.

    A schema that combines others, or says which other names it allows, stays as it is.
    """
    if "properties" not in parameters or not parameters.keys().isdisjoint(NAME_RULES):
        return parameters
    return parameters | {"additionalProperties": False}


def _with_null(schema: Any) -> Any:
    """Returns a schema in which `nullable`, a word of chat templates, allows null."""
    if isinstance(schema, list):
        return [_with_null(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: _with_null(part) for key, part in schema.items()}
    return {"anyOf": [parts, {"type": "null"}]} if schema.get("nullable") is True else parts
