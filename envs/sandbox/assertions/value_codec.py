"""Text encoding of Python values that two mutually distrusting processes exchange.

Decoding the text can produce data only. A value becomes a flat list of nodes, each `[kind, payload]`, in which
containers name their members by node number. So nothing nests, and shared or cyclic values stay shared or
cyclic. Subclasses of plain types cross as the plain type, without their methods: a list that claims to equal
everything arrives as a list. Objects cross as the name of their class and their attributes, and are rebuilt
from the receiver's own class of that name. Other values cross as a handle, a number that stands for the object.
Numbers, dates and collections of the standard library cross as data too. Standard library only, because the
module runs inside the sandbox.
"""

import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

SEQUENCES: dict[str, Any] = {cls.__name__: cls for cls in (list, tuple, set, frozenset, deque)}
FACTORIES = {factory.__name__: factory for factory in (int, float, str, bool, list, dict, set, tuple)}
"""Factories of `defaultdict` that cross; with another factory a `defaultdict` crosses as a `dict`."""
DICTIONARIES: dict[str, Any] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    **{f"defaultdict of {name}": partial(defaultdict, factory) for name, factory in FACTORIES.items()},
}
MUTABLE = ("list", "set", "deque", "object", *DICTIONARIES)
VIEWS: dict[type, str] = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
MAX_NODES = 1_000_000
DECODING_ERRORS = (
    *(ArithmeticError, AttributeError, ImportError, LookupError),
    *(RecursionError, TypeError, ValueError),
)

HandleLookup = Callable[[Any], int | None]
"""Returns the handle of an object that cannot cross, or whose class the receiver may lack; None without one."""
HandleResolver = Callable[[int, str], Any]
"""Returns the receiver's object for a handle and the name of the object's type."""


class UntransferableValue(TypeError):
    """A value that cannot cross between the processes."""


def encode_value(
    value: Any, find_handle: HandleLookup, peer_numbers: dict[int, int] | None = None
) -> tuple[str, dict[int, Any]]:
    """Encodes a value; returns the text and {node number: value}.

    peer_numbers: {id of a container that came from the other process: its node number there}.

    Raises:
        UntransferableValue: a value cannot cross, or there are more than `MAX_NODES` nodes.
    """
    nodes: list[list[Any]] = []
    node_numbers: dict[int, int] = {}
    encoded_values: dict[int, Any] = {}  # keeps values alive, so that no id in `node_numbers` is reused
    pending_nodes: list[tuple[int, Any]] = []

    def add_node(item: Any) -> int:
        if id(item) not in node_numbers:
            if len(nodes) >= MAX_NODES:
                raise UntransferableValue(f"more than {MAX_NODES} values cannot cross")
            node_numbers[id(item)] = len(nodes)
            encoded_values[len(nodes)] = item
            pending_nodes.append((len(nodes), item))
            nodes.append([])
        return node_numbers[id(item)]

    add_node(value)
    while pending_nodes:
        number, item = pending_nodes.pop()
        node = (
            _encode_scalar(item)
            or _encode_library_value(item)
            or _encode_container(item, add_node)
            or _encode_object(item, add_node, find_handle)
        )
        peer_number = (peer_numbers or {}).get(id(item))
        nodes[number] = node if peer_number is None else [*node, peer_number]
    return json.dumps(nodes), encoded_values


