"""Groups kept alive beside a learner: who may start, how old a group is, what no batch has taken."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from envs.group import Group, Sampling
from envs.prompts import PromptQueue
from tests.generating import Listed, generation
from tests.rollout.scripted import ScriptedEngine, ScriptedGrader
from tests.tiny import numbered_examples
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Response
from torchgrpo.rollout.group_buffer import GroupBuffer
from torchgrpo.rollout.stream import Stream


class Driven:
    """A stream whose loop turns only while it is told to; group i is made of example i with the seed i."""

    def __init__(
        self,
        in_flight: int,
        max_age: int = 1000,
        keep_order: bool = True,
        capacity: int = 1000,
        refused: tuple[int, ...] = (),
        attempts: int = 10,
    ) -> None:
        self.engine, self.grader = ScriptedEngine(), ScriptedGrader()
        self.loop = EngineLoop(self.engine, timeout=600.0, wait_timeout=600.0)
        self.buffer: GroupBuffer[Group] = GroupBuffer(
            batch_groups=1, max_age=max_age, batches_per_version=1, capacity=capacity, keep_order=keep_order
        )
        self.prompts = PromptQueue(Listed(numbered_examples(2000)))  # type: ignore[arg-type]
        made = generation(self.loop, self.grader, 1, Sampling())
        wants: Callable[[Group], bool] = lambda group: group.group_id not in refused  # noqa: E731
        self.stream = Stream(self.loop, made, self.prompts, self.buffer, in_flight, 60.0, wants, attempts)
        self.stream.begin()
        self.turn()

    def turn(self) -> None:
        """As many turns of the loop as anything here needs."""

        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run(turns())

    def answer(self, *seeds: int, versions: tuple[list[int], ...] = ()) -> None:
        for seed in seeds:
            self.engine.answer(seed, *versions)
        self.turn()

    def take_now(self) -> list[int] | None:
        groups = self.buffer.take_now(self.stream._hand_back)
        self.turn()
        return None if groups is None else [group.group_id for group in groups]


@contextmanager
def driven(in_flight: int, **how: object) -> Iterator[Driven]:
    made = Driven(in_flight, **how)  # type: ignore[arg-type]
    yield made
    made.loop.close()


def test_no_more_groups_are_generated_than_the_engines_hold() -> None:
    with driven(in_flight=3) as run:
        run.turn()
        assert run.engine.seeds == [0, 1, 2]
        run.grader.withheld = True
        run.answer(1)  # one is judged now: its place at the engines is free
        assert run.grader.rows == [1]
        assert run.engine.seeds == [0, 1, 2, 3]
        assert (run.engine.in_flight, run.stream.groups_in_flight) == (3, 4)


def test_the_engines_are_full_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that a group leaves as it is judged is used before the next step."""
    with driven(in_flight=3) as run:
        run.grader.withheld = True
        held, step = [], run.engine.step

        def note(timeout: float) -> list[Response]:
            held.append(run.engine.in_flight)
            return step(timeout)

        monkeypatch.setattr(run.engine, "step", note)
        run.answer(1)
        run.answer(0, 2, 3)
    assert set(held) == {3}


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    """Weights were pushed while it was generated: its tokens are of versions 0 to 3, and `drop` bounds the age at 1."""
    with driven(in_flight=1, max_age=1, keep_order=False) as run:
        run.stream.generation.candidates = run.stream.generation.repeats = 2
        run.answer(0, versions=([3, 3], [2, 0, 3]))
        run.buffer.pushed(3)
        assert run.take_now() is None
        assert run.buffer.dropped == 1


def test_a_group_that_was_too_old_is_drawn_again_first() -> None:
    with driven(in_flight=1, max_age=1, keep_order=False) as run:
        run.answer(0, 1)
        run.buffer.pushed(3)
        assert run.take_now() is None
        assert run.buffer.dropped == 2
        assert [group.example.row for group in run.stream.take_stale()] == [0, 1]  # for the ledger
        assert run.stream.take_stale() == []
        assert [example.row for example in run.prompts.returned] == [1]  # 0 is in flight again
        run.answer(2, 3)
        assert run.grader.rows == [0, 1, 0, 1]
        assert [example.row for example in run.prompts.returned] == []


def test_a_group_that_is_not_wanted_hands_on_its_place() -> None:
    with driven(in_flight=2, max_age=1, refused=(0,)) as run:
        run.answer(0, 1)
        assert run.engine.seeds == [0, 1, 2]
        assert (run.engine.in_flight, run.stream.groups_in_flight) == (1, 1)
        assert run.take_now() is None  # the first place is not filled yet
        run.answer(2)
        (first, second) = run.buffer.contents()
        assert (first.group_id, second.group_id) == (2, 1)
        assert first.in_place_of is not None and first.in_place_of.group_id == 0
        assert [run.take_now(), run.take_now()] == [[2], [1]]


