"""Ray runtimes whose processes are forked by `tests/forked.py`: each imports Ray, and a worker all that an actor needs.

The raylet itself is no Python; it starts workers and two agents.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
from ray._private import process_watcher, services
from ray._private.parameter import RayParams
from ray._raylet import Config  # type: ignore[attr-defined]

AGENTS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
"""Of the raylet's arguments, those that say how to start its agents."""
CLIENT = str(Path(__file__).with_name("setup_worker.py"))


def fork_processes_of_ray(before: Callable[[], None]) -> None:
    """Of the runtimes that this process starts from now on. before: called as one is about to be started."""
    start, make = services.start_ray_process, RayParams.__init__

    def started(command: Sequence[str], *how: Any, **options: Any) -> Any:
        script = [word for word in command[:3] if word.endswith(".py")]
        if command[0] == sys.executable and script and "-m" not in command:  # a module has no file to run
            command = [sys.executable, CLIENT, *command[command.index(script[0]) :]]
        command = [_by_client(word) if word.startswith(AGENTS) else word for word in command]
        return start(command, *how, **options)

    def made(params: RayParams, *how: Any, **options: Any) -> None:
        before()
        make(params, *how, **options)
        params.worker_path = params.setup_worker_path = CLIENT

    services.start_ray_process = started
    RayParams.__init__ = made


def _by_client(agent: str) -> str:
    return agent.replace(f"{sys.executable} -u ", f"{sys.executable} {CLIENT} ")


def begin_in_fork() -> None:
    """Ray reads its variables anew; a process of a raylet ends with it."""
    Config.initialize("")
    if "RAY_RAYLET_PID" in os.environ:
        process_watcher._check_parent = for_ever  # an agent's, whose parent is the server
        Thread(target=end_with, args=[int(os.environ["RAY_RAYLET_PID"])], daemon=True).start()


async def for_ever(*given: object) -> None:
    await asyncio.Event().wait()


def end_with(raylet: int) -> None:
    """What a Ray worker does by itself."""
    while psutil.pid_exists(raylet):
        time.sleep(0.5)
    os._exit(1)
