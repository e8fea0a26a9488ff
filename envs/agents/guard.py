"""Guard of one agent: starts the agent, reads its output, and ends it.

    run ──EpisodeRequest──▶ guard ──fork──▶ init_process ──fork──▶ agent
        ◀──EpisodeReply────       ◀──output, errors, report, status──

The guard is a fork of the fork server of `envs.agents.fork_server`. It removes the agent's temporary folder after its
processes have ended. It ends the agent when the run closes its side of the connection or ends, and when the fork server
ends. Messages are JSON after their length.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from envs.agents.agent_process import AgentCall
from envs.agents.init_process import (
    EXITED,
    MAX_PROCESSES,
    MAX_THREADS,
    STATUS,
    StopRequest,
    raise_stop,
    run_init,
    set_process_option,
)
from envs.sandbox import isolation
from envs.sandbox.supervisor import empty_directory

LENGTH = struct.Struct("<Q")
MAX_OUTPUT_BYTES = 16 * 2**20
"""Largest output, standard output and standard error together."""
TAIL_BYTES = 2**16
"""Size of the end of each stream that is kept."""
NAMESPACES = isolation.CLONE_NEWPID | isolation.CLONE_NEWNS
READ_BYTES = 2**16
END_INTERVAL = 0.002
"""Seconds between two signals to end an agent."""


@dataclass(frozen=True)
class EpisodeRequest:
    """Request of the run. variables: environment of the agent. record: of the example."""

    variables: dict[str, str]
    record: dict[str, Any]


@dataclass(frozen=True)
class EpisodeReply:
    """End of an agent.

    fault: limit that the agent exceeded, or the failure to start it; empty if it ended by itself. exit_code: negative
    for a signal. output, errors: end of its standard output and standard error. report: JSON of a function's result or
    of an error. in_namespace: whether it had a process namespace of its own.
    """

    fault: str
    exit_code: int
    output: str
    errors: str
    report: str
    in_namespace: bool


@dataclass
class Stream:
    """End of what a pipe carried."""

    tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self.tail += data
        del self.tail[:-TAIL_BYTES]

    def text(self) -> str:
        return self.tail.decode(errors="replace")


@dataclass(frozen=True)
class Guard:
    """Guard of one agent.

    command, function: as in `AgentCall`. root: folder for the temporary folders of episodes. in_namespace: whether
    agents get a process namespace of their own.
    """

    command: tuple[str, ...]
    function: Any
    root: str
    in_namespace: bool

    def serve(self, connection: Connection) -> None:
        """Serves one episode.

        Raises:
            OSError: the run has ended.
        """
        run = socket.socket(fileno=connection.fileno())
        signal.signal(signal.SIGTERM, raise_stop)
        set_process_option(isolation.PR_SET_PDEATHSIG, signal.SIGTERM)
        folder = ""
        try:
            request = EpisodeRequest(**json.loads(_receive(run)))
            folder = episode_folder(self.root, os.getpid())
            os.mkdir(folder, 0o700)
            reply = self._run_agent(request, folder, run)
        except StopRequest:
            reply = None
        except OSError as error:  # such as a full disk, or no further process
            reply = EpisodeReply(f"it cannot be started: {error}", 0, "", "", "", self.in_namespace)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if folder:
                remove_folder(folder)
        if reply is not None:
            data = json.dumps(asdict(reply)).encode()
            run.sendall(LENGTH.pack(len(data)) + data)
        run.detach()

    def _run_agent(self, request: EpisodeRequest, folder: str, run: socket.socket) -> EpisodeReply:
        """Runs the agent to its end.

        Raises:
            StopRequest: the run or the fork server ends the agent.
        """
        path = os.path.join(folder, "example.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(request.record, file)
        variables = request.variables | {"GRPO_EXAMPLE": path, "TMPDIR": folder}
        (output, output_end), (errors, errors_end) = os.pipe(), os.pipe()
        (report, report_end), (status, status_end) = os.pipe(), os.pipe()
        call = AgentCall(self.command, self.function, variables, request.record, output_end, errors_end, report_end)
        if self.in_namespace:
            isolation.unshare_namespaces(NAMESPACES, keeps_ids=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler during a fork cannot raise
        init = os.fork()
        if init == 0:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                run.close()
                for descriptor in (output, errors, report, status):
                    os.close(descriptor)
                run_init(call, status_end, self.in_namespace)
            finally:
                os._exit(1)
        for descriptor in (output_end, errors_end, report_end, status_end):
            os.close(descriptor)
        streams = {descriptor: Stream() for descriptor in (output, errors, report, status)}
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            fault = _read_streams(run, streams, status)
        finally:
            self._end(init)
        _drain(streams)
        status_bytes = streams[status].tail
        kind, code = STATUS.unpack(status_bytes) if status_bytes else (EXITED, 0)
        if not fault and not status_bytes:
            fault = "the helper process that started it was killed or failed"
        elif not fault and kind != EXITED:
            fault = f"it started more than {MAX_PROCESSES} processes or {MAX_THREADS} threads, and was killed"
        text = {descriptor: stream.text() for descriptor, stream in streams.items()}
        return EpisodeReply(fault, code, text[output], text[errors], text[report], self.in_namespace)

    def _end(self, init: int) -> None:
        """Ends the agent's processes, and waits for their end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends the same way
        number = signal.SIGKILL if self.in_namespace else signal.SIGTERM
        while not os.waitpid(init, os.WNOHANG)[0]:  # Python loses an exception of a handler that runs in a callback
            os.kill(init, number)
            time.sleep(END_INTERVAL)


def _read_streams(run: socket.socket, streams: dict[int, Stream], status: int) -> str:
    """Reads the pipes until the agent ends; returns the limit that it exceeds.

    Raises:
        StopRequest: the run ends the agent.
    """
    poll = select.poll()
    for descriptor in (run.fileno(), *streams):
        poll.register(descriptor, select.POLLIN)
    total = 0
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == run.fileno():
                raise StopRequest
            data = os.read(descriptor, READ_BYTES)
            total += len(data)
            streams[descriptor].add(data)
            if not data:
                poll.unregister(descriptor)
                if descriptor == status:
                    return ""
        if total > MAX_OUTPUT_BYTES:
            return f"it wrote more than {MAX_OUTPUT_BYTES // 2**20} MiB of output, and was killed"


def _drain(streams: dict[int, Stream]) -> None:
    """Reads what the pipes still hold, and closes them."""
    for descriptor, stream in streams.items():
        os.set_blocking(descriptor, False)
        with suppress(BlockingIOError):  # a process that outlived the agent holds the pipe
            for _ in range(MAX_OUTPUT_BYTES // READ_BYTES):
                data = os.read(descriptor, READ_BYTES)
                if not data:
                    break
                stream.add(data)
        os.close(descriptor)


def episode_folder(root: str, guard_pid: int) -> str:
    """Returns the temporary folder of an episode."""
    return os.path.join(root, str(guard_pid))


def remove_folder(folder: str) -> None:
    """Removes a folder with its content, however deeply nested."""
    try:
        empty_directory(folder)
        os.rmdir(folder)
    except OSError as error:
        print(f"an agent's temporary folder {folder} cannot be removed: {error}", file=sys.stderr, flush=True)


def _receive(run: socket.socket) -> bytes:
    """Receives one message.

    Raises:
        StopRequest: the run has ended the episode.
    """
    with run.makefile("rb") as file:
        header = file.read(LENGTH.size)
        data = file.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""
    if not data:
        raise StopRequest
    return data
