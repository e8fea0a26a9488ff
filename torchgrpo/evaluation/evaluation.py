"""Evaluation: from `eval.sets` to numbers and completions in the run folder, beside training or alone.

    eval.sets ─▶ problems ─▶ the engines of training ─▶ rewards ─▶ eval/SET/iteration_N.jsonl, eval/SET/pass@k

One coroutine goes through a set, in the loop of the engines. It asks the training prompts, generators and learner for
nothing, so a run trains on the same bits with it and without it. Every problem has seeds of its own, the same in every
evaluation of a run: differences between two of them are differences between two policies.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO, TypeVar

from config.schema.config import Config
from envs.group import Group
from envs.judging.lowest_scores import LowestScores
from envs.judging.service import RewardService
from envs.task import Example
from torchgrpo.evaluation.sets import EvalSet
from torchgrpo.evaluation.statistics import Tally, summarize, table
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.generate import Generation

Result = TypeVar("Result")
FIRST_GROUP_ID = 1 << 39  # above every id that training uses; with the set's seed it fixes a problem's draws


@dataclass(eq=False)
class Evaluation:
    """Runs all sets, writes what they say.

    rows: completions that the engines hold at a time.
    make_groups: from a set, what judges it and its seed to what makes groups of its problems, with its sampling.
    tell: told of a stage, how much of it is done, and of how much.
    say: told what a person should know.
    record: of a set and an iteration; what its block is given takes every group.
    step: optimizer steps that are done, for rewards that ask.
    """

    config: Config
    rows: int
    sets: list[EvalSet]
    loop: EngineLoop
    make_groups: Callable[[EvalSet, RewardService, int], Generation]
    tell: Callable[[str, int, int], None]
    say: Callable[[str], None]
    run_dir: Path
    record: Callable[[str, int], AbstractContextManager[Callable[[Group], None]]]
    step: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        for chosen in self.sets:
            if chosen.problems.repeated or chosen.problems.too_long:
                self.say(
                    f"eval.sets.{chosen.name}: {len(chosen.problems.examples)} problems; left out: "
                    f"{chosen.problems.repeated} that repeat another, {chosen.problems.too_long} longer than "
                    "env.max_prompt_tokens"
                )

    def due(self, iteration: int, last: int) -> bool:
        """Whether there is an evaluation after this iteration; 0 is before the first."""
        frequency = self.config.eval.frequency
        due = iteration in (0, last) or bool(frequency and iteration % frequency == 0)
        return due and bool(self.sets)

    def run(self, iteration: int, stopped: Callable[[], bool]) -> tuple[dict[str, float], list[str]] | None:
        """Evaluate every set: the metrics, and a table for each. None if `stopped` becomes true meanwhile."""
        metrics: dict[str, float] = {}
        tables = []
        for chosen in self.sets:
            path = self.run_dir / "eval" / chosen.name / f"iteration_{iteration}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".partial")
            began = time.perf_counter()
            rewards = RewardService(chosen.task, chosen.env, self.step, self.config.total_optimizer_steps)
            groups = self.make_groups(chosen, rewards, set_seed(self.config.train.seed, chosen.name))
            try:
                with (
                    unfinished.open("w", encoding="utf-8") as file,
                    self.record(chosen.name, iteration) as record,
                ):
                    tallies = self.loop.run(_until(stopped, self._tallies(chosen, groups, file, record)))
            except _GivenUp:
                self.say(f"the evaluation of {chosen.name} was given up")
                return None
            finally:
                rewards.close()
            unfinished.replace(path)
            found = summarize(tallies, chosen.settings.n) | {"seconds": time.perf_counter() - began}
            metrics |= {f"eval/{chosen.name}/{key}": value for key, value in found.items()}
            tables.append(table(chosen.name, found, chosen.settings.n))
        return metrics, tables

    async def _tallies(
        self, chosen: EvalSet, groups: Generation, file: TextIO, record: Callable[[Group], None]
    ) -> list[Tally]:
        """In the order of the problems; groups are written as they come, unscored ones last."""
        done, total = count(1), len(chosen.problems.examples)
        self.tell(f"eval {chosen.name}", 0, total)
        room = asyncio.Semaphore(max(1, self.rows // chosen.settings.n))
        lowest = LowestScores()

        def finish(group: Group) -> Tally:
            lowest.settle([group])
            for line in group.attempts():
                file.write(json.dumps(line) + "\n")
            record(group)
            self.tell(f"eval {chosen.name}", next(done), total)
            return tally(group)

        async def one(index: int, example: Example) -> Tally | Group:
            await room.acquire()
            group = await groups.run_group(example, FIRST_GROUP_ID + index, room.release)
            scored = any(verdict.outcome == "scored" for verdict in group.verdicts)
            return finish(group) if scored else group  # which needs the lowest score of all the others

        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(one(*each)) for each in enumerate(chosen.problems.examples)]
        found = [task.result() for task in tasks]
        return [finish(each) if isinstance(each, Group) else each for each in found]


class _GivenUp(Exception):
    """Somebody asked the run to stop in the middle of an evaluation."""


async def _until(stopped: Callable[[], bool], coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What the coroutine returns. Raises _GivenUp, and it is cancelled, if `stopped` becomes true before it ends."""
    task = asyncio.ensure_future(coroutine)
    try:
        while not task.done():
            if stopped():
                raise _GivenUp
            await asyncio.wait((task,), timeout=0.2)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait((task,))


def set_seed(seed: int, name: str) -> int:
    """24 bits; with a problem's group id they fix its draws, whatever other sets there are."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=3).digest(), "little")


def tally(group: Group) -> Tally:
    """What the statistics need of a group; a completion that could not be judged is an error."""
    pairs = zip(group.completions, group.verdicts, strict=True)
    valid = [(one, verdict) for one, verdict in pairs if verdict.judged]
    return Tally(
        correct=tuple(verdict.success >= 1 for _, verdict in valid),
        scores=tuple(verdict.score for _, verdict in valid),
        lengths=tuple(one.num_drawn for one, _ in valid),
        truncated=tuple(one.finish_reason == "length" for one, _ in valid),
        errors=len(group.completions) - len(valid),
    )
