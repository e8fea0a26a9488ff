"""Cost of the overlapped schedule's bookkeeping at cluster size, with simulated engines.

    python benchmarks/scheduler.py [--groups 100000] [--workers 1 8 64 512]

Loop, stream, buffer and dispatch are real; engines and learner are simulated on a virtual clock
(tests/rollout/simulated_cluster.py), and 5% of the engines are killed. No prompt may be lost or consumed twice. Prints
CPU microseconds a group without those of the simulation, the most groups ever held, and the killed engines. The time
has to stay flat, the groups held in proportion to the workers.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import arguments
from tests.rollout.simulated_cluster import Simulation


def micros(simulation: Simulation) -> float:
    """CPU microseconds a group of a finished simulation."""
    simulation.run()
    simulation.check()
    return simulation.cpu_s / len(simulation.consumed) * 1e6


def main() -> None:
    parser = arguments(__doc__, groups=100_000, max_age=2, repeats=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512])
    asked = parser.parse_args()
    gc.freeze()
    for stale in ("wait", "drop"):
        print(f"train.stale_groups={stale}, train.max_policy_age={asked.max_age}, fastest of {asked.repeats}")
        print(" workers   groups us/group   held killed  age  dropped")
        taken = []
        for workers in asked.workers:
            took = []
            for _ in range(asked.repeats):
                last = Simulation(workers, asked.groups, asked.max_age, stale, seed=workers)
                took.append(micros(last))
            taken.append(min(took))
            print(
                f"{workers:8d} {len(last.consumed):8d} {taken[-1]:8.1f} {last.most_held:6d} "
                f"{last.engines.killed:6d} {last.oldest:4d} {last.buffer.dropped:8d}",
                flush=True,
            )
        print(f"  slowest / fastest: {max(taken) / min(taken):.2f}")


if __name__ == "__main__":
    main()