def _encode_scalar(value: Any) -> list[Any] | None:
    if value is None or isinstance(value, bool):
        return ["value", value]
    if isinstance(value, int):
        return ["int", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, str):
        return ["value", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__ if type(value) is bytearray else "bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    return None


def _encode_container(value: Any, add_node: Callable[[Any], int]) -> list[Any] | None:
    fields = _named_tuple_fields(type(value))
    if fields is not None:
        return ["namedtuple", [type(value).__name__, fields, list(map(add_node, tuple.__iter__(value)))]]
    for kind, cls in SEQUENCES.items():
        if isinstance(value, cls):
            return [kind, [add_node(member) for member in cls.__iter__(value)]]
    if isinstance(value, dict):
        kind = type(value).__name__ if type(value) in (Counter, OrderedDict) else "dict"
        if type(value) is defaultdict and value.default_factory in FACTORIES.values():
            kind = f"defaultdict of {getattr(value.default_factory, '__name__', '')}"
        return [kind, [[add_node(key), add_node(dict.__getitem__(value, key))] for key in dict.__iter__(value)]]
    view = VIEWS.get(type(value))
    if view is not None:
        return [view, [[add_node(item) for item in pair] if view == "items" else add_node(pair) for pair in value]]
    return None


def _named_tuple_fields(cls: type) -> list[str] | None:
    """Returns the field names of a named tuple; None for any other class."""
    fields = vars(cls).get("_fields")
    return list(fields) if issubclass(cls, tuple) and isinstance(fields, tuple) else None


def _encode_library_value(value: Any) -> list[Any] | None:
    """Encodes a number or a date of the standard library as its constructor's arguments."""
    arguments = LIBRARY_ARGUMENTS.get((type(value).__module__, type(value).__name__))
    if arguments is None:
        return None
    return ["library", [type(value).__module__, type(value).__name__, [str(argument) for argument in arguments(value)]]]


LIBRARY_ARGUMENTS: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("decimal", "Decimal"): lambda value: (value,),
    ("fractions", "Fraction"): lambda value: (value,),
    ("datetime", "date"): lambda value: (value.isoformat(),),
    ("datetime", "time"): lambda value: (value.isoformat(),),
    ("datetime", "datetime"): lambda value: (value.isoformat(),),
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("uuid", "UUID"): lambda value: (value,),
}


def _decode_library_value(module: str, name: str, arguments: list[Any]) -> Any:
    if (module, name) not in LIBRARY_ARGUMENTS:
        raise UntransferableValue(f"a value of the type {module}.{name} cannot cross")
    cls = getattr(__import__(module), name)
    if name == "timedelta":
        return cls(*map(int, arguments))
    return cls.fromisoformat(*arguments) if module == "datetime" else cls(*arguments)


def _encode_object(value: Any, add_node: Callable[[Any], int], find_handle: HandleLookup) -> list[Any]:
    name, number = type(value).__name__, find_handle(value)
    if isinstance(value, Enum):
        return ["enum", [name, value.name, number]]
    attributes = _object_attributes(value)
    if attributes is not None:
        return ["object", [name, [[key, add_node(item)] for key, item in attributes.items()], number]]
    if number is None:
        raise UntransferableValue(f"a value of the type {name} cannot cross")
    return ["standing", [number, name]]


