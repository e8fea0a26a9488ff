"""What stands, in the tests, for a function, class or object of the program. Standard library only: this runs inside
the sandbox."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

FIRST_ITEMS, MOST_ITEMS = 1, 1024
"""How many items of an iterator are asked for: as many again each time, so that an endless one gives few too many."""


class Asked(Protocol):
    """Who asks the program: `envs.sandbox.assertions.tests_side.Tests`."""

    taken: dict[int, "Taken"]

    def ask(self, what: str, target: Any, *arguments: Any, **named: Any) -> Any: ...


def _asks(what: str, kind: Callable[[Any], Any] = lambda value: value) -> Any:
    """A method that asks the program, and makes the answer one of a kind."""

    def method(self: "StandIn", *arguments: Any, **named: Any) -> Any:
        return kind(self._tests.ask(what, self, *arguments, **named))

    return method


class StandIn:
    """Something of the program. Where it meets a value of the tests, the program is not asked.

    So it equals no plain value, whatever the program says, and no sum of it and a plain value is taken: `f(x) == 3` and
    `abs(f(x) - 3) < 1e-6` do not hold for an object that agrees with everything. Two of them are compared and added by
    the program, which could as well give the same object twice.
    """

    __slots__ = ("_number", "_tests")

    _number: int
    _tests: Asked

    def __init__(self, tests: Asked, number: int) -> None:
        object.__setattr__(self, "_tests", tests)
        object.__setattr__(self, "_number", number)

    __call__, __copy__, __enter__ = _asks("call"), _asks("copy"), _asks("enter")
    __getattr__, __setattr__ = _asks("get"), _asks("set")
    __getitem__, __setitem__, __delitem__ = _asks("item"), _asks("put"), _asks("remove")
    __len__, __bool__, __hash__ = _asks("length", int), _asks("truth", bool), _asks("hash", int)
    __str__, __repr__ = _asks("text", str), _asks("shown", str)

    def __iter__(self) -> Iterator[Any]:
        return self._taken(self._tests.ask("iterator", self))

    def __next__(self) -> Any:
        return next(self._taken(self))

    def _taken(self, iterator: Any) -> Iterator[Any]:
        """Of an iterator that is asked for in parts, all readers share what was asked for."""
        if type(iterator) is not StandIn:
            return iter(iterator)
        return self._tests.taken.setdefault(iterator._number, Taken(iterator))

    def __deepcopy__(self, memo: Any) -> Any:
        return self._tests.ask("deepcopy", self)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is StandIn and bool(self._tests.ask("instance", self, value))

    def __subclasscheck__(self, value: Any) -> bool:
        return type(value) is StandIn and bool(self._tests.ask("subclass", self, value))

    def __exit__(self, *raised: Any) -> None:
        self._tests.ask("leave", self)


class Taken:
    """An iterator of the program that is read in parts."""

    def __init__(self, iterator: StandIn) -> None:
        self.iterator = iterator
        self.items: deque[Any] = deque()
        self.count, self.ended = FIRST_ITEMS, False

    def __iter__(self) -> "Taken":
        return self

    def __next__(self) -> Any:
        if not self.items and not self.ended:
            items, self.ended = self.iterator._tests.ask("take", self.iterator, self.count)
            self.items.extend(items)
            self.count = min(2 * self.count, MOST_ITEMS)
        if not self.items:
            raise StopIteration
        return self.items.popleft()


def _between(name: str) -> Any:
    """A method that asks the program where both operands are its own."""

    def method(left: StandIn, right: Any) -> Any:
        if type(right) is not StandIn:
            return NotImplemented
        return left._tests.ask("operator", name, left, right)

    return method


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
):
    setattr(StandIn, f"__{_name}__", _between(_name))
for _name, _method in (("and_", "and"), ("or_", "or"), ("xor", "xor")):
    setattr(StandIn, f"__{_method}__", _between(_name))
