"""The process that `tests/forked.py` has scripts forked from.

`main` is its body. A fork ends as a script does, but that the modules are not taken apart at the end: after vLLM that
takes seconds.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.forked import at_load
from tests.namespaces import apart, asker, enter
from tests.vllm_once import prepare_vllm

IMPORTED = (
    "envs.tasks",
    "grpo_utils",
    "hydra._internal.hydra",
    "pydantic.v1.dataclasses",
    "ray._private.runtime_env.agent.runtime_env_agent",
    "ray.dashboard.head",
    "ray.dashboard.modules.data.data_head",
    "ray.dashboard.modules.event.event_head",
    "ray.dashboard.modules.job.job_agent",
    "ray.dashboard.modules.job.job_head",
    "ray.dashboard.modules.log.log_agent",
    "ray.dashboard.modules.node.node_head",
    "ray.dashboard.modules.reporter.reporter_agent",
    "ray.dashboard.modules.reporter.reporter_head",
    "reports.report",
    "rollout.engines.host",
    "rollout.stream",
    "run.build",
    "run.engines",
    "run.evaluation",
    "run.lockstep",
    "run.overlapped",
    "training.grpo_loss",
    "training.local_learner",
    "training.model_writer",
    "training.rank_host",
    "starlette.datastructures",
    "transformers.models.llama.modeling_llama",
    "peft",  # after `training`, which keeps quiet what peft imports
)
"""What the scripts import on their way to the first step, and Ray's own. Less vLLM, whose import changes torch, and
`ray.experimental` and Ray's aggregator, after whose import some forks begin with a thread: they do not get into the
namespaces of a cluster's node."""
OF_VLLM = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.lora.request",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.llama",
    "vllm.renderers.hf",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
)
"""What an engine of vLLM imports as it starts."""
OF_RAY = {"RAY_RAYLET_PID": "0", "RAY_JOB_ID": "01000000"}
"""What Ray's library reads from variables as it is loaded, and later never: a worker's raylet, which
`tests/forked_ray` replaces, and its job: here the first of a runtime."""
JOBS = (OF_RAY["RAY_JOB_ID"], "ffffffff", None)
"""Of processes that may read the above: of that job, of none yet, or no worker."""
_loaded_with: dict[str, str] = {}
"""Its variables before the imports."""
_set_by_imports: dict[str, str] = {}


@dataclass
class Kept:
    """A script, for whoever asked for it.

    child: the server's: the script itself, or what waits for it where it is in other namespaces. ended: a descriptor
    that can be read once the child is no more.
    """

    pid: int
    child: int
    ended: int
    asking: socket.socket

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def tell(self) -> None:
        """How it ended, to whoever still listens."""
        _, status = os.waitpid(self.child, 0)
        with suppress(BrokenPipeError):
            self.asking.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        self.close()

    def close(self) -> None:
        os.close(self.ended)
        self.asking.close()


def serve(listener: socket.socket, line: socket.socket, with_vllm: socket.socket | None) -> list[str]:
    """Fork, and keep what was forked, until the test process closes its end of `line`. Returns in a script's process
    alone, its command.

    with_vllm: its first request starts the fork that serves it from then on.
    """
    kept: list[Kept] = []
    while True:
        ours = [each for each in (listener, line, with_vllm) if each]
        theirs = [each for one in kept for each in (one.ended, one.asking)]
        readable, _, _ = select.select([*ours, *theirs], [], [])
        if line in readable:
            for one in kept:
                one.end()
            sys.exit()
        if with_vllm in readable:
            if os.fork() == 0:
                close(listener, *kept)
                load_vllm()
                return serve(with_vllm, line, None)
            with_vllm.close()
            with_vllm = None
        for one in list(kept):
            if one.ended in readable:
                one.tell()
                kept.remove(one)
            elif one.asking in readable:  # it is closed: nobody waits for the script any more
                one.end()
        if listener in readable:
            script = answer(listener.accept()[0], kept, ours)
            if script is not None:
                return script


def close(*each: "socket.socket | Kept") -> None:
    for one in each:
        one.close()


def answer(asking: socket.socket, kept: list[Kept], ours: Sequence[socket.socket]) -> list[str] | None:
    """Fork the script, if this process may, and tell its process id. Returns its command in its own process alone."""
    size, (stdout, stderr), _, _ = socket.recv_fds(asking, 8, 2)
    request = asking.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    command, cwd, environment, beside = json.loads(request)
    if suits(environment):
        child, pid = fork_beside(beside or asker(asking))
        if pid == 0:
            close(asking, *ours, *kept)
            return become(command, cwd, environment, stdout, stderr)
        kept.append(Kept(pid, child, os.pidfd_open(child), asking))
        with suppress(BrokenPipeError):
            asking.sendall(f"{pid}\n".encode())
    else:
        asking.close()
    os.close(stdout)
    os.close(stderr)
    return None


