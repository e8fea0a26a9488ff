"""Tests of the group stream: starts of groups, their age, and outstanding examples."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from envs.group import Group, Sampling
from envs.prompts import PromptQueue
from tests.group_collection import ListPromptSource, make_group_rollout
from tests.rollout.scripted_engine import ScriptedEngine, ScriptedRewardService
from tests.tiny_models import numbered_examples
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Response
from torchgrpo.rollout.group_buffer import GroupBuffer
from torchgrpo.rollout.group_stream import GroupStream


class SteppedStream:
    """Stream whose loop turns only on request.

    Group i is made of example i with seed i.
    """

    def __init__(
        self,
        in_flight: int,
        max_age: int = 1000,
        keep_order: bool = True,
        capacity: int = 1000,
        rejected_ids: tuple[int, ...] = (),
        attempts: int = 10,
    ) -> None:
        self.engine, self.reward_service = ScriptedEngine(), ScriptedRewardService()
        self.loop = EngineLoop(self.engine, timeout=600.0, wait_timeout=600.0)
        self.buffer: GroupBuffer[Group] = GroupBuffer(
            batch_groups=1, max_age=max_age, batches_per_version=1, capacity=capacity, keep_order=keep_order
        )
        self.prompts = PromptQueue(ListPromptSource(numbered_examples(2000)))  # type: ignore[arg-type]
        group_rollout = make_group_rollout(self.loop, self.reward_service, 1, Sampling())
        keep_group: Callable[[Group], bool] = lambda group: group.group_id not in rejected_ids  # noqa: E731
        self.stream = GroupStream(
            self.loop, group_rollout, self.prompts, self.buffer, in_flight, 60.0, keep_group, attempts
        )
        self.stream.start()
        self.turn()

    def turn(self) -> None:
        """Turns the loop often enough for everything that is pending in these tests."""

        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run(turns())

    def answer(self, *seeds: int, versions: tuple[list[int], ...] = ()) -> None:
        for seed in seeds:
            self.engine.answer(seed, *versions)
        self.turn()

    def take_rows(self) -> list[int] | None:
        groups = self.buffer.try_take_batch(self.stream._return_stale_group)
        self.turn()
        return None if groups is None else [group.group_id for group in groups]


@contextmanager
def stepped_stream(in_flight: int, **how: object) -> Iterator[SteppedStream]:
    stream = SteppedStream(in_flight, **how)  # type: ignore[arg-type]
    yield stream
    stream.loop.close()


def test_no_more_groups_are_generated_than_the_engines_hold() -> None:
    with stepped_stream(in_flight=3) as run:
        run.turn()
        assert run.engine.seeds == [0, 1, 2]
        run.reward_service.withheld = True
        run.answer(1)  # one group is being scored: its room at the engines is free
        assert run.reward_service.rows == [1]
        assert run.engine.seeds == [0, 1, 2, 3]
        assert (run.engine.in_flight, run.stream.groups_in_flight) == (3, 4)


def test_the_engines_are_full_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of a group whose scoring starts is used before the next step."""
    with stepped_stream(in_flight=3) as run:
        run.reward_service.withheld = True
        held, step = [], run.engine.step

        def note(timeout: float) -> list[Response]:
            held.append(run.engine.in_flight)
            return step(timeout)

        monkeypatch.setattr(run.engine, "step", note)
        run.answer(1)
        run.answer(0, 2, 3)
    assert set(held) == {3}


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    """The group's tokens have versions 0 to 3, because weights were pushed during its generation.

    `drop` bounds the age at 1.
    """
    with stepped_stream(in_flight=1, max_age=1, keep_order=False) as run:
        run.stream.group_rollout.candidates = run.stream.group_rollout.repeats = 2
        run.answer(0, versions=([3, 3], [2, 0, 3]))
        run.buffer.set_version(3)
        assert run.take_rows() is None
        assert run.buffer.groups_dropped == 1


def test_a_stale_group_is_sampled_again_first() -> None:
    with stepped_stream(in_flight=1, max_age=1, keep_order=False) as run:
        run.answer(0, 1)
        run.buffer.set_version(3)
        assert run.take_rows() is None
        assert run.buffer.groups_dropped == 2
        assert [group.example.row for group in run.stream.take_stale_groups()] == [0, 1]  # for the ledger
        assert run.stream.take_stale_groups() == []
        assert [example.row for example in run.prompts.returned_examples] == [1]  # 0 is in flight again
        run.answer(2, 3)
        assert run.reward_service.rows == [0, 1, 0, 1]
        assert [example.row for example in run.prompts.returned_examples] == []


def test_a_rejected_group_is_replaced_in_its_slot() -> None:
    with stepped_stream(in_flight=2, max_age=1, rejected_ids=(0,)) as run:
        run.answer(0, 1)
        assert run.engine.seeds == [0, 1, 2]
        assert (run.engine.in_flight, run.stream.groups_in_flight) == (1, 1)
        assert run.take_rows() is None  # the first slot is not filled yet
        run.answer(2)
        (first, second) = run.buffer.ready_groups()
        assert (first.group_id, second.group_id) == (2, 1)
        assert first.replaces is not None and first.replaces.group_id == 0
        assert [run.take_rows(), run.take_rows()] == [[2], [1]]


