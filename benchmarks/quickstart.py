"""The quickstart through both schedules: reward and wall time, one process after the other, in turn.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--engine thread|actor] [key=value ...]

Each seed runs grpo.py, then grpo_async.py with train.max_policy_age=1 and either way of treating stale groups. Two
cores are enough: one for the engine and one for the learner. `reward` is the mean of the last five optimizer steps;
`to 0.8` the seconds of training until five steps in a row reached 0.8 on average; `cpu` includes all processes.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ASYNC = ("train.max_policy_age=1", "inference_model.update=keep")
RUNS = {
    "lockstep": ("grpo.py",),
    "async wait": ("grpo_async.py", *ASYNC, "train.stale_groups=wait"),
    "async drop": ("grpo_async.py", *ASYNC, "train.stale_groups=drop"),
}


@dataclass
class Outcome:
    """Seconds are of the whole process, its start included, except `to_target`."""

    reward: float
    wall_s: float
    cpu_s: float
    to_target_s: float
    idle_learner: float


def run_once(arguments: tuple[str, ...], seed: int, overrides: list[str]) -> Outcome:
    """Raises RuntimeError with the script's output where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            arguments[0],
            "--config-name",
            "grpo_quickstart",
            f"hydra.run.dir={folder}",
        ]
        command += ["logging.progress=false", f"train.seed={seed}", *arguments[1:], *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        before, began = _child_cpu(), time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward/mean"] for row in rows]
    return Outcome(
        reward=statistics.mean(rewards[-5:]),
        wall_s=wall,
        cpu_s=_child_cpu() - before,
        to_target_s=_seconds_to(0.8, rows),
        idle_learner=statistics.mean(row["idle/learner"] for row in rows),
    )


def _child_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds_to(target: float, rows: list[dict[str, Any]]) -> float:
    """Of the training loop; infinite where the target is not reached."""
    seconds, recent = 0.0, []
    for row in rows:
        seconds += sum(row[f"time/{phase}_s"] for phase in ("collect", "optimize", "push"))
        recent = [*recent[-4:], row["reward/mean"]]
        if len(recent) == 5 and statistics.mean(recent) >= target:
            return seconds
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--engine", choices=("thread", "actor"), default="thread", help="where grpo_async.py's engine runs"
    )
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in RUNS}
    print("run          seed  reward  wall s   cpu s  to 0.8 s  learner idle")
    for seed in asked.seeds:
        for name, arguments in RUNS.items():
            extra = ["ray.enabled=true"] if asked.engine == "actor" and name != "lockstep" else []
            one = run_once(arguments, seed, [*extra, *asked.overrides])
            outcomes[name].append(one)
            print(
                f"{name:12s} {seed:4d}  {one.reward:6.3f}  {one.wall_s:6.1f}  {one.cpu_s:6.1f}  {one.to_target_s:8.1f}"
                f"  {one.idle_learner:6.2f}",
                flush=True,
            )
    print("medians")
    for name, ones in outcomes.items():
        reward, wall = (statistics.median(getattr(one, key) for one in ones) for key in ("reward", "wall_s"))
        target = statistics.median(one.to_target_s for one in ones)
        print(f"{name:12s}       {reward:6.3f}  {wall:6.1f}          {target:8.1f}")


if __name__ == "__main__":
    main()
