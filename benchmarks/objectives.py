"""Every preset on the quickstart: does it learn, and how fast?

    python benchmarks/objectives.py [--presets grpo dapo] [--seeds 0 1] [--plot objectives.png] [key=value ...]

One run of grpo.py's loop for every preset and seed, one after another in this process. Prints a line a run: mean
reward of the first iteration and of the last five, iterations and seconds until the mean of five reached 0.75,
seconds in all, CPU seconds in all.
The rewards are of everything generated, groups that dynamic sampling replaced included. --plot draws reward over
wall time, a panel a preset (needs matplotlib). Exits with 1 if a run does not go from 0.4 or less to 0.75.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402

import grpo  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from config.policy import PRESETS, load_policy  # noqa: E402
from config.schema import Config  # noqa: E402
from run.jobs import run_job  # noqa: E402
from run.lockstep import Lockstep  # noqa: E402

KNOWN = sorted(
    path.stem
    for path in PRESETS.glob("*.yaml")
    if not (policy := load_policy(path.stem)).distill_coef or policy.teacher_prompt
)
"""Presets that need no other model as a teacher."""
WINDOW = 5
FROM, TO = 0.4, 0.75


@dataclass(frozen=True)
class Curve:
    """rewards: mean reward of each iteration. seconds: wall time at its end. cpu_seconds: of the whole run."""

    preset: str
    seed: int
    rewards: list[float]
    seconds: list[float]
    cpu_seconds: float

    @property
    def smooth(self) -> list[float]:
        """Means over the last `WINDOW` iterations."""
        rewards = self.rewards
        windows = (rewards[max(0, end - WINDOW) : end] for end in range(1, len(rewards) + 1))
        return [sum(window) / len(window) for window in windows]

    @property
    def reached(self) -> int | None:
        """The first iteration, from 1, whose smooth reward is at the target."""
        return next((index for index, reward in enumerate(self.smooth, start=1) if reward >= TO), None)

    @property
    def learned(self) -> bool:
        return self.rewards[0] <= FROM and self.smooth[-1] >= TO


def configured(preset: str, seed: int, overrides: Sequence[str]) -> Config:
    quiet = ["logging.progress=false", "logging.sample_frequency=0", "train.checkpoint_frequency=0"]
    chosen = [f"policy={preset}", f"train.seed={seed}", *quiet, *overrides]
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        return to_config(compose("grpo_quickstart", overrides=chosen))


def measure(preset: str, seed: int, overrides: Sequence[str]) -> Curve:
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run_job(configured(preset, seed, overrides), Path(folder), grpo.train, Lockstep)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        if json.loads((Path(folder) / "summary.json").read_text())["outcome"] == "interrupted":
            sys.exit(130)
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward/mean"] for row in rows]
    seconds = [row["time/elapsed_s"] for row in rows]
    return Curve(preset, seed, rewards, seconds, time.process_time() - began)


def line(curve: Curve) -> str:
    reached = curve.reached
    when = f"{'never':>10} {'':>9}" if reached is None else f"{reached:10} {curve.seconds[reached - 1]:9.1f}"
    return (
        f"{curve.preset:18} {curve.seed:4} {curve.rewards[0]:7.3f} {curve.smooth[-1]:7.3f} {when} "
        f"{curve.seconds[-1]:8.1f} {curve.cpu_seconds:8.1f}  {'yes' if curve.learned else 'NO'}"
    )


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Reward over wall time, a panel a preset; every panel shows the first preset's first curve in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    presets = list(dict.fromkeys(curve.preset for curve in curves))
    columns = min(5, len(presets))
    rows = -(-len(presets) // columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(3 * columns, 2.3 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    panels = grid.flatten()
    for panel, preset in zip(panels, presets, strict=False):
        panel.plot(curves[0].seconds, curves[0].smooth, color="0.75", linewidth=1)
        for curve in curves:
            if curve.preset == preset:
                panel.plot(curve.seconds, curve.smooth, linewidth=1.2, label=f"seed {curve.seed}")
        panel.axhline(TO, color="0.6", linewidth=0.6, linestyle=":")
        panel.set_title(preset, fontsize=9)
    for panel in panels[len(presets) :]:
        panel.set_axis_off()
    panels[0].legend(fontsize=7, loc="lower right")
    figure.supxlabel("wall time (s)")
    figure.supylabel(f"reward, mean of {WINDOW} iterations")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=KNOWN, choices=KNOWN, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--plot", type=Path, help="file of the figure, such as objectives.png")
    asked, overrides = parser.parse_known_args()
    register_schema()
    print(f"{'preset':18} seed   first    last it to {TO} s to {TO}  seconds    cpu s  learned", flush=True)
    curves = []
    for preset in asked.presets:
        for seed in asked.seeds:
            curves.append(measure(preset, seed, overrides))
            print(line(curves[-1]), flush=True)
    if asked.plot is not None:
        plot(curves, asked.plot)
        print(f"figure: {asked.plot}")
    sys.exit(0 if all(curve.learned for curve in curves) else 1)


if __name__ == "__main__":
    main()
