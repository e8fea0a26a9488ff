"""Fork server of agents: imports a function once, forks a guard for each episode."""

import mmap
import os
import resource
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from config.schema.agent import split_command
from config.schema.errors import ConfigError
from envs.agents.guard import NAMESPACES, Guard, remove_folder
from envs.reward_workers.fork_server import RunWorker, run_fork_server
from envs.sandbox import isolation
from envs.user_code import load_user_object


@dataclass(frozen=True)
class AgentSetup:
    """Setup of the fork server.

    agent: value of `env.agent`. root: folder for temporary folders, which the fork server removes at its end.
    allow_namespaces: False as on a machine that allows none.
    """

    agent: str
    root: str
    allow_namespaces: bool = True


def serve(control_fd: int) -> None:
    """Runs the fork server of agents; its setup is an `AgentSetup`."""
    root = ""
    try:

        def load(setup: AgentSetup) -> tuple[RunWorker, int]:
            nonlocal root
            root = setup.root
            command = split_command(setup.agent)
            function = None if command else load_user_object("env.agent", setup.agent)
            if not command and not callable(function):
                raise ConfigError(
                    f"env.agent={setup.agent}: {function!r} is no function; define it by def or async def"
                )
            guard = Guard(command, function, root, setup.allow_namespaces and can_use_namespaces())

            def run(connection: Connection, page: mmap.mmap) -> None:
                guard.serve(connection)

            return run, resource.getrlimit(resource.RLIMIT_AS)[1]

        run_fork_server(control_fd, load)
    finally:
        if root:
            remove_folder(root)


def can_use_namespaces() -> bool:
    """Whether this machine allows a process namespace with its own /proc."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        try:
            isolation.unshare_namespaces(NAMESPACES, keeps_ids=True)
            init = os.fork()
            if init == 0:
                isolation.hide_other_processes()
                isolation.drop_host_capabilities()
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 0xFF)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