def test_after_the_cap_the_last_group_stays() -> None:
    with driven(in_flight=1, max_age=0, refused=tuple(range(99)), attempts=2) as run:
        run.answer(0, 1, 2)
        assert run.take_now() == [2]
        assert [example.row for example, _ in run.prompts.source.observed] == [0, 1, 2]  # type: ignore[attr-defined]


def test_what_no_batch_has_taken_is_told_in_its_order() -> None:
    """Ready groups first, then those in flight as they were admitted, whatever came in their places."""
    with driven(in_flight=4, max_age=3, refused=(0,)) as run:
        run.answer(3, 0)
        assert [example.row for example in run.stream.outstanding()] == [3, 4, 1, 2]


@pytest.mark.parametrize("made", ["a take", "a push"])
def test_room_in_the_buffer_is_used_at_once(made: str) -> None:
    capacity = 1 if made == "a take" else 1000
    with driven(in_flight=2, max_age=0 if made == "a push" else 9, capacity=capacity) as run:
        run.answer(0, 1)
        began = len(run.engine.seeds)
        if made == "a take":
            assert run.take_now() == [0]
            assert run.take_now() == [1]
        else:
            assert run.take_now() == [0]
            assert len(run.engine.seeds) == began
            run.buffer.pushed(1)
            run.turn()
        assert len(run.engine.seeds) > began


def test_room_that_is_made_while_the_buffer_is_asked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner takes a batch just after the buffer said that it is full, and before that was noted."""
    with driven(in_flight=1, capacity=1) as run:
        admit = run.buffer.admit

        def taken_meanwhile() -> int | None:
            sequence = admit()
            if sequence is None:
                monkeypatch.undo()
                assert run.buffer.take_now(run.stream._hand_back) is not None
            return sequence

        monkeypatch.setattr(run.buffer, "admit", taken_meanwhile)
        run.answer(0)
        assert run.engine.seeds == [0, 1]


def test_a_task_that_waited_is_given_the_next_place() -> None:
    with driven(in_flight=1, capacity=1) as run:
        run.answer(0)
        assert (run.engine.seeds, run.stream.groups_in_flight, len(run.stream._waiting)) == ([0], 0, 1)
        assert run.take_now() == [0]
        assert (run.engine.seeds, run.stream.groups_in_flight, len(run.stream._waiting)) == ([0, 1], 1, 0)


def stream_of(
    engine: ScriptedEngine, grader: ScriptedGrader, batch_groups: int, max_age: int, prompts: int = 20
) -> Stream:
    """One that a test enters, so that a thread drives its loop; the test closes that."""
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    buffer: GroupBuffer[Group] = GroupBuffer(
        batch_groups=batch_groups, max_age=max_age, batches_per_version=1, capacity=8, keep_order=True
    )
    queue = PromptQueue(Listed(numbered_examples(prompts)))  # type: ignore[arg-type]
    return Stream(loop, generation(loop, grader, 1, Sampling()), queue, buffer, 4, 20.0)


def test_in_its_own_thread_it_feeds_the_learner_and_hands_the_rest_back() -> None:
    """Every prompt that was drawn is either taken or handed back, once."""
    engine = ScriptedEngine(version=0)
    taken: list[int] = []
    with stream_of(engine, ScriptedGrader(), batch_groups=4, max_age=2, prompts=2000) as stream:
        for version in range(1, 30):
            taken += [group.example.row for group in stream.take()]
            stream.loop.call(lambda: setattr(engine, "version", engine.version + 1))
            stream.buffer.pushed(version)
            assert 0.0 <= stream.idle_share() <= 1.0
    stream.loop.close()
    assert taken == list(range(29 * 4))
    returned = [example.row for example in stream.prompts.returned]
    assert taken + returned == list(range(stream.prompts.next_group_id))


def test_a_group_that_fails_is_raised_where_groups_are_taken() -> None:
    class Broken(ScriptedGrader):
        def submit(self, completions: object, examples: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError("a bug in my reward")

    stream = stream_of(ScriptedEngine(version=0), Broken(), batch_groups=1, max_age=0)
    with stream, pytest.raises(ZeroDivisionError, match="bug in my reward") as raised:
        stream.take()
    assert "submit" in [frame.name for frame in raised.traceback]
    stream.loop.close()


def test_nothing_is_generated_before_the_stream_is_entered() -> None:
    """An evaluation before training turns the same loop."""
    engine = ScriptedEngine(version=0)
    stream = stream_of(engine, ScriptedGrader(), batch_groups=1, max_age=1)
    stream.loop.run(asyncio.sleep(0.01))
    assert (engine.in_flight, stream.prompts.next_group_id) == (0, 0)
    with stream:
        assert stream.take()[0].example.row == 0
    stream.loop.close()