def fork_beside(other: int) -> tuple[int, int]:
    """A fork in the namespaces of another process: the child to wait for, and the fork's process id; 0 in the fork."""
    if not apart(other):
        pid = os.fork()
        return pid, pid
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        enter(other)
        pid = os.fork()
        if pid:
            os.write(tell, str(pid).encode())
        os.close(tell)
        if pid:
            end_as(os.waitpid(pid, 0)[1])
        return 0, 0
    os.close(tell)
    with os.fdopen(told) as number:
        return child, int(number.read())


def end_as(status: int) -> NoReturn:
    """As a process with this status has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def suits(environment: Mapping[str, str]) -> bool:
    """Whether modules that a script with these variables loads would be as they are here."""
    return environment.get("RAY_JOB_ID") in JOBS and at_load(environment) == at_load(_loaded_with)


def become(command: list[str], cwd: str, environment: dict[str, str], stdout: int, stderr: int) -> list[str]:
    """What a new interpreter finds: streams, folder, variables, import path, arguments, signals, chance."""
    import numpy as np

    for descriptor, end in ((1, stdout), (2, stderr)):
        os.dup2(end, descriptor)
    # What they were made for may have been a file, and a pipe cannot be sought in.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, sys.stderr.encoding, "backslashreplace", closefd=False)  # noqa: SIM115
    for end in {stdout, stderr}:
        os.close(end)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({**_set_by_imports, **environment})
    ours = sys.path.index("")  # as of `python -c`, which some import has put a folder before
    beside = [Path(command[0]).resolve().parent, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[ours : ours + 1] = [str(folder) for folder in beside if folder]
    sys.argv[:] = command
    sys.orig_argv[:] = [sys.executable, *command]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()
    return command


def load() -> None:
    atexit.register(end_at_once)  # before any import does: it is the last to be called
    os.environ.update(OF_RAY)
    _loaded_with.update(os.environ)
    compose_once()
    make_once()
    _import(IMPORTED)
    end_with_less()
    _set_by_imports.update(os.environ.items() - _loaded_with.items())


def make_once() -> None:
    """What the first run of a process makes: regular expressions for the weights of all kinds of models, our schema."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from config import saved_settings

    get_checkpoint_conversion_mapping("llama")
    saved_settings._schema()


def end_with_less() -> None:
    """As a script ends, Ray's library imports what it has to shut down, used or not, and torch tells a log that nobody
    reads how long it has compiled: four fifths of a short script's time."""
    import ray
    import torch

    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    atexit.unregister(ray._private.worker.shutdown)
    atexit.register(lambda: ray.shutdown(_exiting_interpreter=True) if ray.is_initialized() else None)


def compose_once() -> None:
    """Hydra's plugins are loaded, our dataclasses are its own, and its parsers have seen what our configs hold. To know
    its mode it composes all once more, though only the command line can set that: a sixth of a short run's time."""
    from hydra import compose, initialize_config_dir
    from hydra._internal.hydra import Hydra
    from hydra.core.plugins import Plugins

    from config.composition import CONFIG_DIR, register_schema, to_config

    mode = Hydra.get_mode
    Hydra.get_mode = lambda hydra, config_name, overrides: (
        mode(hydra, config_name, overrides) if "hydra.mode" in " ".join(overrides) else None
    )
    Plugins.instance()
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        to_config(compose("grpo_quickstart", overrides=["train.seed=1"]))


def load_vllm() -> None:
    """Unheard: a run has what it prints in a file. The variables that it sets do not stay, as after an engine's start
    (`rollout.engines.vllm_settings.process_state_kept`)."""
    from rollout.engines.vllm_settings import output_into, set_environment

    set_environment()
    with output_into(os.devnull):
        _import(OF_VLLM)
        prepare_vllm()


def _import(names: Sequence[str]) -> None:
    gc.disable()
    for name in names:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import has started threads, which a fork does not have")
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of torch's libraries: no fork takes them apart
    gc.collect()
    gc.freeze()
    gc.enable()


_exit_code: int | None = None
"""Of a script that has ended well or by `sys.exit`."""


def end_at_once() -> None:
    """Of a script that has a code to end with; what raises ends as Python lets it."""
    if _exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


def run(script: str) -> None:
    global _exit_code
    try:
        runpy.run_path(script, run_name="__main__")
        _exit_code = 0
    except SystemExit as end:
        _exit_code = end.code if isinstance(end.code, int) else None
        raise


def main(plain: int, with_vllm: int, line: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the test process ends us
    listener, ends, of_vllm = (socket.socket(fileno=descriptor) for descriptor in (plain, line, with_vllm))
    if ends in select.select([listener, of_vllm, ends], [], [])[0]:
        return  # nobody asked for a fork
    load()
    # Imports Ray, whose variables `load` sets before.
    from tests.forked_ray import begin_in_fork, fork_processes_of_ray

    fork_processes_of_ray(lambda: None)
    script, *_ = serve(listener, ends, of_vllm)
    begin_in_fork()
    run(script)
