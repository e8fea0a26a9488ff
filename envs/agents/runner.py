"""Runs agents, the programs of `env.agent` that play episodes, each in processes of its own.

    run(example) ──FORK──▶ fork server ──fork──▶ guard ──▶ init_process ──▶ agent ──HTTP──▶ server of the run
                 ◀──────────── EpisodeReply ──────┘

A cancelled `run` ends the agent and all processes that it started before it returns. So do a limit that an agent
exceeds, the end of the agent, and the end of this process. The fork server removes the temporary folders.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from dataclasses import asdict
from typing import Any

from config.schema.agent import split_command
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.agents.example_record import example_record
from envs.agents.fork_server import AgentSetup
from envs.agents.guard import LENGTH, EpisodeReply, EpisodeRequest, episode_folder, remove_folder
from envs.agents.results import AgentResult, read_last_line, read_value
from envs.agents.variables import episode_variables, passed_variables
from envs.environments.interface import EpisodeError
from envs.example import Example
from envs.reward_workers.fork_server_process import ForkServerDied, ForkServerProcess
from envs.user_calls import DaemonThread

SERVE = "envs.agents.fork_server:serve"
END_SECONDS = 30.0
"""Time for an agent's guard to end all processes and remove files; then it is killed."""
ERROR_LINES, ERROR_CHARACTERS = 20, 2000
"""Size of the end of standard error in messages."""
GuardConnection = tuple[int, asyncio.StreamReader, asyncio.StreamWriter]
"""Process id of a guard, and the connection to it."""
log = logging.getLogger(__name__)


