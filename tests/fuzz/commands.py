"""Command lines of grpo.py by the hundred, each in a fork of a process that has imported all it needs.

Not a test file.
"""

import json
import multiprocessing
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import grpo
import torchgrpo.rollout.engines.build
import torchgrpo.rollout.stream
import torchgrpo.run.callbacks
import torchgrpo.training.learner  # noqa: F401
from grpo_utils import launch
from torchgrpo.run.lockstep import Lockstep

ROOT = Path(__file__).resolve().parent.parent.parent
MEMORY = 16 * 2**30
FEW = (
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
class Ended:
    """code: exit status; None where the command was still running when its time was over."""

    code: int | None
    said: str
    run_dir: Path

    @property
    def trained(self) -> bool:
        """Whether a row of an optimizer step with a gradient was written."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return any(json.loads(line).get("grad_norm", 0) > 0 for line in lines)

    @property
    def fault(self) -> str | None:
        """What no command may do: a traceback, silence about a failure, success with nothing trained."""
        if self.code is None:
            return None
        if "Traceback" in self.said:
            return "a traceback"
        if self.code < 0:
            return f"killed by signal {-self.code}"
        if self.code and not self.said.strip():
            return f"exit code {self.code} and not a word"
        return None


def _command(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    said = os.open("said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path.insert(0, folder)
    sys.argv = ["grpo.py", *arguments]
    launch(grpo.train, Lockstep)


def command(
    folder: Path, *overrides: str, timeout_s: float = 60.0, environment: dict[str, str] | None = None
) -> Ended:
    """grpo.py --config-name grpo_quickstart with a few completions, what is given behind them, in `folder`."""
    run_dir = folder / "run"
    arguments = ["--config-name", "grpo_quickstart", f"hydra.run.dir={run_dir}", *FEW, *overrides]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.commands"])
    process = context.Process(target=_command, args=(arguments, str(folder), environment or {}))
    process.start()
    process.join(timeout_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    said = (folder / "said").read_bytes().decode(errors="replace") if (folder / "said").exists() else ""
    return Ended(code, said, run_dir)
