"""Proxies in the tests' process for functions, classes and objects of the program.

Standard library only, because the module runs inside the sandbox.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

FIRST_BATCH_ITEMS, MAX_BATCH_ITEMS = 1, 1024
"""Number of items in the first and the largest request to an iterator.

The number doubles with each request, so that an endless iterator computes few unused items.
"""


class RequestSender(Protocol):
    """Interface that sends requests to the program: `envs.sandbox.assertions.tests_process.TestRunner`."""

    iterators: dict[int, "RemoteIterator"]

    def request(self, operation: str, target: Any, *arguments: Any, **keywords: Any) -> Any: ...


def _remote_method(operation: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """Builds a method that sends a request to the program and converts the reply."""

    def method(self: "RemoteProxy", *arguments: Any, **keywords: Any) -> Any:
        return convert(self._sender.request(operation, self, *arguments, **keywords))

    return method


class RemoteProxy:
    """Proxy of a function, class or object of the program.

    The program computes operators only between two proxies, never between a proxy and a plain value of the tests. So
    a proxy equals no plain value, and arithmetic or order between the two raises TypeError: `f(x) == 3` and
    `abs(f(x) - 3) < 1e-6` fail even if f(x) is an object that equals everything. Operators between two proxies are
    safe, since the program could as well return the same object twice.
    """

    __slots__ = ("_handle", "_sender")

    _handle: int
    _sender: RequestSender

    def __init__(self, sender: RequestSender, number: int) -> None:
        object.__setattr__(self, "_sender", sender)
        object.__setattr__(self, "_handle", number)

    __call__, __copy__, __enter__ = _remote_method("call"), _remote_method("copy"), _remote_method("enter")
    __getattr__, __setattr__ = _remote_method("get"), _remote_method("set")
    __getitem__, __setitem__, __delitem__ = (_remote_method("item"), _remote_method("put"), _remote_method("remove"))
    __len__, __bool__, __hash__ = (
        _remote_method("length", int),
        _remote_method("truth", bool),
        _remote_method("hash", int),
    )
    __str__, __repr__ = _remote_method("text", str), _remote_method("shown", str)

    def __iter__(self) -> Iterator[Any]:
        return self._remote_iterator(self._sender.request("iterator", self))

    def __next__(self) -> Any:
        return next(self._remote_iterator(self))

    def _remote_iterator(self, iterator: Any) -> Iterator[Any]:
        """Returns the iterator that all readers of a remote iterator share."""
        if type(iterator) is not RemoteProxy:
            return iter(iterator)
        return self._sender.iterators.setdefault(iterator._handle, RemoteIterator(iterator))

    def __deepcopy__(self, memo: Any) -> Any:
        return self._sender.request("deepcopy", self)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is RemoteProxy and bool(self._sender.request("instance", self, value))

    def __subclasscheck__(self, value: Any) -> bool:
        return type(value) is RemoteProxy and bool(self._sender.request("subclass", self, value))

    def __exit__(self, *exception: Any) -> None:
        self._sender.request("leave", self)


class RemoteIterator:
    """An iterator of the program, read in batches of items."""

    def __init__(self, iterator: RemoteProxy) -> None:
        self.iterator = iterator
        self.items: deque[Any] = deque()
        self.batch_size, self.at_end = FIRST_BATCH_ITEMS, False

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        if not self.items and not self.at_end:
            items, self.at_end = self.iterator._sender.request("take", self.iterator, self.batch_size)
            self.items.extend(items)
            self.batch_size = min(2 * self.batch_size, MAX_BATCH_ITEMS)
        if not self.items:
            raise StopIteration
        return self.items.popleft()


def _remote_operator(name: str) -> Any:
    """Builds an operator that the program computes if both operands are proxies."""

    def method(left: RemoteProxy, right: Any) -> Any:
        if type(right) is not RemoteProxy:
            return NotImplemented
        return left._sender.request("operator", name, left, right)

    return method


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
):
    setattr(RemoteProxy, f"__{_name}__", _remote_operator(_name))
for _name, _method in (("and_", "and"), ("or_", "or"), ("xor", "xor")):
    setattr(RemoteProxy, f"__{_method}__", _remote_operator(_name))
