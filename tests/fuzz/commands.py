"""Runs command lines of grpo.py in forks of a process with all imports loaded.

This module contains no tests.
"""

import json
import multiprocessing
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import grpo
import torchgrpo.rollout.engines.build_engines
import torchgrpo.rollout.group_stream
import torchgrpo.run.callbacks
import torchgrpo.training.learner  # noqa: F401
from grpo_utils import launch
from torchgrpo.run.lockstep_run import LockstepRun

ROOT = Path(__file__).resolve().parent.parent.parent
MEMORY = 16 * 2**30
SMALL_RUN = (
    "env.num_envs=2",
    "env.repeats=4",
    "train.total_dialog_turns=16",
    f"model.name={ROOT}/torchgrpo/models/quickstart",
    "inference_model.request_timeout_s=20",
    "env.reward_timeout_s=1",
    "env.reward_workers=1",
    "env.reward_memory_gib=1",
    "logging.progress=false",
)


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command.

    code: exit code; None for a command that was still running at the time limit.
    """

    code: int | None
    output: str
    run_dir: Path

    @property
    def has_gradient_step(self) -> bool:
        """Whether the metrics have an optimizer step with a nonzero gradient."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return any(json.loads(line).get("grad_norm", 0) > 0 for line in lines)

    @property
    def violation(self) -> str | None:
        """The forbidden outcome of the command, or None.

        Forbidden are a traceback, an end by a signal, and a failure without a message.
        """
        if self.code is None:
            return None
        if "Traceback" in self.output:
            return "a traceback"
        if self.code < 0:
            return f"killed by signal {-self.code}"
        if self.code and not self.output.strip():
            return f"exit code {self.code} and not a word"
        return None


def _run_in_fork(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path.insert(0, folder)
    sys.argv = ["grpo.py", *arguments]
    launch(grpo.train, LockstepRun)


def run_command(
    folder: Path, *overrides: str, timeout_s: float = 60.0, environment: dict[str, str] | None = None
) -> CommandResult:
    """Runs a small quickstart with further overrides in `folder`."""
    run_dir = folder / "run"
    arguments = ["--config-name", "grpo_quickstart", f"hydra.run.dir={run_dir}", *SMALL_RUN, *overrides]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.commands"])
    process = context.Process(target=_run_in_fork, args=(arguments, str(folder), environment or {}))
    process.start()
    process.join(timeout_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    file = folder / "output"
    output = file.read_bytes().decode(errors="replace") if file.exists() else ""
    return CommandResult(code, output, run_dir)
