"""An evaluation goes through every problem, however much is in flight and however slow the graders are."""

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
from tests.generating import generation
from tests.groups import make_completion, make_group
from tests.rollout.scripted import ScriptedEngine, ScriptedGrader
from tests.scripts import configured
from tests.tiny import EOS, LengthReward, numbered_examples, tiny_llama
from torchgrpo.evaluation.evaluation import FIRST_GROUP_ID, Evaluation, set_seed, tally
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

N = 3


class Watched(TransformersEngine):
    """Notes the most requests it held."""

    most = 0

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.most = max(self.most, self.in_flight)


def evaluation_of(loop: EngineLoop, most: int, tell: Callable[..., None] = lambda *stage: None) -> Evaluation:
    """One of as many completions at a time."""
    unused: Any = None
    return Evaluation(configured(), most, [], loop, unused, tell, unused, Path(), unused)


def numbered_set(count: int, n: int) -> Any:
    problems = SimpleNamespace(examples=numbered_examples(count))
    return SimpleNamespace(name="sums", problems=problems, settings=SimpleNamespace(n=n))


def evaluated(loop: EngineLoop, grader: Any, count: int, in_flight: int) -> list[Group]:
    """What `count` problems gave, in their order."""
    groups: dict[int, Group] = {}
    made = generation(loop, grader, N, Sampling(max_tokens=6), seed=5)

    async def run_group(example: Example, group_id: int, drawn: Any) -> Group:
        found = groups[group_id - FIRST_GROUP_ID] = await made.run_group(example, group_id, drawn)
        return found

    maker: Any = SimpleNamespace(run_group=run_group)
    file = io.StringIO()
    seen: list[Group] = []
    told: list[tuple[str, int, int]] = []
    evaluation = evaluation_of(loop, in_flight * N, lambda *stage: told.append(stage))
    tallies = loop.run(evaluation._tallies(numbered_set(count, N), maker, file, seen.append))
    assert told == [("eval sums", done, count) for done in range(count + 1)]
    assert tallies == [tally(groups[index]) for index in range(count)]
    assert len(file.getvalue().splitlines()) == count * N
    assert {made.group_id for made in seen} == {made.group_id for made in groups.values()}
    return [groups[index] for index in range(count)]


def test_it_goes_through_every_problem_whatever_is_in_flight() -> None:
    found = []
    for in_flight, busy in ((1, False), (4, True), (99, True)):
        engine = Watched(tiny_llama(), [EOS])
        loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
        if busy:
            training = Request(1, (5, 6, 7), 4, Sampling(max_tokens=40), seed=1)
            loop.spawn(partial(loop.generate, training))  # type: ignore[arg-type]
        groups = evaluated(loop, LengthReward(), 7, in_flight)
        assert engine.most <= in_flight + busy
        assert [made.group_id for made in groups] == [FIRST_GROUP_ID + index for index in range(7)]
        found.append([[one.token_ids for one in made.completions] for made in groups])
        loop.close()
    assert found[0] == found[1] == found[2]


def test_a_group_without_a_score_takes_the_lowest_of_the_evaluation() -> None:
    outcomes: list[Outcome] = ["invalid", "scored", "invalid"]
    groups = [
        make_group(place, [make_completion(2, -3.0 * (outcome == "scored"), outcome=outcome)])
        for place, outcome in enumerate(outcomes)
    ]

    async def run_group(example: Example, group_id: int, drawn: Any) -> Group:
        drawn()
        return groups[group_id - FIRST_GROUP_ID]

    loop = EngineLoop(ScriptedEngine(version=0), timeout=600.0, wait_timeout=600.0)
    recorded: list[Group] = []
    maker: Any = SimpleNamespace(run_group=run_group)
    evaluation = evaluation_of(loop, 4)
    tallies = loop.run(evaluation._tallies(numbered_set(3, 1), maker, io.StringIO(), recorded.append))
    loop.close()
    assert [tally.scores for tally in tallies] == [(-3.0,)] * 3
    assert [group.group_id for group in recorded] == [1, 0, 2]


def test_the_engines_go_on_while_graders_are_slow() -> None:
    engine, grader = ScriptedEngine(version=0), ScriptedGrader(withheld=True)
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)

    async def release() -> None:
        until = time.monotonic() + 600
        while len(grader.rows) < 7 and time.monotonic() < until:
            await asyncio.sleep(0)
        assert engine.in_flight == 0, "all have been answered, though none is judged"
        grader.release()

    loop.spawn(release)
    assert len(evaluated(loop, grader, 7, in_flight=2)) == 7
    assert grader.rows == list(range(7))
    loop.close()


def test_what_could_not_be_judged_is_an_error_and_nothing_else() -> None:
    made = make_group(
        0, [make_completion(3, 1.0), make_completion(2, 0.5), make_completion(2, 9.0, outcome="error")]
    )
    made.completions[1].finish_reason = "length"
    found = tally(made)
    assert (found.correct, found.scores, found.errors) == ((True, False), (1.0, 0.5), 1)
    assert (found.lengths, found.truncated) == ((3, 2), (False, True))


def test_every_set_has_a_seed_of_its_own_whatever_other_sets_there_are() -> None:
    seeds = [set_seed(seed, name) for seed in (0, 1) for name in ("aime", "gsm8k")]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 1 << 24 for seed in seeds)
    assert set_seed(0, "aime") == seeds[0]
