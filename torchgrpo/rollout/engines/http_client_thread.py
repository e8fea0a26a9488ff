"""Thread with an asyncio loop and an HTTP session, used from another thread.

caller's thread ── start(coroutine) ──▶ loop ── HTTP ──▶ servers
                ◀─ a future's result ── loop
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp

Result = TypeVar("Result")
_CLOSE_S = 10.0


class HTTPClientThread:
    """Loop in a thread of its own.

    session: of all requests, without a limit on connections. Each request has its own connection, since a server may
    close an idle one just when the next request is sent on it.
    """

    session: aiohttp.ClientSession

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http engines", daemon=True)
        self._thread.start()
        self.session = self.start(self._open_session()).result(_CLOSE_S)

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Starts a coroutine; cancelling the future cancels the coroutine and closes its connection."""

        async def run() -> Result:
            task = asyncio.current_task()
            assert task is not None
            # A cancelled future does not read the exception of its task, which asyncio would then print.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            return await coroutine

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        """Cancels all coroutines, closes the session and ends the thread.

        Waits at most `_CLOSE_S` for each.
        """
        if self._thread.is_alive():
            with suppress(TimeoutError):
                self.start(self._end()).result(_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.session.close()
