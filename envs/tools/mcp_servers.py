"""Tools of MCP servers: one connection for each episode, or one that all episodes share.

All connections live in the event loop of one thread. So a server does not depend on the loop that calls it, and a loop
that waits for an engine does not delay a server.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from os import sched_getaffinity
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.tools import server_guard
from envs.tools.execution import Outcome, wait_for_outcome
from envs.tools.mcp_address import McpAddress
from envs.tools.results import replace_surrogates, result_text
from envs.tools.tool_sources import OpenTools, ToolCall, ToolStartError
from envs.user_code import describe_error

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

Value = TypeVar("Value")
START_ALLOWANCE = 6
"""Longest start of a server, in units of `env.tool_timeout_s`."""
ERROR_BYTES = 2000
"""Number of last bytes of a server's error output that messages quote."""


class ServerToolError(Exception):
    """Failure of a tool in an MCP server, or of the server.

    The model reads the message.
    """


class LoopThread:
    """Daemon thread with an event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Runs a coroutine in the thread; the caller's cancellation cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def run_sync(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Runs a coroutine in the thread, and waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Calls a function in the thread, and does not wait for it."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Ends the loop and the thread; no coroutine may be running."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _ErrorOutput(asyncio.Protocol):
    """Reader of a server's error output, which keeps the end of it."""

    def __init__(self) -> None:
        self.end = b""

    def data_received(self, data: bytes) -> None:
        self.end = (self.end + data)[-ERROR_BYTES:]

    def last_line(self) -> str:
        """Returns the last line, or an empty text."""
        lines = self.end.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


