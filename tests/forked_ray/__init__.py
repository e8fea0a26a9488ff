"""Ray runtimes whose processes are forked by `tests/forked.py`: each imports Ray, and a worker all that an actor needs.

The raylet's two agents are not: they look for the raylet as their parent.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray._private import services
from ray._private.parameter import RayParams

CLIENT = str(Path(__file__).with_name("setup_worker.py"))


def fork_processes_of_ray(before: Callable[[], None]) -> None:
    """Of the runtimes that this process starts from now on. before: called as one is about to be started."""
    start, make = services.start_ray_process, RayParams.__init__

    def started(command: Sequence[str], *how: Any, **options: Any) -> Any:
        script = [word for word in command[:3] if word.endswith(".py")]
        if command[0] == sys.executable and script:
            command = [sys.executable, CLIENT, *command[command.index(script[0]) :]]
        return start(command, *how, **options)

    def made(params: RayParams, *how: Any, **options: Any) -> None:
        before()
        make(params, *how, **options)
        params.worker_path = params.setup_worker_path = CLIENT

    services.start_ray_process = started
    RayParams.__init__ = made
