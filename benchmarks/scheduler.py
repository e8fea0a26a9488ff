"""Measures the CPU cost of the rollout scheduler with simulated engines on a virtual clock.

    python benchmarks/scheduler.py [--groups 100000] [--workers 1 8 64 512]    bookkeeping of grpo_async.py
    python benchmarks/scheduler.py --episodes 8 64 512                         episodes that wait for environments

Engine loop, rollout stream, group buffer, dispatch and player are real.

Groups: 5% of the engines are killed, and the simulation checks that no prompt is lost or consumed twice. Prints CPU
microseconds per group without those of the simulation, the maximum number of groups held, and the killed engines. The
time should be independent of the number of workers, and the groups held proportional to it.

Episodes: four turns of eight tokens; the environment waits 100 ms after each. `loop` is a bare coroutine, `player` the
real player with the quickstart's tokenizer. Prints the ideal time as a share of the actual one, and the CPU
microseconds of a turn, with those of the simulation.
"""

import argparse
import gc
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import describe_machine, make_parser
from tests.rollout.simulated_cluster import Simulation
from tests.rollout.virtual_clock import VirtualEpisodes
from tests.rollout.virtual_player import PlayedEpisodes


def microseconds_per_group(simulation: Simulation) -> float:
    """Runs a simulation and returns its CPU microseconds per group."""
    simulation.run()
    simulation.check()
    return simulation.cpu_s / len(simulation.consumed_rows) * 1e6


def measure_groups(options: argparse.Namespace) -> None:
    for stale in ("wait", "drop"):
        print(f"train.stale_groups={stale}, train.max_policy_age={options.max_age}, fastest of {options.repeats}")
        print(" workers   groups us/group   held killed  age  dropped")
        fastest_times = []
        for workers in options.workers:
            times = []
            for _ in range(options.repeats):
                last = Simulation(workers, options.groups, options.max_age, stale, seed=workers)
                times.append(microseconds_per_group(last))
            fastest_times.append(min(times))
            print(
                f"{workers:8d} {len(last.consumed_rows):8d} {fastest_times[-1]:8.1f} {last.max_groups_held:6d} "
                f"{last.engines.num_killed:6d} {last.max_group_age:4d} {last.buffer.groups_dropped:8d}",
                flush=True,
            )
        print(f"  slowest / fastest: {max(fastest_times) / min(fastest_times):.2f}")


def measure_episodes(options: argparse.Namespace) -> None:
    PlayedEpisodes(1).run()  # loads the tokenizer
    gc.collect()
    gc.freeze()  # a collection of the modules' objects would count as a turn
    print("episodes' code  engine    step ms  episodes  share of ideal  us/turn")
    for kind, name in ((VirtualEpisodes, "loop"), (PlayedEpisodes, "player")):
        for is_remote, step_ms, episodes in itertools.product((False, True), (5, 20), options.episodes):
            run = kind(episodes, step_ms / 1000, tokens=8, turns=4, is_remote=is_remote, rounds=4)
            run.run()
            per_turn = run.cpu_s / (len(run.shares) * run.turns) * 1e6
            engine = "pool" if is_remote else "process"
            print(
                f"{name:14s}  {engine:8s} {step_ms:8d} {episodes:9d} {run.mean_share:15.3f} {per_turn:8.0f}", flush=True
            )


def main() -> None:
    parser = make_parser(__doc__, groups=100_000, max_age=2, repeats=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--episodes", type=int, nargs="+", help="numbers of episodes at a time")
    options = parser.parse_args()
    print(describe_machine())
    gc.freeze()
    (measure_groups if options.episodes is None else measure_episodes)(options)


if __name__ == "__main__":
    main()