def test_the_last_group_stays_after_all_attempts() -> None:
    with stepped_stream(in_flight=1, max_age=0, rejected_ids=tuple(range(99)), attempts=2) as run:
        run.answer(0, 1, 2)
        assert run.take_rows() == [2]
        assert [example.row for example, _ in run.prompts.source.observations] == [0, 1, 2]  # type: ignore[attr-defined]


def test_outstanding_examples_are_in_order() -> None:
    """Ready groups come first, then groups in flight in the order of admission."""
    with stepped_stream(in_flight=4, max_age=3, rejected_ids=(0,)) as run:
        run.answer(3, 0)
        assert [example.row for example in run.stream.outstanding_examples()] == [3, 4, 1, 2]


@pytest.mark.parametrize("stream_change", ["a take", "a push"])
def test_room_in_the_buffer_is_used_at_once(stream_change: str) -> None:
    capacity = 1 if stream_change == "a take" else 1000
    with stepped_stream(in_flight=2, max_age=0 if stream_change == "a push" else 9, capacity=capacity) as run:
        run.answer(0, 1)
        began = len(run.engine.seeds)
        if stream_change == "a take":
            assert run.take_rows() == [0]
            assert run.take_rows() == [1]
        else:
            assert run.take_rows() == [0]
            assert len(run.engine.seeds) == began
            run.buffer.set_version(1)
            run.turn()
        assert len(run.engine.seeds) > began


def test_room_made_during_admission_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner takes a batch between the buffer's answer and the stream's reaction."""
    with stepped_stream(in_flight=1, capacity=1) as run:
        admit = run.buffer.admit

        def admit_before_take() -> int | None:
            sequence = admit()
            if sequence is None:
                monkeypatch.undo()
                assert run.buffer.try_take_batch(run.stream._return_stale_group) is not None
            return sequence

        monkeypatch.setattr(run.buffer, "admit", admit_before_take)
        run.answer(0)
        assert run.engine.seeds == [0, 1]


def test_a_waiting_task_gets_the_next_slot() -> None:
    with stepped_stream(in_flight=1, capacity=1) as run:
        run.answer(0)
        assert (run.engine.seeds, run.stream.groups_in_flight, len(run.stream._slot_waiters)) == ([0], 0, 1)
        assert run.take_rows() == [0]
        assert (run.engine.seeds, run.stream.groups_in_flight, len(run.stream._slot_waiters)) == ([0, 1], 1, 0)


def make_stream(
    engine: ScriptedEngine, reward_service: ScriptedRewardService, batch_groups: int, max_age: int, prompts: int = 20
) -> GroupStream:
    """Makes a stream, which the test enters and closes."""
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    buffer: GroupBuffer[Group] = GroupBuffer(
        batch_groups=batch_groups, max_age=max_age, batches_per_version=1, capacity=8, keep_order=True
    )
    queue = PromptQueue(ListPromptSource(numbered_examples(prompts)))  # type: ignore[arg-type]
    return GroupStream(loop, make_group_rollout(loop, reward_service, 1, Sampling()), queue, buffer, 4, 20.0)


def test_the_thread_feeds_the_learner_and_returns_other_prompts() -> None:
    """Every sampled prompt is either taken or returned, exactly once."""
    engine = ScriptedEngine(version=0)
    taken: list[int] = []
    with make_stream(engine, ScriptedRewardService(), batch_groups=4, max_age=2, prompts=2000) as stream:
        for version in range(1, 30):
            taken += [group.example.row for group in stream.take_batch()]
            stream.loop.call(lambda: setattr(engine, "version", engine.version + 1))
            stream.buffer.set_version(version)
            assert 0.0 <= stream.idle_share() <= 1.0
    stream.loop.close()
    assert taken == list(range(29 * 4))
    returned = [example.row for example in stream.prompts.returned_examples]
    assert taken + returned == list(range(stream.prompts.next_group_id))


def test_a_group_that_fails_is_raised_where_groups_are_taken() -> None:
    class FailingRewardService(ScriptedRewardService):
        def submit(self, completions: object, examples: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError("a bug in my reward")

    stream = make_stream(ScriptedEngine(version=0), FailingRewardService(), batch_groups=1, max_age=0)
    with stream, pytest.raises(ZeroDivisionError, match="bug in my reward") as raised:
        stream.take_batch()
    assert "submit" in [frame.name for frame in raised.traceback]
    stream.loop.close()


def test_nothing_is_generated_before_the_stream_is_entered() -> None:
    """An evaluation before training turns the same loop."""
    engine = ScriptedEngine(version=0)
    stream = make_stream(engine, ScriptedRewardService(), batch_groups=1, max_age=1)
    stream.loop.run(asyncio.sleep(0.01))
    assert (engine.in_flight, stream.prompts.next_group_id) == (0, 0)
    with stream:
        assert stream.take_batch()[0].example.row == 0
    stream.loop.close()
