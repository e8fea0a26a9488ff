"""Each rule of `env.curriculum` on sums of which the model can learn a third: steps and tokens to a held-out success.

    python benchmarks/curricula.py [--seeds 0 1 2] [--steps 80] [--only levels ...] [key=value ...]

The quickstart's model has seen no sum above 99, and cannot find one: of sums up to 198 most groups are all wrong and
teach nothing. Every run is grpo.py on the CPU, on 600 of these sums, with the same 400 others evaluated every 10 steps.
`equal groups` is the mean share of groups that taught nothing. The last rows draw from a mixture: sums of operands up
to 49, and up to 99.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.task import Example
from envs.tasks.arithmetic import Arithmetic

ROOT = Path(__file__).resolve().parent.parent
TARGET = 0.25
EVERY = 10
COLUMN = ("env.curriculum.column=sum", "env.curriculum.bins=5", "env.curriculum.gate=0.6")
TASK = "benchmarks.curricula:FewSums"
MIXTURE = (
    "env.dataset=mixture",
    "env.options={}",
    f"env.mixture={{near:{{dataset:'{TASK}',options:{{max_operand:49}}}},"
    f"all:{{dataset:'{TASK}',options:{{max_operand:99}}}}}}",
)
RULES = {
    "none": (),
    "levels": COLUMN,
    "newest level, replay 0.2": (*COLUMN, "env.curriculum.open=newest", "env.curriculum.replay=0.2"),
    "learnability": ("env.curriculum.priority=learnability",),
    "failure": ("env.curriculum.priority=failure",),
    "replay 0.2": ("env.curriculum.replay=0.2",),
    "levels, learnability": (*COLUMN, "env.curriculum.priority=learnability"),
    "mixture": MIXTURE,
    "mixture, learnability": (*MIXTURE, "env.curriculum.sources=learnability"),
}


class FewSums(Arithmetic):
    """So few additions that a run comes back to each: what is known of a prompt counts when it was asked before."""

    def examples(self, split: str) -> Sequence[Example]:
        return super().examples(split)[:600]


@dataclass
class Outcome:
    """success: at the last evaluation. steps, tokens: to the target, None where it was not reached. The whole curve is
    `curve`, one value an evaluation."""

    success: float
    steps: int | None
    tokens: float | None
    equal: float
    curve: list[float]


def run_once(rule: str, seed: int, steps: int, overrides: list[str]) -> Outcome:
    """Raises RuntimeError with the script's output where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "grpo.py", "--config-name", "grpo_quickstart", f"hydra.run.dir={folder}"]
        command += ["logging.progress=false", "logging.sample_frequency=0", f"train.seed={seed}"]
        command += [
            f"env.dataset={TASK}",
            "env.options.max_operand=99",
            f"train.total_dialog_turns={256 * steps}",
            "train.export=false",
        ]
        test = "{dataset:arithmetic,options:{max_operand:99},limit:400}"
        command += [f"eval.sets={{test:{test}}}", f"eval.frequency={EVERY}", "train.checkpoint_frequency=0"]
        command += [*RULES[rule], *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return outcome([json.loads(line) for line in lines])


def outcome(rows: list[dict[str, Any]]) -> Outcome:
    """rows: of a run's metrics."""
    curve = [(row["optimizer_step"], row["eval/test/pass@1"]) for row in rows if "eval/test/pass@1" in row]
    tokens = {row["optimizer_step"]: row["tokens/total"] for row in rows if "tokens/total" in row}
    reached = next((step for step, success in curve if success >= TARGET), None)
    return Outcome(
        success=curve[-1][1],
        steps=reached,
        tokens=None if reached is None else tokens.get(reached, 0.0),
        equal=statistics.mean(
            row["reward/zero_variance_groups"] for row in rows if "reward/zero_variance_groups" in row
        ),
        curve=[success for _, success in curve],
    )


def told(values: list[Any], form: str) -> str:
    return " ".join("-" if value is None else format(value, form) for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of 256 completions")
    parser.add_argument("--only", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    print(
        f"| rule | steps to {TARGET}, by seed | tokens | success after {asked.steps} steps | equal groups |"
    )
    print("|---|---|---|---|---|")
    for rule in asked.only:
        ones = [run_once(rule, seed, asked.steps, asked.overrides) for seed in asked.seeds]
        steps, tokens = (
            told([getattr(one, key) for one in ones], form)
            for key, form in (("steps", "d"), ("tokens", ",.0f"))
        )
        success = told([one.success for one in ones], ".3f")
        equal = statistics.mean(one.equal for one in ones)
        print(f"| {rule} | {steps} | {tokens} | {success} | {equal:.2f} |", flush=True)
        for seed, one in zip(asked.seeds, ones, strict=True):
            print(f"{rule}, seed {seed}: {told(one.curve, '.3f')}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
