"""Measures what the engine loop costs episodes that wait for their environments.

    python benchmarks/episodes.py [--episodes 8 64 512] [--turns 4] [--tokens 8]

The loop is real; the engine and the time are simulated (tests/rollout/virtual_clock.py). An episode waits about
100 ms before each turn. Prints the ideal time of an episode as a share of its actual time, for an engine in this
process and for a pool, and the CPU microseconds of a turn, with those of the simulation.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import describe_machine, make_parser
from tests.rollout.virtual_clock import VirtualEpisodes


def main() -> None:
    parser = make_parser(__doc__, turns=4, tokens=8)
    parser.add_argument("--episodes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 20.0])
    options = parser.parse_args()
    print(describe_machine())
    print("engine    step ms  episodes  share of ideal  us/turn")
    for is_remote in (False, True):
        for step_ms in options.step_ms:
            for episodes in options.episodes:
                run = VirtualEpisodes(episodes, step_ms / 1000, options.tokens, options.turns, is_remote=is_remote)
                run.run()
                name = "pool" if is_remote else "process"
                per_turn = run.cpu_s / (len(run.shares) * run.turns) * 1e6
                print(f"{name:8s} {step_ms:8.1f} {episodes:9d} {run.mean_share:15.3f} {per_turn:8.0f}", flush=True)


if __name__ == "__main__":
    main()
