"""Plain values that cross between two processes which do not trust each other, as text that only data can come out of.

A value becomes a flat list of nodes, each `[kind, payload]`, in which containers name their members by number: nothing
nests, and what is shared or cyclic stays so. Subclasses of plain types cross as the plain type, without their methods:
a list that says it equals everything arrives as a list. Objects cross by the name of their class and their attributes
and are rebuilt from the receiver's own class of that name; everything else crosses as a number that stands for it.
Numbers, dates and collections of the standard library cross as data too. Standard library only: this runs inside the
sandbox.
"""

import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

SEQUENCES: dict[str, Any] = {cls.__name__: cls for cls in (list, tuple, set, frozenset, deque)}
FACTORIES = {factory.__name__: factory for factory in (int, float, str, bool, list, dict, set, tuple)}
"""Of a `defaultdict` that stays one."""
DICTIONARIES: dict[str, Any] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    **{f"defaultdict of {name}": partial(defaultdict, factory) for name, factory in FACTORIES.items()},
}
MUTABLE = ("list", "set", "deque", "object", *DICTIONARIES)
VIEWS: dict[type, str] = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
MAX_NODES = 1_000_000
UNREADABLE = (
    *(ArithmeticError, AttributeError, ImportError, LookupError),
    *(RecursionError, TypeError, ValueError),
)

Standing = Callable[[Any], int | None]
"""The number that stands for a value which cannot cross, or may not be known there; None where there is none."""
Stood = Callable[[int, str], Any]
"""The receiver's stand-in for such a number, given also the name of its type."""


class Unknown(TypeError):
    """A value cannot cross."""


def encoded(
    value: Any, standing: Standing, known: dict[int, int] | None = None
) -> tuple[str, dict[int, Any]]:
    """value as text, and {number in it: what it stands for}.

    known: {id of a container that came from the other side: its number there}.

    Raises:
        Unknown: a value cannot cross, or there are more than `MAX_NODES`.
    """
    nodes: list[list[Any]] = []
    places: dict[int, int] = {}
    members: dict[int, Any] = {}  # holds what `places` names by its id, so that no id is given again
    waiting: list[tuple[int, Any]] = []

    def place(each: Any) -> int:
        if id(each) not in places:
            if len(nodes) >= MAX_NODES:
                raise Unknown(f"more than {MAX_NODES} values cannot cross")
            places[id(each)] = len(nodes)
            members[len(nodes)] = each
            waiting.append((len(nodes), each))
            nodes.append([])
        return places[id(each)]

    place(value)
    while waiting:
        number, each = waiting.pop()
        node = _scalar(each) or _of_library(each) or _container(each, place) or _object(each, place, standing)
        was = (known or {}).get(id(each))
        nodes[number] = node if was is None else [*node, was]
    return json.dumps(nodes), members


def _scalar(value: Any) -> list[Any] | None:
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


def _container(value: Any, place: Callable[[Any], int]) -> list[Any] | None:
    fields = _fields(type(value))
    if fields is not None:
        return ["namedtuple", [type(value).__name__, fields, list(map(place, tuple.__iter__(value)))]]
    for kind, cls in SEQUENCES.items():
        if isinstance(value, cls):
            return [kind, [place(member) for member in cls.__iter__(value)]]
    if isinstance(value, dict):
        kind = type(value).__name__ if type(value) in (Counter, OrderedDict) else "dict"
        if type(value) is defaultdict and value.default_factory in FACTORIES.values():
            kind = f"defaultdict of {getattr(value.default_factory, '__name__', '')}"
        return [kind, [[place(key), place(dict.__getitem__(value, key))] for key in dict.__iter__(value)]]
    view = VIEWS.get(type(value))
    if view is not None:
        return [view, [[place(each) for each in pair] if view == "items" else place(pair) for pair in value]]
    return None


def _fields(cls: type) -> list[str] | None:
    """The names of a named tuple's members; None of any other class."""
    fields = vars(cls).get("_fields")
    return list(fields) if issubclass(cls, tuple) and isinstance(fields, tuple) else None


def _of_library(value: Any) -> list[Any] | None:
    """A number or a date of the standard library, as the arguments that make it again."""
    parts = LIBRARY.get((type(value).__module__, type(value).__name__))
    if parts is None:
        return None
    return ["library", [type(value).__module__, type(value).__name__, [str(part) for part in parts(value)]]]


LIBRARY: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("decimal", "Decimal"): lambda value: (value,),
    ("fractions", "Fraction"): lambda value: (value,),
    ("datetime", "date"): lambda value: (value.isoformat(),),
    ("datetime", "time"): lambda value: (value.isoformat(),),
    ("datetime", "datetime"): lambda value: (value.isoformat(),),
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("uuid", "UUID"): lambda value: (value,),
}


def _made_by_library(module: str, name: str, parts: list[Any]) -> Any:
    if (module, name) not in LIBRARY:
        raise Unknown(f"a value of the type {module}.{name} cannot cross")
    cls = getattr(__import__(module), name)
    if name == "timedelta":
        return cls(*map(int, parts))
    return cls.fromisoformat(*parts) if module == "datetime" else cls(*parts)


