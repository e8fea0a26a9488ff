"""Reads function calls in the texts that models write: JSON objects, `name{...}` and Python calls."""

import ast
import json
import re
import warnings
from typing import Any

_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?\s*(?=\{)")
_SEPARATORS = " \t\r\n,;"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class MalformedCallError(ValueError):
    """A call cannot be read; the message is a text for the model."""


MAX_ARGUMENT_DEPTH = 64
"""Largest nesting of arguments, well within the recursion limits of JSON libraries and copies."""


def read_calls(text: str) -> tuple[list[Any], str]:
    """Reads the calls at the beginning of a text.

    The calls are JSON objects or lists of them, `name{...}` or `name[ARGS]{...}`, or Python calls with literal keyword
    arguments, one in a line or all in a list. Nothing is executed.

    Returns:
        Call objects for `check_call`, and the text behind the calls.

    Raises:
        MalformedCallError: there is no call at the beginning.
    """
    calls: list[Any] = []
    rest = text.strip(_SEPARATORS)
    while rest:
        named = _NAME_PATTERN.match(rest)
        start = named.end() if named else 0
        if rest[start] not in "[{":
            break
        try:
            value, stop = json.JSONDecoder().raw_decode(rest, start)
        except (ValueError, RecursionError) as error:
            if rest[0] == "[" and not calls:
                break  # a list of Python calls
            raise MalformedCallError(_json_reason(error)) from error
        if named:
            value = {"name": named["name"], "arguments": value, "id": named["id"]}
        calls += value if isinstance(value, list) else [value]
        rest = rest[stop:].lstrip(_SEPARATORS)
    return (calls, rest) if calls else (_python_calls(rest), "")


def check_call(call: Any) -> dict[str, Any]:
    """Returns a call as `{"name": str, "arguments": dict}`, with `id` if the call has one.

    Raises:
        MalformedCallError: the call has no name, or its arguments are no object or nested too deep.
    """
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"] | {key: call[key] for key in ("id",) if key in call}
    elif isinstance(call, dict) and "name" not in call and not isinstance(call.get("function", ""), str):
        call = call["function"]
    if not isinstance(call, dict):
        raise MalformedCallError(f"a call is an object with a name and arguments, not {_kind(call)}")
    name = call.get("name", call.get("function"))
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError("the call has no name")
    name = name.strip()
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise MalformedCallError(f"the arguments of {name}: {_json_reason(error)}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"the arguments of {name} are {_kind(arguments)}, not an object")
    if _is_deeper_than(MAX_ARGUMENT_DEPTH, arguments):
        raise MalformedCallError(f"the arguments of {name} are nested deeper than {MAX_ARGUMENT_DEPTH} levels")
    identity = call.get("id")
    return {"name": name, "arguments": arguments} | ({"id": identity} if isinstance(identity, str) else {})


def _is_deeper_than(limit: int, value: Any) -> bool:
    level = [value]
    for _ in range(limit):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in containers for child in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def _python_calls(text: str) -> list[dict[str, Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the text is the model's: an unknown escape is no news for the user
            lines = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCallError(f"the call is neither JSON nor a Python call ({_reason(error)})") from error
    values = [line.value for line in lines if isinstance(line, ast.Expr)]
    nodes = [node for value in values for node in (value.elts if isinstance(value, ast.List) else [value])]
    if not nodes or len(values) < len(lines):
        raise MalformedCallError("the text is not a list of calls")
    return [_python_call(node) for node in nodes]


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise MalformedCallError("the text is not a list of calls")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise MalformedCallError(f"the arguments of {name} must have names: {name}(key=value)")
    try:
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
        return {"name": name, "arguments": json.loads(json.dumps(arguments))}
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedCallError(f"the arguments of {name} must be literal values") from error


def _literal(node: ast.expr) -> Any:
    """Evaluates a literal; `true`, `false` and `null` are as in JSON."""
    with_json_names = _JsonNames().visit(node)
    return ast.literal_eval(with_json_names)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _json_reason(error: Exception) -> str:
    return f"this is not valid JSON ({_reason(error)})"


def _reason(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    if isinstance(error, SyntaxError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200] or type(error).__name__
