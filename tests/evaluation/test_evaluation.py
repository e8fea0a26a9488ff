"""Tests that an evaluation covers every problem, whatever is in flight."""

import asyncio
import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from envs.group import Group, Sampling
from envs.task import Example, Outcome
from tests.group_collection import make_group_rollout
from tests.groups import make_completion, make_group
from tests.rollout.scripted_engine import ScriptedEngine, ScriptedRewardService
from tests.script_runner import compose_run_config
from tests.tiny_models import EOS, LengthReward, numbered_examples, tiny_llama
from torchgrpo.evaluation.evaluation import FIRST_GROUP_ID, Evaluation, eval_set_seed, problem_results
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

N = 3


class WatchedEngine(TransformersEngine):
    """Transformers engine that records the maximum of requests in flight."""

    max_in_flight = 0

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.max_in_flight = max(self.max_in_flight, self.in_flight)


def make_evaluation(
    loop: EngineLoop, max_in_flight: int, show_progress: Callable[..., None] = lambda *stage: None
) -> Evaluation:
    """Builds an evaluation without sets.

    max_in_flight: maximum of completions in the engines.
    """
    unused: Any = None
    return Evaluation(compose_run_config(), max_in_flight, [], loop, unused, show_progress, unused, Path(), unused)


def numbered_set(count: int, n: int) -> Any:
    problems = SimpleNamespace(examples=numbered_examples(count))
    return SimpleNamespace(name="sums", problems=problems, settings=SimpleNamespace(n=n))


def evaluate_problems(loop: EngineLoop, grader: Any, count: int, in_flight: int) -> list[Group]:
    """Evaluates `count` problems, and returns their groups in order."""
    groups: dict[int, Group] = {}
    generator = make_group_rollout(loop, grader, N, Sampling(max_tokens=6), seed=5)

    async def run_group(example: Example, group_id: int, on_sampled: Any) -> Group:
        found = groups[group_id - FIRST_GROUP_ID] = await generator.run_group(example, group_id, on_sampled)
        return found

    group_rollout: Any = SimpleNamespace(run_group=run_group)
    file = io.StringIO()
    recorded: list[Group] = []
    stages: list[tuple[str, int, int]] = []
    evaluation = make_evaluation(loop, in_flight * N, lambda *stage: stages.append(stage))
    results = loop.run(evaluation._evaluate_set(numbered_set(count, N), group_rollout, file, recorded.append))
    assert stages == [("eval sums", done, count) for done in range(count + 1)]
    assert results == [problem_results(groups[index]) for index in range(count)]
    assert len(file.getvalue().splitlines()) == count * N
    assert {group.group_id for group in recorded} == {group.group_id for group in groups.values()}
    return [groups[index] for index in range(count)]


def test_every_problem_is_evaluated_whatever_is_in_flight() -> None:
    found = []
    for in_flight, busy in ((1, False), (4, True), (99, True)):
        engine = WatchedEngine(tiny_llama(), [EOS])
        loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
        if busy:
            training = Request(1, (5, 6, 7), 4, Sampling(max_tokens=40), seed=1)
            loop.spawn(partial(loop.generate, training))  # type: ignore[arg-type]
        groups = evaluate_problems(loop, LengthReward(), 7, in_flight)
        assert engine.max_in_flight <= in_flight + busy
        assert [group.group_id for group in groups] == [FIRST_GROUP_ID + index for index in range(7)]
        found.append([[one.token_ids for one in group.completions] for group in groups])
        loop.close()
    assert found[0] == found[1] == found[2]


def test_a_group_without_a_score_takes_the_lowest_of_the_evaluation() -> None:
    outcomes: list[Outcome] = ["invalid", "scored", "invalid"]
    groups = [
        make_group(place, [make_completion(2, -3.0 * (outcome == "scored"), outcome=outcome)])
        for place, outcome in enumerate(outcomes)
    ]

    async def run_group(example: Example, group_id: int, on_sampled: Any) -> Group:
        on_sampled()
        return groups[group_id - FIRST_GROUP_ID]

    loop = EngineLoop(ScriptedEngine(version=0), timeout=600.0, wait_timeout=600.0)
    recorded: list[Group] = []
    group_rollout: Any = SimpleNamespace(run_group=run_group)
    evaluation = make_evaluation(loop, 4)
    results = loop.run(evaluation._evaluate_set(numbered_set(3, 1), group_rollout, io.StringIO(), recorded.append))
    loop.close()
    assert [result.scores for result in results] == [(-3.0,)] * 3
    assert [group.group_id for group in recorded] == [1, 0, 2]


def test_the_engines_go_on_while_graders_are_slow() -> None:
    engine, grader = ScriptedEngine(version=0), ScriptedRewardService(withheld=True)
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)

    async def release() -> None:
        until = time.monotonic() + 600
        while len(grader.rows) < 7 and time.monotonic() < until:
            await asyncio.sleep(0)
        assert engine.in_flight == 0, "all have been answered, though none is judged"
        grader.release()

    loop.spawn(release)
    assert len(evaluate_problems(loop, grader, 7, in_flight=2)) == 7
    assert grader.rows == list(range(7))
    loop.close()


def test_a_completion_without_a_score_is_an_error_and_nothing_else() -> None:
    group = make_group(0, [make_completion(3, 1.0), make_completion(2, 0.5), make_completion(2, 9.0, outcome="error")])
    group.completions[1].finish_reason = "length"
    found = problem_results(group)
    assert (found.correct, found.scores, found.errors) == ((True, False), (1.0, 0.5), 1)
    assert (found.lengths, found.truncated) == ((3, 2), (False, True))


def test_every_set_has_a_seed_of_its_own_whatever_other_sets_there_are() -> None:
    seeds = [eval_set_seed(seed, name) for seed in (0, 1) for name in ("aime", "gsm8k")]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 1 << 24 for seed in seeds)
    assert eval_set_seed(0, "aime") == seeds[0]