def _object_attributes(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object whose class the program or the tests define.

    Returns None for functions, modules, classes, iterators and the like.
    """
    if isinstance(value, type) or callable(value) or type(value).__module__ not in ("__main__", "solution", "tests"):
        return None
    attribute_values = object.__getattribute__(value, "__dict__") if hasattr(type(value), "__dict__") else None
    return attribute_values if isinstance(attribute_values, dict) and not hasattr(type(value), "__next__") else None


class ValueDecoder:
    """Decodes the text of `encode_value`; `value` is the result.

    `decoded_values` holds the value of each node by its number, so that containers can be sent back under their
    number.
    """

    def __init__(
        self,
        text: str | bytes,
        resolve_handle: HandleResolver,
        find_class: Callable[[str], type | None],
        originals: dict[int, Any] | None = None,
    ) -> None:
        """Decodes `text`.

        originals: {node number: this process's own container}, which is emptied and refilled when it comes back.

        Raises:
            UntransferableValue: text that `encode_value` does not write.
        """
        self.resolve_handle, self.find_class, self.originals = resolve_handle, find_class, originals or {}
        self.decoded_values: dict[int, Any] = {}
        self.unfilled_nodes: list[int] = []
        try:
            self.nodes = json.loads(text)
            self.value = self._decode_node(0)
            while self.unfilled_nodes:
                self._fill_container(self.unfilled_nodes.pop())
        except DECODING_ERRORS as error:
            raise UntransferableValue(f"a value that cannot be read: {type(error).__name__}: {error}") from None

    def _decode_node(self, number: int) -> Any:
        if number not in self.decoded_values:
            kind, payload, *peer_number = self.nodes[number]
            self.decoded_values[number] = self._create_value(
                number, kind, payload, peer_number[0] if peer_number else None
            )
        return self.decoded_values[number]

    def _create_value(self, number: int, kind: str, payload: Any, original_number: int | None) -> Any:
        """Creates the value of a node; containers are created empty, to be filled later."""
        if kind in SCALAR_DECODERS:
            return SCALAR_DECODERS[kind](payload)
        if kind == "standing":
            return self.resolve_handle(int(payload[0]), str(payload[1]))
        if kind == "library":
            return _decode_library_value(*payload)
        if kind in ("tuple", "frozenset"):
            return SEQUENCES[kind](self._decode_node(member) for member in payload)
        if kind == "namedtuple":
            return self._decode_named_tuple(*payload)
        if kind in VIEWS.values():
            return self._decode_view(kind, payload)
        if kind == "enum":
            return self._decode_enum_member(*payload)
        if kind not in MUTABLE:
            raise UntransferableValue(f"a value of the kind {kind!r} cannot cross")
        self.unfilled_nodes.append(number)
        if original_number is not None and original_number in self.originals:
            return self.originals[original_number]
        if kind != "object":
            return DICTIONARIES[kind]() if kind in DICTIONARIES else SEQUENCES[kind]()
        cls = self.find_class(str(payload[0]))
        if cls is None:
            self.unfilled_nodes.pop()
            if payload[2] is None:
                raise UntransferableValue(f"there is no class {payload[0]!r} on the other side")
            return self.resolve_handle(int(payload[2]), str(payload[0]))
        return object.__new__(cls)

    def _decode_named_tuple(self, name: str, fields: list[str], members: list[int]) -> Any:
        own = self.find_class(name)
        cls: Any = own if own is not None and _named_tuple_fields(own) == fields else namedtuple(name, fields)
        return tuple.__new__(cls, map(self._decode_node, members))

    def _decode_view(self, kind: str, members: list[Any]) -> Any:
        if kind == "items":
            return {self._decode_node(key): self._decode_node(value) for key, value in members}.items()
        if kind == "keys":
            return dict.fromkeys(map(self._decode_node, members)).keys()
        return dict(enumerate(map(self._decode_node, members))).values()

    def _decode_enum_member(self, name: str, member: str, handle: int | None) -> Any:
        own = self.find_class(name)
        if own is not None and issubclass(own, Enum):
            return own[member]
        if handle is None:
            raise UntransferableValue(f"there is no class {name!r} on the other side")
        return self.resolve_handle(int(handle), name)

    def _fill_container(self, number: int) -> None:
        kind, payload = self.nodes[number][:2]
        container = self.decoded_values[number]
        if kind == "object":
            vars(container).clear()
            vars(container).update((str(name), self._decode_node(node)) for name, node in payload[1])
        elif kind in DICTIONARIES:
            pairs = {self._decode_node(key): self._decode_node(value) for key, value in payload}
            container.clear()
            container.update(pairs)
        else:
            members = [self._decode_node(member) for member in payload]
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(members)


SCALAR_DECODERS: dict[str, Callable[[Any], Any]] = {
    "value": lambda payload: payload,
    "int": lambda payload: int(payload, 16),
    "float": float.fromhex,
    "complex": lambda payload: complex(float.fromhex(payload[0]), float.fromhex(payload[1])),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda payload: range(*payload),
}
