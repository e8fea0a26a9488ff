"""Verifications per second: the reward service beside calling the same judge directly in a loop.

    python benchmarks/rewards.py                     a worker a core
    python benchmarks/rewards.py --workers 1 --repeats 15

Three kinds of answers of about 400 characters, every third one wrong: GSM8K's final numbers as the gsm8k task judges
them (in process, since nothing can hang), the same in worker processes, and formulas under `math`. `answers/s` is by
the wall clock; `per core` is answers per second of processor time, the service's own and its workers' together;
`ratio` is that over the direct loop's, to be at least 0.7. Medians of repeats in which loop and service take turns;
starting the processes is not counted.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from config.env import EnvConfig  # noqa: E402
from envs.judging.judge import make_judge  # noqa: E402
from envs.judging.service import RewardService  # noqa: E402
from envs.rewards import find_reward  # noqa: E402
from envs.task import Completion, Example, Reward, make_task  # noqa: E402


def number(chance: random.Random, right: bool) -> tuple[str, str]:
    gold = chance.randint(1, 5000)
    return str(gold), f"#### {gold + (not right):,}"


def formula(chance: random.Random, right: bool) -> tuple[str, str]:
    a, b, c = chance.randint(2, 99), chance.choice((2, 3, 5, 7)), chance.randint(2, 9)
    return f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c}}}", f"\\boxed{{\\frac{{{a + (not right)}}}{{{c}}}\\sqrt{{{b}}}}}"


def in_a_worker(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """The reward `gsm8k`, which as a function named by import path is judged in worker processes."""
    named = find_reward("gsm8k")
    return named.function(completion, example, env)


@dataclass(frozen=True)
class Case:
    name: str
    reward: str
    answer: Callable[[random.Random, bool], tuple[str, str]]
    share: float  # of --answers: formulas take a hundred times as long


CASES = (
    Case("gsm8k, in process", "gsm8k", number, 1.0),
    Case("gsm8k, in workers", "benchmarks.rewards:in_a_worker", number, 1.0),
    Case("math, in workers", "math", formula, 0.05),
)


def made_up(case: Case, count: int) -> tuple[list[Completion], list[Example]]:
    """`count` answers in groups of 16 that share an example."""
    chance = random.Random(0)
    completions, examples = [], []
    for row in range(count // 16):
        seed = chance.random()
        gold, _ = case.answer(random.Random(seed), True)
        example = Example(({"role": "user", "content": f"How many are {row} eggs? " * 8},), gold, row)
        for place in range(16):
            steps = [f"Then {a} and {a + row} make <<{a}+{a + row}={2 * a + row}>>." for a in range(9)]
            _, last = case.answer(random.Random(seed), place % 3 != 2)
            completions.append(Completion("\n".join([*steps, last]), 150))
            examples.append(example)
    return completions, examples


def processor_seconds(service: RewardService) -> float:
    """This process's and the workers' together."""
    if service._pool is None:
        return time.process_time()
    fork_server = psutil.Process(service._pool.process.pid)
    spent = [process.cpu_times() for process in (fork_server, *fork_server.children())]
    retired = spent[0].children_user + spent[0].children_system
    return time.process_time() + retired + sum(each.user + each.system for each in spent)


def timed(call: Callable[[], object], processor: Callable[[], float], count: int) -> tuple[float, float]:
    """Calls per second of wall clock, and per second of processor time. At least half a second of calls."""
    calls, began, spent = 0, time.perf_counter(), processor()
    while calls == 0 or time.perf_counter() - began < 0.5:
        call()
        calls += count
    return calls / (time.perf_counter() - began), calls / (processor() - spent)


def measure(case: Case, answers: int, workers: int, repeats: int) -> None:
    completions, examples = made_up(case, max(64, int(answers * case.share)))
    env = EnvConfig(dataset="arithmetic", reward=case.reward, reward_workers=workers)
    judge = make_judge(make_task(env))
    service = RewardService(make_task(env), env)

    def direct() -> list[float]:
        return [judge(*pair).score for pair in zip(completions, examples, strict=True)]

    try:
        served = [scored.score for scored in service.score(completions, examples)]
        assert served == direct(), f"{case.name}: the service's scores are not the direct loop's"
        pairs = []
        for _ in range(repeats):
            loop = timed(direct, time.process_time, len(completions))
            pool = timed(
                lambda: service.score(completions, examples),
                lambda: processor_seconds(service),
                len(completions),
            )
            pairs.append((loop, pool))
    finally:
        service.close()
    per_core, wall, served_per_core = (
        statistics.median(values)
        for values in ([p[0][1] for p in pairs], [p[1][0] for p in pairs], [p[1][1] for p in pairs])
    )
    ratio = statistics.median(pool[1] / loop[1] for loop, pool in pairs)
    print(f"{case.name:<20}{per_core:>14,.0f}{served_per_core:>14,.0f}{ratio:>8.2f}{wall:>14,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    print(f"{given.workers} workers on {os.cpu_count()} cores, medians of {given.repeats}")
    print(f"{'':<20}{'loop per core':>14}{'ours per core':>14}{'ratio':>8}{'answers/s':>14}")
    for case in CASES:
        measure(case, given.answers, given.workers, given.repeats)


if __name__ == "__main__":
    main()
