"""Main loop of a worker process of environments, and the fork server that forks it.

    request (call id, episode, method, argument) ─▶ environment of the episode ─▶ (call id, is error, result)

A worker runs the environments of several episodes in one event loop. While a function holds the loop, the page that is
shared with `envs.environments.worker_pool` names the call and its start, so that the pool can kill a worker that hangs.
This module does not import torch.
"""

import asyncio
import mmap
import os
import pickle
import socket
import struct
import time
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

from config.schema.env import EnvConfig
from envs.environments.calls import CallRunner
from envs.environments.definition import EnvironmentDefinition, find_environment
from envs.environments.interface import Environment, EpisodeError
from envs.reward_workers.fork_server import RunWorker, run_fork_server
from envs.reward_workers.worker import IDLE, PROGRESS
from envs.user_code import describe_exception

LENGTH = struct.Struct("<Q")
"""Length of a pickled message, which follows."""
HEARTBEAT = struct.Struct("<d")
"""Last time at which the event loop ran, behind the running call in the shared page."""
BEAT_SECONDS = 0.2
_current_call: ContextVar[int] = ContextVar("current_call")


def serve(control_fd: int) -> None:
    """Runs the fork server of environment workers; its setup is the `env` section."""

    def load(env: EnvConfig) -> tuple[RunWorker, int]:
        definition = find_environment(env)
        assert definition is not None

        def run(connection: Connection, page: mmap.mmap) -> None:
            asyncio.run(EnvironmentWorker(definition, env.step_timeout_s, page).serve(connection))

        return run, int(env.reward_memory_gib * 2**30)

    run_fork_server(control_fd, load)


class SharedPage:
    """Observer that writes the running call, its start and the heartbeat into the shared page."""

    def __init__(self, page: mmap.mmap) -> None:
        self.page = page

    def enter(self, place: str) -> None:
        PROGRESS.pack_into(self.page, 0, _current_call.get(), time.monotonic())

    def leave(self) -> None:
        self.beat()
        PROGRESS.pack_into(self.page, 0, IDLE, 0.0)

    def beat(self) -> None:
        """Notes that the event loop runs."""
        HEARTBEAT.pack_into(self.page, PROGRESS.size, time.monotonic())

    async def beat_regularly(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(BEAT_SECONDS)


class EnvironmentWorker:
    """Environments of the episodes of one worker process.

    seconds: deadline of a call that waits; the pool enforces the deadline of a call that holds the process.
    """

    def __init__(self, definition: EnvironmentDefinition, seconds: float, page: mmap.mmap) -> None:
        self.definition, self.seconds, self.observer = definition, seconds, SharedPage(page)
        self.environments: dict[int, Environment] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, connection: Connection) -> None:
        """Answers requests until the client ends."""
        client = socket.socket(fileno=os.dup(connection.fileno()))
        reader, writer = await asyncio.open_unix_connection(sock=client)
        self._tasks.add(asyncio.create_task(self.observer.beat_regularly()))
        try:
            while True:
                request = await read_message(reader)
                task = asyncio.create_task(self._answer(writer, *request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # the client has ended; a method that still runs would delay the end of the loop

    async def _answer(
        self, writer: asyncio.StreamWriter, call_id: int, episode: int, method: str, argument: Any
    ) -> None:
        """Calls a method and sends its result, or the text of its error."""
        _current_call.set(call_id)
        try:
            write_message(writer, (call_id, False, await self._call(episode, method, argument)))
        except EpisodeError as error:
            write_message(writer, (call_id, True, str(error)))
        except BaseException as error:  # without an answer the pool would wait for ever
            write_message(writer, (call_id, True, f"{self.definition.name}.{method}: {describe_exception(error)}"))

    async def _call(self, episode: int, method: str, argument: Any) -> Any:
        if method == "reset":
            runner = CallRunner(self.seconds, self.observer, None)
            self.environments[episode] = self.definition.make(runner)
            return await self.environments[episode].reset(argument)
        if method == "step":
            return await self.environments[episode].step(argument)
        environment = self.environments.pop(episode, None)
        return None if environment is None else await environment.close()


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Reads one message.

    Raises:
        IncompleteReadError: the sender has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    """Writes one message into the buffer of a stream, which never blocks."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(LENGTH.pack(len(data)) + data)