class McpConnection:
    """Connection to an MCP server; of a command, with a process of its own.

    All methods run in the same event loop. A task of its own holds the connection, since the library's contexts must be
    left by the task that entered them.
    """

    def __init__(self, address: McpAddress) -> None:
        self.address = address
        self.schemas: tuple[dict[str, Any], ...] = ()
        self.is_broken = False
        self._errors = _ErrorOutput()
        self._client: Client | None = None
        self._failure: BaseException | None = None
        self._ready, self._stop = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def open(self, seconds: float) -> None:
        """Waits until the server has listed its tools.

        Raises:
            ToolStartError: the server fails, or needs more than `seconds`.
        """
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({ready, self._task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            has_ended = self._task.done()
            if self._client is None:
                self.request_stop()
        if self._client is not None:
            return
        await asyncio.wait({self._task})
        problem = f"failed at its start: {self._reason()}" if has_ended else f"was not ready after {seconds:g} s"
        line = self._errors.last_line()
        note = f"; the last line of its error output is: {line}" if line else ""
        raise ToolStartError(f"{self.address.place}: the MCP server {problem}{note}")

    def add_end_callback(self, function: Callable[[], None]) -> None:
        """Calls a function when the connection has ended."""
        self._task.add_done_callback(lambda _: function())

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> Outcome:
        """Calls a tool.

        The outcome is an exception if the tool or the server fails or is late.
        """
        return await wait_for_outcome(asyncio.ensure_future(self._call(name, dict(arguments))), seconds)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._client is None:
            return self._server_stopped()
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                return ServerToolError(error.message)
            return self._server_stopped()
        except BaseException as error:
            self.is_broken = not isinstance(error, asyncio.CancelledError)
            return error
        text = _text_of_result(result)
        return ServerToolError(text) if result.is_error else text

    def _server_stopped(self) -> ServerToolError:
        self.is_broken = True
        error = ServerToolError("the tool's server has stopped")
        if line := self._errors.last_line():
            error.add_note(f"the last line of its error output is: {line}")
        return error

    async def _hold(self) -> None:
        """Opens the connection, and closes it when `close` asks for it."""
        try:
            async with self._open_client() as client:
                self.schemas = await _list_tools(client)
                self._client = client
                self._ready.set()
                await self._stop.wait()
        except BaseException as error:
            self._failure = error
        finally:
            self._client = None
            self.is_broken = True

    @asynccontextmanager
    async def _open_client(self) -> "AsyncIterator[Client]":
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        # The library logs a traceback for each line that a server prints beside its messages.
        logging.getLogger("mcp.client").setLevel(logging.CRITICAL)
        if self.address.url:
            async with Client(self.address.url) as client:
                yield client
            return
        read_end, write_end = os.pipe()
        loop = asyncio.get_running_loop()
        reader, _ = await loop.connect_read_pipe(lambda: self._errors, os.fdopen(read_end, "rb", buffering=0))
        guard = [str(Path(server_guard.__file__)), str(os.getpid()), *self.address.command]
        parameters = StdioServerParameters(
            command=sys.executable, args=["-I", "-S", *guard], env=dict(os.environ), encoding_error_handler="replace"
        )
        try:
            with os.fdopen(write_end, "w") as errors:
                async with Client(stdio_client(parameters, errors)) as client:
                    errors.close()
                    yield client
        finally:
            reader.close()

    def request_stop(self) -> None:
        """Starts to close the connection."""
        is_first = not self._stop.is_set()
        self._stop.set()
        if is_first and self._client is None:
            self._task.cancel()  # a second time would break off the end of the server's processes

    async def close(self) -> None:
        """Closes the connection, and waits until the processes of the server have ended."""
        self.request_stop()
        await asyncio.wait({self._task})

    def _reason(self) -> str:
        """Returns the first exception behind groups of exceptions."""
        error = self._failure
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return describe_error(error) if error is not None else ""


async def _list_tools(client: "Client") -> tuple[dict[str, Any], ...]:
    """Returns the schemas of a server's tools."""
    schemas: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schemas.append({"type": "function", "function": function})
        cursor = page.next_cursor
        if cursor is None:
            return tuple(schemas)


def _text_of_result(result: "CallToolResult") -> str:
    """Returns the texts of a result; of a result without content its structure, as JSON."""
    if not result.content:
        return result_text(result.structured_content)
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    return replace_surrogates("\n".join(parts))


@dataclass
class _Opening:
    """Connection that an episode waits for, or has given up."""

    connection: McpConnection | None = None
    is_abandoned: bool = False

    def abandon(self) -> None:
        """Stops the connection, whether it is ready or not."""
        self.is_abandoned = True
        if self.connection is not None:
            self.connection.request_stop()


class McpSource:
    """Tools of an MCP server.

    `start` connects once to read the schemas. Later connections have these schemas too.
    """

    def __init__(self, address: McpAddress, env: EnvConfig) -> None:
        self.place, self.address = address.place, address
        self.schemas: tuple[dict[str, Any], ...] = ()
        self._call_seconds = env.tool_timeout_s
        self._start_seconds = START_ALLOWANCE * env.tool_timeout_s
        self._thread: LoopThread | None = None
        self._starts = asyncio.Semaphore(len(sched_getaffinity(0)))
        self._shared: McpConnection | None = None
        self._shared_lock = asyncio.Lock()
        self._connections: set[McpConnection] = set()

    def start(self) -> None:
        """Connects to the server and reads the schemas."""
        self._thread = LoopThread("MCP")
        try:
            self.schemas = self._thread.run_sync(self._read_schemas())
            if not self.schemas:
                raise ConfigError(f"{self.place}: the MCP server has no tools; name another server")
        except (ToolStartError, ConfigError) as error:
            self._thread.run_sync(self._close_all())
            self._thread.stop()
            raise ConfigError(str(error)) from error

    async def open(self) -> OpenTools:
        """Connects to the server, or returns the shared connection."""
        thread, opening = self._loop_thread, _Opening()
        if self.address.is_shared:
            connection = await thread.run(self._share())
        else:
            try:
                connection = await thread.run(self._connect(opening))
            except asyncio.CancelledError:
                thread.call_soon(opening.abandon)
                raise

        async def call(name: str, arguments: Mapping[str, Any]) -> Outcome:
            return await thread.run(connection.call(name, arguments, self._call_seconds))

        async def close() -> None:
            if not self.address.is_shared:
                thread.call_soon(connection.request_stop)  # also where the caller is cancelled below
                await thread.run(connection.close())

        names = [schema["function"]["name"] for schema in self.schemas]
        calls: dict[str, ToolCall] = {name: partial(call, name) for name in names}
        return OpenTools(calls, close, {})

    async def close(self) -> None:
        """Closes all connections, and waits until the processes of the server have ended."""
        if self._thread is not None:
            await self._thread.run(self._close_all())
            self._thread.stop()
            self._thread = None

    @property
    def _loop_thread(self) -> LoopThread:
        if self._thread is None:
            raise ToolStartError(f"{self.place}: the MCP server is closed")
        return self._thread

    async def _read_schemas(self) -> tuple[dict[str, Any], ...]:
        if self.address.is_shared:
            return (await self._share()).schemas
        connection = await self._connect(_Opening())
        await connection.close()
        return connection.schemas

    async def _connect(self, opening: _Opening) -> McpConnection:
        """Opens a connection.

        A start costs a core for a second, so only one for each core runs at a time.
        """
        async with self._starts:
            connection = McpConnection(self.address)
            opening.connection = connection
            self._connections.add(connection)
            connection.add_end_callback(partial(self._connections.discard, connection))
            if opening.is_abandoned:
                connection.request_stop()
            await connection.open(self._start_seconds)
        return connection

    async def _share(self) -> McpConnection:
        """Returns the connection that all episodes share, a new one if its server has ended."""
        async with self._shared_lock:
            if self._shared is None or self._shared.is_broken:
                self._shared = await self._connect(_Opening())
            return self._shared

    async def _close_all(self) -> None:
        await asyncio.gather(*(connection.close() for connection in list(self._connections)))
