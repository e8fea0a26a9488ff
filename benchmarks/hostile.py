"""Training while 5% of what is judged is hostile: is a group lost, and how much slower is it?

    python benchmarks/hostile.py [--iterations 40] [--repeats 3] [key=value ...]

The quickstart through grpo.py, its sums judged as mathematics in worker processes; in every other run one completion
in twenty is replaced, just before it is judged, by a text that was made to hang or crash a judge: towers of powers,
tags that never close, answers of 100,000 characters, factorials. Prints seconds of an iteration without and with
them, alternating, and the ratio. Every group must be trained on, and none of the hostile texts may be an error.
"""

import argparse
import json
import statistics
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config.env import EnvConfig  # noqa: E402
from envs.task import Completion, Example, Reward  # noqa: E402
from envs.verifiers.rules import RULES  # noqa: E402

ONE_IN = 20
BOMBS = (
    "\\boxed{9**9**9}",
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{(2^{99999})^{99999}}",
    "\\boxed{100000!}",
    "\\boxed{" + "((((" * 5000 + "1",
    "\\boxed{" + "9" * 100_000 + "}",
    "\\boxed{\\frac{1}{" + "\\frac{1}{" * 2000 + "2}",
    "\\boxed{\\int e^{x^{x^x}} dx}",
    "<think>" * 12_000 + "42",
    "<answer>" * 12_000,
    "\\boxed{" * 14_000,
    "Answer: " + " " * 100_000,
)


def clean(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """The sum as a boxed answer, judged by the rule `math`."""
    return RULES["math"].reward(Completion(f"\\boxed{{{completion.text.strip()}}}"), example, env)


def hostile(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """As `clean`, but for one completion in twenty, chosen by what it says and whom it answers."""
    chance = zlib.crc32(f"{example.row} {completion.text} {completion.num_tokens}".encode())
    if chance % ONE_IN:
        return clean(completion, example, env)
    verdict = RULES["math"].reward(Completion(BOMBS[chance // ONE_IN % len(BOMBS)]), example, env)
    assert verdict.score == 0, "a bomb scored"
    return verdict


def seconds_per_iteration(reward: str, iterations: int, overrides: list[str]) -> float:
    """Median seconds that an iteration of a run takes, its start left out."""
    import grpo
    from run.jobs import run_job
    from run.lockstep import Lockstep
    from tests.scripts import configured

    with tempfile.TemporaryDirectory() as folder:
        config = configured(
            f"env.reward=benchmarks.hostile:{reward}",
            f"train.total_dialog_turns={iterations * 256}",
            "train.checkpoint_frequency=0",
            *overrides,
        )
        run_job(config, Path(folder), grpo.train, Lockstep)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == iterations, "an iteration is missing"
    assert all(row["groups/generated"] == config.env.num_envs for row in rows), "a group is lost"
    assert rows[-1]["reward/errors_total"] == 0, "a bomb was counted as an error of ours"
    phases = ("time/collect_s", "time/optimize_s", "time/push_s")
    return statistics.median(sum(row[phase] for phase in phases) for row in rows[3:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    pairs = []
    for _ in range(asked.repeats):
        pairs.append(
            [seconds_per_iteration(name, asked.iterations, asked.overrides) for name in ("clean", "hostile")]
        )
        print(f"  clean {pairs[-1][0]:.3f} s   hostile {pairs[-1][1]:.3f} s an iteration", flush=True)
    print(
        f"with 5% hostile completions / without: {statistics.median(b / a for a, b in pairs):.3f} (target <= 1.10)"
    )


if __name__ == "__main__":
    main()
