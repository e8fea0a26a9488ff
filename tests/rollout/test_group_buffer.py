"""Tests of the group buffer without a model: admission, order, overtaking, deadlines."""

import random
import threading

import pytest

from torchgrpo.rollout.group_buffer import GroupBuffer


def make(max_age: int = 1, keep_order: bool = True, batches_per_version: int = 1, **options: int) -> GroupBuffer[int]:
    return GroupBuffer(
        batch_groups=4,
        max_age=max_age,
        batches_per_version=batches_per_version,
        capacity=options.pop("capacity", 1000),
        keep_order=keep_order,
        **options,
    )


def admit_all(buffer: GroupBuffer[int]) -> list[int]:
    admitted = []
    while len(admitted) < 10_000 and (sequence := buffer.admit()) is not None:
        admitted.append(sequence)
    return admitted


@pytest.mark.parametrize(("max_age", "batches_per_version", "expected"), [(0, 1, 4), (1, 1, 8), (2, 1, 12), (1, 3, 24)])
def test_admission_stops_where_the_bound_would_break(max_age: int, batches_per_version: int, expected: int) -> None:
    assert len(admit_all(make(max_age, batches_per_version=batches_per_version))) == expected


def test_admission_goes_on_after_a_push() -> None:
    buffer = make(max_age=0)
    assert admit_all(buffer) == [0, 1, 2, 3]
    for sequence in range(4):
        buffer.put(sequence, 0, sequence)
    assert buffer.take_batch(1.0, fail_if_stale) == [0, 1, 2, 3]
    assert admit_all(buffer) == []
    buffer.set_version(1)
    assert admit_all(buffer) == [4, 5, 6, 7]


def test_a_resumed_run_continues_the_count() -> None:
    buffer = make(max_age=0, first_batch=7, version=7)
    assert len(admit_all(buffer)) == 4


def test_a_resumed_run_that_pushed_once_more_than_planned_keeps_the_bound() -> None:
    """A push before the last evaluation adds a version.

    There are 7 batches, with pushes after every second one and at the end.
    """
    buffer = make(max_age=0, first_batch=7, version=4, batches_per_version=2)
    admitted = admit_all(buffer)
    assert len(admitted) == 4, "the batch after this one has a new version"
    for sequence in admitted:
        buffer.put(sequence, 4, sequence)
    assert buffer.take_batch(1.0, fail_if_stale) == admitted
    buffer.set_version(5)
    assert len(admit_all(buffer)) == 8


def test_order_of_admission_is_kept() -> None:
    buffer = make()
    for sequence in (3, 1, 2, 0):
        buffer.put(sequence, 0, sequence)
    assert buffer.take_batch(1.0, fail_if_stale) == [0, 1, 2, 3]


def test_order_of_completion_drops_what_is_too_old() -> None:
    buffer = make(keep_order=False)
    buffer.set_version(2)
    returned: list[int] = []
    for sequence, version in ((5, 2), (0, 0), (6, 1), (1, 2), (7, 2)):
        buffer.put(sequence, version, sequence)
    assert buffer.take_batch(1.0, returned.append) == [1, 5, 6, 7]
    assert returned == [0]
    assert buffer.groups_dropped == 1


def test_as_many_as_were_dropped_may_start_again() -> None:
    """Dropped groups may be replaced.

    Of 16 groups, three batches are trained on and 4 groups were overtaken. At version 3 with a maximum age of 1,
    groups of the next two batches may be in flight.
    """
    buffer = make(max_age=1, keep_order=False)
    returned: list[int] = []
    admitted = 0
    for version, finished in ((0, (0, 1, 2, 3)), (1, (8, 9, 10, 11)), (2, (4, 5, 6, 7, 12, 13, 14, 15))):
        admitted += len(admit_all(buffer))
        for sequence in finished:
            buffer.put(sequence, 0 if sequence < 8 else version, sequence)
        assert buffer.take_batch(1.0, returned.append) == list(finished[-4:])
        buffer.set_version(version + 1)
    assert returned == [4, 5, 6, 7]
    assert admitted + len(admit_all(buffer)) == 3 * 4 + 4 + 2 * 4


def test_ready_groups_are_in_the_order_of_taking() -> None:
    buffer = make(keep_order=False)
    for sequence, version in ((5, 0), (3, 1)):
        buffer.put(sequence, version, sequence)
    assert buffer.try_take_batch(fail_if_stale) is None  # two of the four groups of a batch stay for it
    for sequence, version in ((9, 0), (1, 1), (7, 0)):
        buffer.put(sequence, version, sequence)
    assert buffer.ready_groups() == [3, 5, 1, 7, 9]


def test_capacity_holds_back_admission() -> None:
    buffer = make(max_age=9, capacity=2)
    for group in range(2):
        sequence = buffer.admit()
        assert sequence is not None
        buffer.put(sequence, 0, group)
    assert buffer.admit() is None


def test_a_wait_ends_with_a_message_about_who_waits_for_whom() -> None:
    buffer = make()
    for _ in range(6):
        buffer.admit()
    for sequence in (0, 3, 5):  # 3 and 5 wait for 1
        buffer.put(sequence, 0, sequence)
    message = r"learner waited .* for the engines: the batch has 1 of 4 groups, 3 are in flight, 2 are ready"
    with pytest.raises(TimeoutError, match=message):
        buffer.take_batch(0.05, fail_if_stale)
    for sequence in (1, 2):
        buffer.put(sequence, 0, sequence)
    assert buffer.take_batch(0.05, fail_if_stale) == [0, 1, 2, 3]  # groups that had arrived are not lost


