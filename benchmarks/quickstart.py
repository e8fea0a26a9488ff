"""The quickstart through both schedules, or under every preset: reward and time, one run after the other.

    python benchmarks/quickstart.py [key=value ...] [--seeds 0 1 2]
    python benchmarks/quickstart.py --presets grpo dapo [--seeds 0 1]        (`--presets all`: every one)

By schedule each seed runs grpo.py, then grpo_async.py with train.max_policy_age=1 and either way of treating stale
groups (`ray.enabled=true` puts the engine into a Ray actor). By preset each seed runs grpo.py with `policy=NAME`.
`first` is the reward of the first optimizer step, `last` the mean of the last five; `to 0.75` the seconds of training
until five steps in a row reached that on average; `cpu` includes all processes of the run.
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

from benchmarks.common import QUIET, ROOT, arguments, machine
from config.schema.policy import PRESETS, load_policy

ASYNC = ("train.max_policy_age=1", "inference_model.update=keep")
SCHEDULES = {
    "lockstep": ("grpo.py",),
    "async wait": ("grpo_async.py", *ASYNC, "train.stale_groups=wait"),
    "async drop": ("grpo_async.py", *ASYNC, "train.stale_groups=drop"),
}
KNOWN = sorted(
    path.stem
    for path in PRESETS.glob("*.yaml")
    if not (policy := load_policy(path.stem)).distill_coef or policy.teacher_prompt
)
"""Presets that need no other model as a teacher."""
WINDOW, TARGET = 5, 0.75


@dataclass
class Outcome:
    """Seconds are of the whole process, its start included, except `to_target_s`, infinite where it is not reached."""

    first: float
    last: float
    wall_s: float
    cpu_s: float
    to_target_s: float
    idle_learner: float


def run_once(arguments: Sequence[str], seed: int) -> Outcome:
    """One run of a script.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, *overrides = arguments
        command = [sys.executable, script, "--config-name", "grpo_quickstart", f"hydra.run.dir={folder}"]
        command += [*QUIET, f"train.seed={seed}", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        before, began = _child_cpu(), time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - began
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
    return Outcome(rewards[0], last, wall, _child_cpu() - before, to_target, idle)


def _child_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", choices=["all", *KNOWN], metavar="NAME")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    runs = SCHEDULES
    if asked.presets:
        presets = KNOWN if "all" in asked.presets else asked.presets
        runs = {preset: ("grpo.py", f"policy={preset}") for preset in presets}
    print(f"{machine()}\n{'run':22}  seed   first    last  wall s   cpu s  to {TARGET} s  learner idle")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
    for seed in asked.seeds:
        for name, arguments_of_run in runs.items():
            one = run_once([*arguments_of_run, *asked.overrides], seed)
            outcomes[name].append(one)
            print(
                f"{name:22}{seed:6}{one.first:8.3f}{one.last:8.3f}{one.wall_s:8.1f}{one.cpu_s:8.1f}"
                f"{one.to_target_s:11.1f}{one.idle_learner:14.2f}",
                flush=True,
            )
    for name, ones in outcomes.items():
        last, wall, target = (
            statistics.median(getattr(one, key) for one in ones) for key in ("last", "wall_s", "to_target_s")
        )
        print(f"{name:22}median{'':8}{last:8.3f}{wall:8.1f}{'':8}{target:11.1f}")


if __name__ == "__main__":
    main()
