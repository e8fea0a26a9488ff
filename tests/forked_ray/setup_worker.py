"""What Ray starts in the place of a script of its own: it has `tests/forked.py` fork that, and ends with it.

Ray knows its own script, which applies a worker's variables and makes way for the worker, by this name. Where nobody
forks, or not with these variables, Ray's scripts run.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = Path(
    sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "ray", "_private", "workers"
)
CONTEXT = "--serialized-runtime-env-context="
FORK = "has "
"""How the name of a process begins that has a fork; its process id follows."""
OF_SETUP = ("--language=", CONTEXT)
"""Arguments of Ray's script of this name."""


def command_of(arguments: Sequence[str]) -> list[str]:
    """The script that is to run, with its arguments: a worker's, where a raylet asked."""
    script, *others = arguments
    if not script.endswith(".py"):
        script, others = __file__, [*arguments]
    if script == __file__:
        script = str(SCRIPTS / "default_worker.py")
    return [script, *others]


def variables_of(arguments: Sequence[str]) -> dict[str, str]:
    """That a worker is to have beside this process's."""
    contexts = [argument.removeprefix(CONTEXT) for argument in arguments if argument.startswith(CONTEXT)]
    return {name: value for context in contexts for name, value in json.loads(context)["env_vars"].items()}


def main(command: Sequence[str]) -> int:
    """The exit code of the fork, once it has ended."""
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tests.keeper import FORKS, Keeper

    own = [argument for argument in command if not argument.startswith(OF_SETUP)]
    try:
        variables = {**os.environ, **variables_of(command)}
        keeper = Keeper(os.environ[FORKS], own, os.getcwd(), variables, (1, 2), None)
        pid = keeper.told()
    except (KeyError, OSError, EOFError):
        for_ray = [str(SCRIPTS / "setup_worker.py"), *command] if len(own) < len(command) else command
        os.execv(sys.executable, [sys.executable, "-u", *for_ray])
    Path("/proc/self/comm").write_text(f"{FORK}{pid}")
    return keeper.told()


if __name__ == "__main__":
    sys.exit(main(command_of(sys.argv[1:])))