def test_the_producers_error_is_raised_in_the_learner() -> None:
    buffer = make()
    threading.Timer(0.05, lambda: buffer.fail(ZeroDivisionError("in the reward"))).start()
    with pytest.raises(ZeroDivisionError, match="in the reward"):
        buffer.take_batch(10.0, fail_if_stale)


def fail_if_stale(group: int) -> None:
    raise AssertionError(f"group {group} was given back")


@pytest.mark.parametrize("seed", range(6))
def test_no_group_is_ever_too_old_lost_or_doubled(seed: int) -> None:
    """Random completion order with long tails and both policies; every version is checked at consumption."""
    chance = random.Random(seed)
    keep_order = seed % 2 == 0
    max_age, per_version = chance.choice([0, 1, 3]), chance.choice([1, 2])
    buffer = make(max_age, keep_order, per_version)
    flying: list[tuple[float, int, int, int]] = []
    prompts, returned, trained = iter(range(10**9)), [], []
    started: dict[int, int] = {}
    clock = 0.0
    for batch in range(200):
        while True:
            while len(flying) < 16 and (sequence := buffer.admit()) is not None:
                prompt = returned.pop() if returned else next(prompts)
                started[prompt] = buffer.version
                flying.append((clock + chance.lognormvariate(0, 1.5), sequence, buffer.version, prompt))
            try:
                groups = buffer.take_batch(0.0, returned.append)
                break
            except TimeoutError:
                flying.sort()
                clock, sequence, version, prompt = flying.pop(0)
                buffer.put(sequence, version, prompt)
        assert all(buffer.version - started[prompt] <= max_age for prompt in groups)
        trained += groups
        if (batch + 1) % per_version == 0:
            buffer.set_version(buffer.version + 1)
    assert len(trained) == len(set(trained)) == 800
    assert keep_order is False or buffer.groups_dropped == 0


@pytest.mark.parametrize("max_age", [0, 1])
def test_a_buffer_made_before_the_first_push_keeps_the_bound(max_age: int) -> None:
    """The schedules build the buffer at the version before the first push."""
    buffer = make(max_age, version=-1)
    buffer.set_version(0)
    assert len(admit_all(buffer)) == 4 * (1 + max_age)


def test_a_push_before_its_time_does_not_widen_the_bound() -> None:
    """Pushes follow every third batch; one extra push comes after the first batch."""
    buffer = make(max_age=1, batches_per_version=3)
    admitted = admit_all(buffer)
    assert len(admitted) == 24
    for sequence in admitted[:4]:
        buffer.put(sequence, 0, sequence)
    assert buffer.take_batch(1.0, fail_if_stale) == [0, 1, 2, 3]
    buffer.set_version(1)
    assert admit_all(buffer) == []
    for sequence in admitted[4:12]:
        buffer.put(sequence, 0, sequence)
    assert buffer.take_batch(1.0, fail_if_stale) + buffer.take_batch(1.0, fail_if_stale) == admitted[4:12]
    buffer.set_version(2)
    assert len(admit_all(buffer)) == 12


def test_on_wait_is_called_during_a_wait() -> None:
    buffer = make()
    calls = []

    def on_wait() -> None:
        calls.append(1)
        for sequence in range(4):
            buffer.put(sequence, 0, sequence)

    assert buffer.take_batch(0.2, fail_if_stale, on_wait) == [0, 1, 2, 3]  # it would have waited that long otherwise
    assert calls == [1]


def test_the_learner_wakes_at_a_complete_batch_or_a_stale_group() -> None:
    buffer, notifications = make(max_age=1, keep_order=False), []
    buffer._condition.notify_all = lambda: notifications.append(buffer.groups_ready)  # type: ignore[method-assign]
    assert admit_all(buffer) == list(range(8))
    buffer.set_version(2)
    notifications.clear()
    for sequence, version in ((0, 1), (1, 1), (2, 0), (3, 1)):
        buffer.put(sequence, version, sequence)
    assert notifications == [3, 4]
    too_old: list[int] = []
    assert buffer.try_take_batch(too_old.append) is None
    assert too_old == [2]
    buffer.put(4, 1, 4)
    assert notifications == [3, 4, 1], "three are in the batch"
    assert buffer.try_take_batch(fail_if_stale) == [0, 1, 3, 4]


def test_a_wait_sleeps() -> None:
    calls: list[int] = []
    with pytest.raises(TimeoutError, match="the batch has 0 of 4 groups"):
        make().take_batch(0.2, fail_if_stale, lambda: calls.append(1))
    assert 1 <= len(calls) < 10


def test_a_wait_starts_anew_with_every_group() -> None:
    """Four groups arrive, each after a wait of nearly the whole timeout."""
    buffer, calls = make(), []

    def on_wait() -> None:
        buffer.put(len(calls), 0, len(calls))
        calls.append(1)

    assert buffer.take_batch(0.2, fail_if_stale, on_wait) == [0, 1, 2, 3]
    assert len(calls) == 4
