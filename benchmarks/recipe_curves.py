"""The picture of a recipe: reward and held-out pass@1 of runs that have been made, drawn from their folders.

    python benchmarks/recipe_curves.py docs/smollm2.png --runs "full weights=RUN" "LoRA=RUN" --set held_out

Bars are the 95% intervals of evaluations. `docs/recipes.md` has the commands that made the runs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument("--runs", nargs="+", required=True, help="NAME=FOLDER")
    parser.add_argument("--set", default="held_out", help="the set of the evaluations")
    asked = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for number, (name, folder) in enumerate(each.split("=", 1) for each in asked.runs):
        rows, colour, metric = rows_of(Path(folder)), f"C{number}", f"eval/{asked.set}/pass@1"
        steps = [row for row in rows if "reward/mean" in row]
        evaluations = [row for row in rows if metric in row]
        axes.plot(
            [row["optimizer_step"] for row in steps],
            [row["reward/mean"] for row in steps],
            colour,
            label=name,
        )
        values = [row[metric] for row in evaluations]
        ends = [
            [row[metric] - row[f"{metric}_low"] for row in evaluations],
            [row[f"{metric}_high"] - row[metric] for row in evaluations],
        ]
        places = [row["optimizer_step"] + 0.15 * number for row in evaluations]
        axes.errorbar(
            places, values, yerr=ends, fmt="o", color=colour, label=f"{name}: held-out pass@1", capsize=3
        )
    axes.set(xlabel="optimizer step", ylabel="reward, pass@1", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(asked.picture, dpi=120)


if __name__ == "__main__":
    main()