class AgentRunner:
    """Runs the agents of a run, any number at a time.

    Raises:
        ConfigError: there is no such program, the function cannot be imported, or a variable of `env.agent_env` is
            missing.
    """

    def __init__(self, env: EnvConfig, allow_namespaces: bool = True) -> None:
        assert env.agent is not None
        self.agent, self.columns = env.agent, env.agent_columns
        self.variables = passed_variables(env.agent_env)
        words = split_command(env.agent)
        self.is_function = not words
        if words and shutil.which(words[0], path=self.variables.get("PATH")) is None:
            hint = f"; for a script, set env.agent='python {env.agent}'" if words[0].endswith(".py") else ""
            raise ConfigError(
                f"env.agent={env.agent}: there is no program {words[0]!r}; correct its name or PATH{hint}"
            )
        self._allow_namespaces = allow_namespaces
        self._roots: list[str] = []
        self._requests = DaemonThread("agents")
        self._endings: set[asyncio.Task[None]] = set()
        self._has_logged_isolation = self._is_closed = False
        self._fork_server = self._start_fork_server()

    def _start_fork_server(self) -> ForkServerProcess:
        self._roots.append(tempfile.mkdtemp(prefix="grpo_agents_"))
        setup = AgentSetup(self.agent, self._roots[-1], self._allow_namespaces)
        fork_server = ForkServerProcess(SERVE, setup, self.variables)
        problem = fork_server.wait_until_ready("env.agent")
        if problem is None:
            return fork_server
        fork_server.close()
        hint = ". Keys and addresses are set when the function is called, not when it is imported"
        problem = problem if problem.startswith("env.agent=") else f"env.agent={self.agent}: {problem}"
        raise ConfigError(f"{problem}{hint if 'API_KEY' in problem.upper() else ''}")

    async def run(self, example: Example, base_url: str, api_key: str) -> AgentResult:
        """Runs the agent for one episode; nothing of it runs afterwards, also after a cancellation.

        base_url: of the server with the model, `http://HOST:PORT/v1`. api_key: of this episode.

        Raises:
            EpisodeError: the agent failed in any way; the message has its exit code and the end of standard error.
            ConfigError: the fork server died, and its successor cannot import the function.
        """
        if self._is_closed:
            raise EpisodeError(f"env.agent={self.agent}: the run has ended")
        request = EpisodeRequest(self.variables | episode_variables(base_url, api_key), self._record(example))
        starting = asyncio.create_task(self._start_guard())
        try:
            guard = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(self._spawn_ending(self._end_unused(starting)))
            raise
        _, reader, writer = guard
        try:
            data = json.dumps(asdict(request)).encode()
            writer.write(LENGTH.pack(len(data)) + data)
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            reply = EpisodeReply(**json.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EpisodeError(f"env.agent={self.agent}: the process that guards it was killed") from error
        finally:
            await asyncio.shield(self._spawn_ending(self._end(*guard)))
        self._log_isolation(reply.in_namespace)
        return self._read_reply(reply)

    def _record(self, example: Example) -> dict[str, Any]:
        try:
            text = json.dumps(example_record(example, self.columns), default=str, allow_nan=False)
            record: dict[str, Any] = json.loads(text)
            return record
        except (TypeError, ValueError) as error:
            raise EpisodeError(
                f"env.agent_columns={self.columns}: row {example.row} cannot be written as JSON: {error}"
            ) from error
        except KeyError as error:
            raise EpisodeError(
                f"env.agent_columns={self.columns}: row {example.row} has no column {error}; its columns are "
                f"{', '.join(map(str, example.row_data)) or 'none'}"
            ) from error

    def _fork(self) -> tuple[int, int]:
        """Forks a guard; returns its process id and the descriptor of its connection."""
        for _ in range(2):
            try:
                pid, descriptor, page = self._fork_server.fork()
            except (ForkServerDied, TimeoutError):  # its agents end with it
                self._replace_fork_server()
            else:
                page.close()
                return pid, descriptor
        raise EpisodeError(f"env.agent={self.agent}: the fork server of agents died or did not reply, twice")

    def _kill(self, pid: int) -> None:
        """Kills what is left of an episode's guard and its processes."""
        try:
            self._fork_server.kill(pid)
        except ForkServerDied:
            log.warning("env.agent=%s: the fork server of agents died; the next episode starts another", self.agent)
        except TimeoutError:
            self._replace_fork_server()
        for root in self._roots:  # a guard that was killed leaves its folder
            if os.path.isdir(folder := episode_folder(root, pid)):
                remove_folder(folder)

    def _replace_fork_server(self) -> None:
        self._fork_server.close()
        self._fork_server = self._start_fork_server()

    async def _request(self, function: Any, *arguments: Any) -> Any:
        """Calls a function that waits for the fork server in the thread of requests."""
        result, error = await self._requests.submit(lambda: function(*arguments))
        if error is not None:
            raise error
        return result

    def _spawn_ending(self, ending: Any) -> "asyncio.Task[None]":
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def _start_guard(self) -> GuardConnection:
        pid, descriptor = await self._request(self._fork)
        return pid, *await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))

    async def _end_unused(self, starting: "asyncio.Task[GuardConnection]") -> None:
        """Ends the guard of an episode that was cancelled before the guard had a request."""
        try:
            guard = await starting
        except Exception as error:  # nobody waits for the episode
            log.warning("env.agent=%s: the agent of a cancelled episode was not started: %s", self.agent, error)
            return
        await self._end(*guard)

    async def _end(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ends a guard, which first ends all processes of its agent and removes their files."""
        try:
            writer.write_eof()
            await asyncio.wait_for(reader.read(-1), END_SECONDS)
        except TimeoutError:
            log.warning("env.agent=%s: its guard did not end within %g s, and is killed", self.agent, END_SECONDS)
        except OSError:
            pass  # it has ended
        writer.close()
        if not self._is_closed:
            await self._request(self._kill, pid)

    def _log_isolation(self, in_namespace: bool) -> None:
        if in_namespace or self._has_logged_isolation:
            return
        self._has_logged_isolation = True
        log.warning(
            "env.agent: this machine allows no process namespaces, so agents can read memory and environment of the "
            "run, and a process that an agent starts may outlive it if the agent kills the run's helpers"
        )

    def _read_reply(self, reply: EpisodeReply) -> AgentResult:
        """Returns the result. Raises EpisodeError for every fault."""
        fault = reply.fault or _end_fault(reply.exit_code)
        try:
            report = json.loads(reply.report or "{}")
            if not isinstance(report, dict):
                raise ValueError(f"the report of its result is {reply.report[:200]!r}")
            fault = report.get("error", fault)
            if not fault and self.is_function and not report:
                fault = "it ended its process instead of returning"
            if not fault:
                return read_value(report) if self.is_function else read_last_line(reply.output)
        except (ValueError, RecursionError) as error:  # the agent itself can write a report
            fault = fault or str(error)
        raise EpisodeError(f"env.agent={self.agent}: {fault}{_end_of_errors(reply.errors)}")

    async def close(self) -> None:
        """Ends all agents. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._request(self._fork_server.close)
        for root in self._roots:  # a fork server that was killed leaves its folder
            if os.path.isdir(root):
                remove_folder(root)
        self._requests.stop()


def check_agent_start(env: EnvConfig) -> None:
    """Checks that the agent of `env.agent` can start, before models and engines load.

    Raises:
        ConfigError: as `AgentRunner`.
    """
    asyncio.run(AgentRunner(env).close())


def _end_fault(exit_code: int) -> str:
    """Describes a bad exit code; returns an empty text for 0.

    exit_code: negative for a signal.
    """
    if exit_code >= 0:
        return f"exit code {exit_code}" if exit_code else ""
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-exit_code}"


def _end_of_errors(errors: str) -> str:
    """Returns the last lines of standard error as the end of a message."""
    lines = [line for line in errors.splitlines() if line.strip()][-ERROR_LINES:]
    text = "\n".join(lines)[-ERROR_CHARACTERS:]
    printable = "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
    return f"; the end of its standard error:\n{printable}" if printable else ""
