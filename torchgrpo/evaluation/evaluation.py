"""Runs evaluations: samples and scores each set, writes the completions, returns metrics and tables.

    eval.sets ─▶ problems ─▶ the engines of training ─▶ rewards ─▶ eval/SET/iteration_N.jsonl, eval/SET/pass@k

One coroutine evaluates a set, in the loop of the engines. The evaluation shares no prompts, random generators or
learner state with training, so a run trains on the same bits with and without evaluation. Every problem has seeds of
its own, the same in every evaluation of a run: two evaluations differ only by their policies.
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
from envs.reward_workers.minimum_scores import MinimumScores
from envs.reward_workers.service import RewardService
from envs.task import Example
from torchgrpo.evaluation.eval_sets import EvalSet
from torchgrpo.evaluation.statistics import ProblemResults, format_table, summarize
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.group_rollout import GroupRollout

Result = TypeVar("Result")
FIRST_GROUP_ID = 1 << 39
"""Group id of a set's first problem, above every id of training; the ids and the set's seed fix all samples."""


@dataclass(eq=False)
class Evaluation:
    """Evaluates all sets where an evaluation is due, writes completions, and returns metrics.

    max_completions: maximum of completions in the engines at a time.
    make_group_rollout: builds the group rollout of a set, from the set, its reward service and its seed.
    show_progress: receives a stage, the finished amount and the total amount.
    log: receives messages for the user.
    record: from a set's name and an iteration, a context manager; its value receives every group.
    optimizer_step: returns the number of finished optimizer steps, for rewards that depend on them.
    """

    config: Config
    max_completions: int
    sets: list[EvalSet]
    loop: EngineLoop
    make_group_rollout: Callable[[EvalSet, RewardService, int], GroupRollout]
    show_progress: Callable[[str, int, int], None]
    log: Callable[[str], None]
    run_dir: Path
    record: Callable[[str, int], AbstractContextManager[Callable[[Group], None]]]
    optimizer_step: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        for eval_set in self.sets:
            problems = eval_set.problems
            if problems.num_duplicates or problems.num_too_long:
                self.log(
                    f"eval.sets.{eval_set.name}: {len(problems.examples)} problems; left out: "
                    f"{problems.num_duplicates} duplicates, {problems.num_too_long} longer than "
                    "env.max_prompt_tokens"
                )

    def is_due(self, iteration: int, last: int) -> bool:
        """Whether there is an evaluation after this iteration; 0 is before the first."""
        frequency = self.config.eval.frequency
        due = iteration in (0, last) or bool(frequency and iteration % frequency == 0)
        return due and bool(self.sets)

    def run(self, iteration: int, is_stopped: Callable[[], bool]) -> tuple[dict[str, float], list[str]] | None:
        """Evaluates every set, and returns the metrics and a table for each set.

        None if `is_stopped` becomes true during the evaluation.
        """
        metrics: dict[str, float] = {}
        tables = []
        for eval_set in self.sets:
            path = self.run_dir / "eval" / eval_set.name / f"iteration_{iteration}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".partial")
            began = time.perf_counter()
            rewards = RewardService(eval_set.task, eval_set.env, self.optimizer_step, self.config.total_optimizer_steps)
            groups = self.make_group_rollout(eval_set, rewards, eval_set_seed(self.config.train.seed, eval_set.name))
            try:
                with (
                    unfinished.open("w", encoding="utf-8") as file,
                    self.record(eval_set.name, iteration) as record_group,
                ):
                    coroutine = self._evaluate_set(eval_set, groups, file, record_group)
                    results = self.loop.run(_run_until_stopped(is_stopped, coroutine))
            except _EvaluationStopped:
                self.log(f"the evaluation of {eval_set.name} was interrupted")
                return None
            finally:
                rewards.close()
            unfinished.replace(path)
            set_metrics = summarize(results, eval_set.settings.n) | {"seconds": time.perf_counter() - began}
            metrics |= {f"eval/{eval_set.name}/{key}": value for key, value in set_metrics.items()}
            tables.append(format_table(eval_set.name, set_metrics, eval_set.settings.n))
        return metrics, tables

    async def _evaluate_set(
        self, eval_set: EvalSet, groups: GroupRollout, file: TextIO, record_group: Callable[[Group], None]
    ) -> list[ProblemResults]:
        """Evaluates a set, and returns the results in the order of the problems.

        Groups are written as they finish; groups without a scored completion come last.
        """
        finished, total = count(1), len(eval_set.problems.examples)
        self.show_progress(f"eval {eval_set.name}", 0, total)
        capacity = asyncio.Semaphore(max(1, self.max_completions // eval_set.settings.n))
        lowest = MinimumScores()

        def finish(group: Group) -> ProblemResults:
            lowest.record_and_lower([group])
            for line in group.attempts():
                file.write(json.dumps(line) + "\n")
            record_group(group)
            self.show_progress(f"eval {eval_set.name}", next(finished), total)
            return problem_results(group)

        async def run_problem(index: int, example: Example) -> ProblemResults | Group:
            await capacity.acquire()
            group = await groups.run_group(example, FIRST_GROUP_ID + index, capacity.release)
            is_scored = any(verdict.outcome == "scored" for verdict in group.verdicts)
            return finish(group) if is_scored else group  # an unscored group waits for the lowest score of the set

        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(run_problem(*item)) for item in enumerate(eval_set.problems.examples)]
        outcomes = [task.result() for task in tasks]
        return [finish(item) if isinstance(item, Group) else item for item in outcomes]


class _EvaluationStopped(Exception):
    """Raised where a stop request interrupts an evaluation."""


async def _run_until_stopped(is_stopped: Callable[[], bool], coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine and returns its result.

    Raises:
        _EvaluationStopped: `is_stopped` became true first; the coroutine is cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        while not task.done():
            if is_stopped():
                raise _EvaluationStopped
            await asyncio.wait((task,), timeout=0.2)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait((task,))


def eval_set_seed(seed: int, name: str) -> int:
    """Returns the 24-bit seed of a set, from the run's seed and the set's name.

    With a problem's group id this seed fixes the samples of the problem, whatever other sets there are.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=3).digest(), "little")


def problem_results(group: Group) -> ProblemResults:
    """Returns the results of a group; a completion without a score is an error."""
    pairs = zip(group.completions, group.verdicts, strict=True)
    scored = [(completion, verdict) for completion, verdict in pairs if verdict.has_score]
    return ProblemResults(
        correct=tuple(verdict.success >= 1 for _, verdict in scored),
        scores=tuple(verdict.score for _, verdict in scored),
        lengths=tuple(completion.num_sampled_tokens for completion, _ in scored),
        truncated=tuple(completion.finish_reason == "length" for completion, _ in scored),
        errors=len(group.completions) - len(scored),
    )
