"""Process of the tested program, which serves the requests of the tests.

Its replies are data to the tests (`envs.sandbox.assertions.tests_process`), never a verdict. Standard library
only, because the module runs inside the sandbox.
"""

import copy
import operator
import os
import sys
from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn

from envs.sandbox.assertions.channel import Channel, PeerExited
from envs.sandbox.assertions.exceptions import build_exception, class_lineage
from envs.sandbox.assertions.value_codec import MUTABLE, ValueDecoder, encode_value


class ProgramServer:
    """Serves requests that use the names of a program.

    held_objects: objects by handle. pending_errors: exceptions of iterators that are still to be raised, by id.
    """

    def __init__(self, channel: Channel, names: dict[str, Any]) -> None:
        self.channel, self.names = channel, names
        self.held_objects: list[Any] = []
        self.handles: dict[int, int] = {}
        self.pending_errors: dict[int, BaseException] = {}

    def serve(self) -> None:
        """Replies to requests until the tests' process ends."""
        while True:
            try:
                request = self.channel.receive()
            except PeerExited:
                return
            self.channel.send(self.handle_request(request))

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Performs a request; returns the reply, also for an exception."""
        try:
            if request["do"] == "names":
                names = {name: value for name, value in self.names.items() if isinstance(name, str)}
                classes = {name: value for name, value in names.items() if isinstance(value, type)}
                errors = {name: cls for name, cls in classes.items() if issubclass(cls, BaseException)}
                return {"names": {name: class_lineage(errors[name]) if name in errors else [] for name in names}}
            operands = self.decode(request["given"])
            peer_numbers = {
                id(value): number
                for number, value in operands.decoded_values.items()
                if operands.nodes[number][0] in MUTABLE
            }
            target, arguments, keywords = operands.value
            result = OPERATIONS[request["do"]](self, target, arguments, keywords)
            # The reply includes the arguments, because the call may have changed them.
            return {"value": encode_value((result, arguments, keywords), self._handle_of, peer_numbers)[0]}
        except PeerExited:
            raise
        except BaseException as error:
            return {
                "raised": class_lineage(type(error)),
                "message": str(error)[:1000],
                "object": self._handle_of(error),
            }

    def decode(self, text: str) -> ValueDecoder:
        return ValueDecoder(text, self._resolve_handle, self._find_class)

    def _find_class(self, name: str) -> type | None:
        value = self.names.get(name)
        return value if isinstance(value, type) else None

    def _resolve_handle(self, number: int, kind: str) -> Any:
        return self.held_objects[number] if number >= 0 else CallbackProxy(self, number)

    def _handle_of(self, value: Any) -> int:
        """Returns the handle of an object, always the same one.

        `held_objects` keeps the object alive, so that no other object gets its id.
        """
        if type(value) is CallbackProxy:
            return value.number
        if id(value) not in self.handles:
            self.handles[id(value)] = len(self.held_objects)
            self.held_objects.append(value)
        return self.handles[id(value)]

    def take_items(self, iterator: Any, count: int) -> tuple[list[Any], bool]:
        """Returns the next items of an iterator, and whether the iterator has ended.

        An exception that follows some items is raised by the next call.
        """
        if id(iterator) in self.pending_errors:
            raise self.pending_errors.pop(id(iterator))
        items: list[Any] = []
        try:
            items.extend(islice(iterator, count))
        except Exception as error:
            if not items:
                raise
            self.pending_errors[id(iterator)] = error
            return items, False
        return items, len(items) < count


class CallbackProxy:
    """A function of the tests, given to the program as an argument."""

    def __init__(self, server: ProgramServer, number: int) -> None:
        self.server, self.number = server, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        server = self.server
        server.channel.send(
            {"call": self.number, "given": encode_value((list(arguments), keywords), server._handle_of)[0]}
        )
        while "do" in (reply := server.channel.receive()):
            server.channel.send(server.handle_request(reply))
        if "raised" in reply:
            raise build_exception(reply["raised"], reply["message"], {})
        return server.decode(reply["value"]).value


OPERATIONS: dict[str, Callable[[ProgramServer, Any, Any, Any], Any]] = {
    "lookup": lambda server, target, arguments, keywords: eval(target, server.names),
    "call": lambda server, target, arguments, keywords: target(*arguments, **keywords),
    "get": lambda server, target, arguments, keywords: getattr(target, arguments[0]),
    "set": lambda server, target, arguments, keywords: setattr(target, *arguments),
    "item": lambda server, target, arguments, keywords: target[arguments[0]],
    "put": lambda server, target, arguments, keywords: operator.setitem(target, *arguments),
    "remove": lambda server, target, arguments, keywords: operator.delitem(target, *arguments),
    "iterator": lambda server, target, arguments, keywords: iter(target),
    "take": lambda server, target, arguments, keywords: server.take_items(target, *arguments),
    "length": lambda server, target, arguments, keywords: len(target),
    "truth": lambda server, target, arguments, keywords: bool(target),
    "text": lambda server, target, arguments, keywords: str(target),
    "shown": lambda server, target, arguments, keywords: repr(target),
    "hash": lambda server, target, arguments, keywords: hash(target),
    "copy": lambda server, target, arguments, keywords: copy.copy(target),
    "deepcopy": lambda server, target, arguments, keywords: copy.deepcopy(target),
    "instance": lambda server, target, arguments, keywords: isinstance(arguments[0], target),
    "subclass": lambda server, target, arguments, keywords: issubclass(arguments[0], target),
    "enter": lambda server, target, arguments, keywords: target.__enter__(),
    "leave": lambda server, target, arguments, keywords: target.__exit__(None, None, None) and None,
    "operator": lambda server, target, arguments, keywords: getattr(operator, target)(*arguments),
}


def serve_program(preamble: bytes, source: bytes, fd: int) -> NoReturn:
    """Loads a preamble and the program as the module `solution`, then serves requests.

    Ends the process.
    """
    try:
        module = ModuleType("solution")
        sys.modules["solution"] = module
        exec(compile(preamble, "preamble.py", "exec"), vars(module))
        exec(compile(source, "solution.py", "exec"), vars(module))
        ProgramServer(Channel(fd), vars(module)).serve()
    finally:
        os._exit(0)
