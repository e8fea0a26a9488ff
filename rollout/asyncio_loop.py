"""An asyncio loop that gives what is awaited at once, and tells whether it has anything to do.

    future.set_result(result)    a handle in the loop's queue ── the loop's next pass ── the task goes on
    loop.give(future, result)    the task goes on, up to its next await ── give returns

A pass of the loop and a handle cost more than all that a group does between two awaits.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVar

Result = TypeVar("Result")


class GivingLoop(asyncio.SelectorEventLoop):
    """due: something has come into its queue since somebody set this to false. Sockets and timers do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.due = False
        self._at_once = False
        self._called = asyncio.Handle(lambda: None, (), self)

    def give(self, future: asyncio.Future[Result], result: Result) -> None:
        """The task that awaits this future goes on with the result; to be called where no task runs.

        A future that is done or cancelled stays as it is.
        """
        if not future.done():
            self._at_once = True
            future.set_result(result)
            self._at_once = False  # nobody awaits it yet

    def call_soon(  # type: ignore[override]  # of types that callbacks and their arguments share
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if (
            self._at_once and context is not None
        ):  # by the future, with the context of the task that awaits it
            self._at_once = False
            context.run(callback, *args)
            return self._called
        self.due = True
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.due = True
        return super().call_soon_threadsafe(callback, *args, context=context)
