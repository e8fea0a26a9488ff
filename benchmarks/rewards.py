"""Verifications per second: the pool of worker processes beside calling the verifier directly in a loop.

    python benchmarks/rewards.py                     GSM8K-style answers, one worker and one a core
    python benchmarks/rewards.py --reward boxed --answers 400

The answers are made here: a few lines of working with a final number, every third one wrong. `direct` calls the
verifier in a loop in this process, on one core. `per core` divides by the workers; `ratio` is that over `direct`,
the median of the repeats, in which direct loop and pools take turns; it should be at least 0.7. Starting the
processes is not counted.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from config.env import EnvConfig  # noqa: E402
from envs.reward_service import RewardService  # noqa: E402
from envs.rewards import find_reward, make_judge  # noqa: E402
from envs.task import Completion, Example, Reward, make_task  # noqa: E402
from envs.verifiers.numbers import final_number, same_number  # noqa: E402

IN_A_WORKER = "benchmarks.rewards:gsm8k"
FORMS = {"gsm8k": "#### {}", "boxed": "\\boxed{{{}}}", "dapo": "Answer: {}"}


def gsm8k(completion: Completion, example: Example) -> Reward:
    """What the gsm8k task does; named by import path it is judged in worker processes."""
    given = final_number(completion.text)
    accuracy = float(given is not None and same_number(given, example.answer))
    return Reward(accuracy, {"accuracy": accuracy, "format": float(given is not None)})


def made_up(count: int, form: str) -> tuple[list[Completion], list[Example]]:
    """`count` answers of about 400 characters in groups of 16 that share an example."""
    chance = random.Random(0)
    completions, examples = [], []
    for index in range(count):
        if index % 16 == 0:
            gold = chance.randint(1, 5000)
            question = {"role": "user", "content": f"How many are {gold} eggs and none? " * 6}
            example = Example((question,), str(gold), index // 16)
        steps = [f"Then {a} and {a + 7} make <<{a}+{a + 7}={2 * a + 7}>>{2 * a + 7}." for a in range(9)]
        final = gold + (index % 3 == 2)
        completions.append(Completion("\n".join([*steps, form.format(f"{final:,}")]), 150))
        examples.append(example)
    return completions, examples


def rate(call: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    call()
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reward", default=None, help="a named reward or module:function; default: GSM8K's")
    parser.add_argument("--answers", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="*", default=sorted({1, os.cpu_count() or 1}))
    given = parser.parse_args()
    reward = given.reward or IN_A_WORKER
    named = find_reward(reward)
    completions, examples = made_up(given.answers, FORMS.get(given.reward or "gsm8k", "#### {}"))
    services = {}
    for workers in given.workers:
        env = EnvConfig(dataset="arithmetic", reward=reward, reward_workers=workers)
        services[workers] = RewardService(make_task(env), env)
    judge = make_judge(make_task(EnvConfig(dataset="arithmetic", reward=reward)))

    def direct() -> float:
        pairs = zip(completions, examples, strict=True)
        return sum(judge(completion, example).score for completion, example in pairs)

    expected = direct()
    for service in services.values():
        got = sum(scored.score for scored in service.score(completions, examples))
        assert abs(got - expected) < 1e-6, f"the pool's scores sum to {got}, the direct loop's to {expected}"
    rates: dict[int, list[float]] = {workers: [] for workers in (0, *given.workers)}
    for _ in range(given.repeats):
        rates[0].append(rate(direct, given.answers))
        for workers, service in services.items():
            rates[workers].append(rate(lambda s=service: s.score(completions, examples), given.answers))
    for service in services.values():
        service.close()
    print(f"{given.answers} answers, {given.repeats} repeats, reward {named.name if named else 'task'}")
    print(f"{'':>12}{'answers/s':>12}{'per core':>12}{'ratio':>8}")
    print(
        f"{'direct':>12}{statistics.median(rates[0]):>12,.0f}{statistics.median(rates[0]):>12,.0f}{1:>8.2f}"
    )
    for workers in given.workers:
        ratio = statistics.median(p / workers / d for p, d in zip(rates[workers], rates[0], strict=True))
        median = statistics.median(rates[workers])
        print(f"{f'{workers} worker(s)':>12}{median:>12,.0f}{median / workers:>12,.0f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
