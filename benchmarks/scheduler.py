"""Measures the CPU cost of the overlapped schedule's bookkeeping with simulated engines.

    python benchmarks/scheduler.py [--groups 100000] [--workers 1 8 64 512]

Engine loop, rollout stream, group buffer and dispatch are real. Engines and learner are simulated on a virtual
clock (tests/rollout/simulated_cluster.py), and 5% of the engines are killed. The simulation checks that no
prompt is lost or consumed twice. Prints CPU microseconds per group without those of the simulation, the maximum
number of groups held at one time, and the number of killed engines. The time should be independent of the
number of workers, and the groups held should be proportional to it.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import make_parser
from tests.rollout.simulated_cluster import Simulation


def microseconds_per_group(simulation: Simulation) -> float:
    """Runs a simulation and returns its CPU microseconds per group."""
    simulation.run()
    simulation.check()
    return simulation.cpu_s / len(simulation.consumed_rows) * 1e6


def main() -> None:
    parser = make_parser(__doc__, groups=100_000, max_age=2, repeats=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512])
    options = parser.parse_args()
    gc.freeze()
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


if __name__ == "__main__":
    main()
