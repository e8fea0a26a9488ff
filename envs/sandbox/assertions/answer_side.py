"""The side of the tested program: it does what the tests ask for until they are done.

Whatever it says is data to the tests (`envs.sandbox.assertions.tests_side`), never a verdict. Standard library only:
this runs inside the sandbox.
"""

import copy
import operator
import os
import sys
from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn

from envs.sandbox.assertions.channel import AnswerEnded, Channel
from envs.sandbox.assertions.raised import exception, lineage
from envs.sandbox.assertions.values import MUTABLE, Decoded, encoded


class Answer:
    """Does what is asked with the names of a program."""

    def __init__(self, channel: Channel, names: dict[str, Any]) -> None:
        self.channel, self.names = channel, names
        self.held: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.pending: dict[int, BaseException] = {}

    def serve(self) -> None:
        while True:
            try:
                asked = self.channel.receive()
            except AnswerEnded:
                return
            self.channel.send(self.reply(asked))

    def reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            if asked["do"] == "names":
                names = {name: value for name, value in self.names.items() if isinstance(name, str)}
                classes = {name: value for name, value in names.items() if isinstance(value, type)}
                errors = {name: cls for name, cls in classes.items() if issubclass(cls, BaseException)}
                return {"names": {name: lineage(errors[name]) if name in errors else [] for name in names}}
            given = self.decoded(asked["given"])
            known = {
                id(made): number for number, made in given.made.items() if given.nodes[number][0] in MUTABLE
            }
            target, arguments, named = given.value
            value = OPERATIONS[asked["do"]](self, target, arguments, named)
            # the arguments go back too: they may have changed
            return {"value": encoded((value, arguments, named), self._standing, known)[0]}
        except AnswerEnded:
            raise
        except BaseException as error:
            return {
                "raised": lineage(type(error)),
                "message": str(error)[:1000],
                "object": self._standing(error),
            }

    def decoded(self, text: str) -> Decoded:
        return Decoded(text, self._stood, self._class)

    def _class(self, name: str) -> type | None:
        found = self.names.get(name)
        return found if isinstance(found, type) else None

    def _stood(self, number: int, kind: str) -> Any:
        return self.held[number] if number >= 0 else Lent(self, number)

    def _standing(self, value: Any) -> int:
        """The same number for the same object: `held` keeps it alive, so that no other gets its id."""
        if type(value) is Lent:
            return value.number
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.held)
            self.held.append(value)
        return self.numbers[id(value)]

    def taken(self, iterator: Any, count: int) -> tuple[list[Any], bool]:
        """The next items, and whether these are all. An exception behind some items is raised when more are asked."""
        if id(iterator) in self.pending:
            raise self.pending.pop(id(iterator))
        items: list[Any] = []
        try:
            items.extend(islice(iterator, count))
        except Exception as error:
            if not items:
                raise
            self.pending[id(iterator)] = error
            return items, False
        return items, len(items) < count


class Lent:
    """A function of the tests, given to the program as an argument."""

    def __init__(self, answer: Answer, number: int) -> None:
        self.answer, self.number = answer, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        answer = self.answer
        answer.channel.send(
            {"call": self.number, "given": encoded((list(arguments), named), answer._standing)[0]}
        )
        while "do" in (reply := answer.channel.receive()):
            answer.channel.send(answer.reply(reply))
        if "raised" in reply:
            raise exception(reply["raised"], reply["message"], {})
        return answer.decoded(reply["value"]).value


OPERATIONS: dict[str, Callable[[Answer, Any, Any, Any], Any]] = {
    "lookup": lambda answer, target, arguments, named: eval(target, answer.names),
    "call": lambda answer, target, arguments, named: target(*arguments, **named),
    "get": lambda answer, target, arguments, named: getattr(target, arguments[0]),
    "set": lambda answer, target, arguments, named: setattr(target, *arguments),
    "item": lambda answer, target, arguments, named: target[arguments[0]],
    "put": lambda answer, target, arguments, named: operator.setitem(target, *arguments),
    "remove": lambda answer, target, arguments, named: operator.delitem(target, *arguments),
    "iterator": lambda answer, target, arguments, named: iter(target),
    "take": lambda answer, target, arguments, named: answer.taken(target, *arguments),
    "length": lambda answer, target, arguments, named: len(target),
    "truth": lambda answer, target, arguments, named: bool(target),
    "text": lambda answer, target, arguments, named: str(target),
    "shown": lambda answer, target, arguments, named: repr(target),
    "hash": lambda answer, target, arguments, named: hash(target),
    "copy": lambda answer, target, arguments, named: copy.copy(target),
    "deepcopy": lambda answer, target, arguments, named: copy.deepcopy(target),
    "instance": lambda answer, target, arguments, named: isinstance(arguments[0], target),
    "subclass": lambda answer, target, arguments, named: issubclass(arguments[0], target),
    "enter": lambda answer, target, arguments, named: target.__enter__(),
    "leave": lambda answer, target, arguments, named: target.__exit__(None, None, None) and None,
    "operator": lambda answer, target, arguments, named: getattr(operator, target)(*arguments),
}


def run_answer(preamble: bytes, source: bytes, fd: int) -> NoReturn:
    """The program, after a preamble, as the module `solution`, which then does what tests ask. Ends the process."""
    try:
        module = ModuleType("solution")
        sys.modules["solution"] = module
        exec(compile(preamble, "preamble.py", "exec"), vars(module))
        exec(compile(source, "solution.py", "exec"), vars(module))
        Answer(Channel(fd), vars(module)).serve()
    finally:
        os._exit(0)
