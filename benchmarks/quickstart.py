"""Measures reward and time of the quickstart under both schedules, or under several presets.

    python benchmarks/quickstart.py [key=value ...] [--seeds 0 1 2]
    python benchmarks/quickstart.py --presets grpo dapo [--seeds 0 1]        (`--presets all`: every one)

Without `--presets`, each seed runs grpo.py, then grpo_async.py with train.max_policy_age=1 and each value of
train.stale_groups (`ray.enabled=true` runs the engine in a Ray actor). With `--presets`, each seed runs grpo.py
with `policy=NAME`. The runs follow one another. `first` is the reward of the first optimizer step, `last` the
mean of the last five steps, `to 0.75` the seconds of training until the mean of five consecutive steps reached
0.75. `cpu` includes all processes of the run.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import QUIET, ROOT, describe_machine, make_parser
from config.schema.policy import PRESETS, load_policy

ASYNC = ("train.max_policy_age=1", "inference_model.update=keep")
SCHEDULES = {
    "lockstep": ("grpo.py",),
    "async wait": ("grpo_async.py", *ASYNC, "train.stale_groups=wait"),
    "async drop": ("grpo_async.py", *ASYNC, "train.stale_groups=drop"),
}
PRESET_NAMES = sorted(
    path.stem
    for path in PRESETS.glob("*.yaml")
    if not (policy := load_policy(path.stem)).distill_coef or policy.teacher_prompt
)
"""Names of the presets that need no other model as a teacher."""
WINDOW, TARGET = 5, 0.75


@dataclass
class RunResult:
    """Rewards and times of one run.

    Seconds include the start of the process, except in `to_target_s`, which is infinite if the run never
    reaches the target.
    """

    first: float
    last: float
    wall_s: float
    cpu_s: float
    to_target_s: float
    idle_learner: float


def run_once(script_and_overrides: Sequence[str], seed: int) -> RunResult:
    """Runs a script once and returns its result.

    Raises:
        RuntimeError: the run failed; the message contains the output of the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, *overrides = script_and_overrides
        command = [sys.executable, script, "--config-name", "grpo_quickstart", f"hydra.run.dir={folder}"]
        command += [*QUIET, f"train.seed={seed}", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        before, start = _children_cpu_seconds(), time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rewards, seconds, to_target = [], 0.0, float("inf")
    for row in rows:
        seconds += sum(row[f"time/{phase}_s"] for phase in ("collect", "optimize", "push"))
        rewards.append(row["reward/mean"])
        if len(rewards) >= WINDOW and statistics.mean(rewards[-WINDOW:]) >= TARGET:
            to_target = min(to_target, seconds)
    idle = statistics.mean(row["idle/learner"] for row in rows)
    last = statistics.mean(rewards[-WINDOW:])
    return RunResult(rewards[0], last, wall, _children_cpu_seconds() - before, to_target, idle)


def _children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", choices=["all", *PRESET_NAMES], metavar="NAME")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    runs = SCHEDULES
    if options.presets:
        presets = PRESET_NAMES if "all" in options.presets else options.presets
        runs = {preset: ("grpo.py", f"policy={preset}") for preset in presets}
    print(f"{describe_machine()}\n{'run':22}  seed   first    last  wall s   cpu s  to {TARGET} s  learner idle")
    results: dict[str, list[RunResult]] = {name: [] for name in runs}
    for seed in options.seeds:
        for name, script_and_overrides in runs.items():
            result = run_once([*script_and_overrides, *options.overrides], seed)
            results[name].append(result)
            print(
                f"{name:22}{seed:6}{result.first:8.3f}{result.last:8.3f}{result.wall_s:8.1f}{result.cpu_s:8.1f}"
                f"{result.to_target_s:11.1f}{result.idle_learner:14.2f}",
                flush=True,
            )
    for name, runs_of_name in results.items():
        last, wall, target = (
            statistics.median(getattr(result, key) for result in runs_of_name)
            for key in ("last", "wall_s", "to_target_s")
        )
        print(f"{name:22}median{'':8}{last:8.3f}{wall:8.1f}{'':8}{target:11.1f}")


if __name__ == "__main__":
    main()
