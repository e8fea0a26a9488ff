"""Measures what the engine loop and the player cost episodes that wait for their environments.

    python benchmarks/episodes.py [--episodes 8 64 512] [--turns 4] [--tokens 8]

The engine and the time are simulated (tests/rollout/virtual_clock.py), the loop is real. `loop`: an episode is a bare
coroutine, which waits about 100 ms before each turn. `player`: the real player with the quickstart's tokenizer; the
environment waits 100 ms after each turn. Prints the ideal time of an episode as a share of its actual time, for an
engine in this process and for a pool, and the CPU microseconds of a turn, with those of the simulation.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import describe_machine, make_parser
from tests.rollout.virtual_clock import VirtualEpisodes
from tests.rollout.virtual_player import PlayedEpisodes


def main() -> None:
    parser = make_parser(__doc__, turns=4, tokens=8)
    parser.add_argument("--episodes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 20.0])
    options = parser.parse_args()
    print(describe_machine())
    print("episodes' code  engine    step ms  episodes  share of ideal  us/turn")
    PlayedEpisodes(1).run()  # loads the tokenizer
    gc.collect()
    gc.freeze()  # a collection of the modules' objects would count as a turn
    for kind, name in ((VirtualEpisodes, "loop"), (PlayedEpisodes, "player")):
        for is_remote in (False, True):
            for step_ms in options.step_ms:
                for episodes in options.episodes:
                    run = kind(episodes, step_ms / 1000, options.tokens, options.turns, is_remote=is_remote, rounds=4)
                    run.run()
                    engine = "pool" if is_remote else "process"
                    per_turn = run.cpu_s / (len(run.shares) * run.turns) * 1e6
                    row = f"{name:14s}  {engine:8s} {step_ms:8.1f} {episodes:9d} {run.mean_share:15.3f} {per_turn:8.0f}"
                    print(row, flush=True)


if __name__ == "__main__":
    main()