def _object(value: Any, place: Callable[[Any], int], standing: Standing) -> list[Any]:
    name, number = type(value).__name__, standing(value)
    if isinstance(value, Enum):
        return ["enum", [name, value.name, number]]
    attributes = _attributes(value)
    if attributes is not None:
        return ["object", [name, [[key, place(held)] for key, held in attributes.items()], number]]
    if number is None:
        raise Unknown(f"a value of the type {name} cannot cross")
    return ["standing", [number, name]]


def _attributes(value: Any) -> dict[str, Any] | None:
    """Of an object of a class that was written here; None for functions, modules, classes, iterators and the like."""
    if (
        isinstance(value, type)
        or callable(value)
        or type(value).__module__ not in ("__main__", "solution", "tests")
    ):
        return None
    held = object.__getattribute__(value, "__dict__") if hasattr(type(value), "__dict__") else None
    return held if isinstance(held, dict) and not hasattr(type(value), "__next__") else None


class Decoded:
    """Values made from text. `made` holds every container by its number, so that they can be sent back as known."""

    def __init__(
        self,
        text: str | bytes,
        stood: Stood,
        classes: Callable[[str], type | None],
        originals: dict[int, Any] | None = None,
    ) -> None:
        """originals: {number: this side's own container}, which is emptied and filled again where it comes back.

        Raises:
            Unknown: text that `encoded` does not write.
        """
        self.stood, self.classes, self.originals = stood, classes, originals or {}
        self.made: dict[int, Any] = {}
        self.filling: list[int] = []
        try:
            self.nodes = json.loads(text)
            self.value = self._at(0)
            while self.filling:
                self._fill(self.filling.pop())
        except UNREADABLE as error:
            raise Unknown(f"a value that cannot be read: {type(error).__name__}: {error}") from None

    def _at(self, number: int) -> Any:
        if number not in self.made:
            kind, payload, *was = self.nodes[number]
            self.made[number] = self._begun(number, kind, payload, was[0] if was else None)
        return self.made[number]

    def _begun(self, number: int, kind: str, payload: Any, was: int | None) -> Any:
        if kind in SCALARS:
            return SCALARS[kind](payload)
        if kind == "standing":
            return self.stood(int(payload[0]), str(payload[1]))
        if kind == "library":
            return _made_by_library(*payload)
        if kind in ("tuple", "frozenset"):
            return SEQUENCES[kind](self._at(member) for member in payload)
        if kind == "namedtuple":
            return self._named_tuple(*payload)
        if kind in VIEWS.values():
            return self._view(kind, payload)
        if kind == "enum":
            return self._member(*payload)
        if kind not in MUTABLE:
            raise Unknown(f"a value of the kind {kind!r} cannot cross")
        self.filling.append(number)
        if was is not None and was in self.originals:
            return self.originals[was]
        if kind != "object":
            return DICTIONARIES[kind]() if kind in DICTIONARIES else SEQUENCES[kind]()
        cls = self.classes(str(payload[0]))
        if cls is None:
            self.filling.pop()
            if payload[2] is None:
                raise Unknown(f"there is no class {payload[0]!r} on the other side")
            return self.stood(int(payload[2]), str(payload[0]))
        return object.__new__(cls)

    def _named_tuple(self, name: str, fields: list[str], members: list[int]) -> Any:
        own = self.classes(name)
        cls: Any = own if own is not None and _fields(own) == fields else namedtuple(name, fields)
        return tuple.__new__(cls, map(self._at, members))

    def _view(self, kind: str, members: list[Any]) -> Any:
        if kind == "items":
            return {self._at(key): self._at(value) for key, value in members}.items()
        if kind == "keys":
            return dict.fromkeys(map(self._at, members)).keys()
        return dict(enumerate(map(self._at, members))).values()

    def _member(self, name: str, member: str, standing: int | None) -> Any:
        own = self.classes(name)
        if own is not None and issubclass(own, Enum):
            return own[member]
        if standing is None:
            raise Unknown(f"there is no class {name!r} on the other side")
        return self.stood(int(standing), name)

    def _fill(self, number: int) -> None:
        kind, payload = self.nodes[number][:2]
        made = self.made[number]
        if kind == "object":
            vars(made).clear()
            vars(made).update((str(name), self._at(held)) for name, held in payload[1])
        elif kind in DICTIONARIES:
            pairs = {self._at(key): self._at(value) for key, value in payload}
            made.clear()
            made.update(pairs)
        else:
            members = [self._at(member) for member in payload]
            made.clear()
            (made.update if isinstance(made, set) else made.extend)(members)


SCALARS: dict[str, Callable[[Any], Any]] = {
    "value": lambda payload: payload,
    "int": lambda payload: int(payload, 16),
    "float": float.fromhex,
    "complex": lambda payload: complex(float.fromhex(payload[0]), float.fromhex(payload[1])),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda payload: range(*payload),
}
