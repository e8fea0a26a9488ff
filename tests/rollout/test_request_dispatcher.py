"""Tests of the request dispatcher: load, lost engines and late answers."""

import random

import pytest

from envs.group import Sampling
from tests.rollout.simulated_cluster import Simulation
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.engines.request_dispatcher import AssignedRequest, RequestDispatcher


def request(number: int, n: int = 1) -> Request:
    return Request(number, (), n, Sampling(), seed=0)


def make_dispatcher(engines: int, window: int) -> RequestDispatcher:
    dispatcher = RequestDispatcher(window)
    for engine in range(engines):
        dispatcher.add_engine(engine)
    return dispatcher


def request_ids(assignment: dict[int, list[Request]]) -> dict[int, list[int]]:
    return {engine: [request.request_id for request in requests] for engine, requests in assignment.items()}


def test_groups_go_to_the_least_loaded_engine_until_all_are_full() -> None:
    dispatcher = make_dispatcher(2, window=4)
    for number, n in enumerate((3, 1, 1, 2, 1)):
        dispatcher.submit(request(number, n))
    assert request_ids(dispatcher.assign(0.0)) == {0: [0, 4], 1: [1, 2, 3]}
    dispatcher.submit(request(5))
    assert dispatcher.assign(0.0) == {}
    assert dispatcher.in_flight == 6
    assert dispatcher.finish(1, 3)
    assert request_ids(dispatcher.assign(0.0)) == {1: [5]}


def test_of_equally_loaded_engines_the_one_that_has_waited_longest_is_next() -> None:
    dispatcher = make_dispatcher(3, window=2)
    for number in range(6):
        dispatcher.submit(request(number))
    assert request_ids(dispatcher.assign(0.0)) == {0: [0, 3], 1: [1, 4], 2: [2, 5]}
    for engine, number in ((2, 2), (0, 0), (1, 4)):
        assert dispatcher.finish(engine, number)
    for number in (6, 7, 8):
        dispatcher.submit(request(number))
    assert request_ids(dispatcher.assign(0.0)) == {2: [6], 0: [7], 1: [8]}


def test_a_group_beyond_the_window_goes_to_an_empty_engine() -> None:
    dispatcher = make_dispatcher(1, window=4)
    dispatcher.submit(request(0, n=9))
    dispatcher.submit(request(1, n=1))
    assert request_ids(dispatcher.assign(0.0)) == {0: [0]}


def test_a_lost_engines_groups_are_the_first_again_and_its_late_answers_do_not_count() -> None:
    dispatcher = make_dispatcher(2, window=2)
    for number in range(6):
        dispatcher.submit(request(number))
    assignment = request_ids(dispatcher.assign(0.0))
    assert [r.request_id for r in dispatcher.remove_engine(0)] == assignment[0]
    assert not dispatcher.finish(0, assignment[0][0])
    dispatcher.add_engine(2)
    assert request_ids(dispatcher.assign(1.0)) == {2: assignment[0]}
    assert not dispatcher.finish(1, assignment[0][0])
    assert dispatcher.finish(2, assignment[0][0])
    assert not dispatcher.finish(2, assignment[0][0])


def test_after_clear_there_is_neither_a_group_nor_an_engine() -> None:
    dispatcher = make_dispatcher(2, window=1)
    for number in range(4):
        dispatcher.submit(request(number))
    assert request_ids(dispatcher.assign(0.0)) == {0: [0], 1: [1]}
    dispatcher.clear()
    assert (dispatcher.in_flight, dispatcher.has_requests(0), dispatcher.oldest_assignment()) == (0, False, None)
    assert not dispatcher.finish(0, 0)
    dispatcher.submit(request(0))
    assert dispatcher.assign(1.0) == {}
    dispatcher.add_engine(2)
    assert request_ids(dispatcher.assign(1.0)) == {2: [0]}


def assignment_fields(assignment: AssignedRequest | None) -> tuple[int, int, float]:
    assert assignment is not None
    return assignment.engine, assignment.request.request_id, assignment.assigned_at


def test_the_oldest_assignment_is_known() -> None:
    dispatcher = make_dispatcher(2, window=1)
    assert dispatcher.oldest_assignment() is None
    dispatcher.submit(request(7))
    dispatcher.assign(1.0)
    dispatcher.submit(request(8))
    dispatcher.assign(2.0)
    assert assignment_fields(dispatcher.oldest_assignment()) == (0, 7, 1.0)
    dispatcher.remove_engine(0)
    assert assignment_fields(dispatcher.oldest_assignment()) == (1, 8, 2.0)


@pytest.mark.parametrize("seed", range(3))
def test_loads_stay_right_under_random_traffic(seed: int) -> None:
    """Compares with plain counting.

    No engine exceeds its window, and none is idle while a group waits.
    """
    chance, dispatcher = random.Random(seed), make_dispatcher(5, window=6)
    on: dict[int, dict[int, int]] = {engine: {} for engine in range(5)}
    fresh, answered = iter(range(5, 10**6)), 0
    for number in range(2000):
        dispatcher.submit(request(number, chance.randint(1, 3)))
        for engine, requests in dispatcher.assign(float(number)).items():
            on[engine] |= {r.request_id: r.n for r in requests}
        assert all(sum(held.values()) <= 6 for held in on.values())
        if dispatcher.waiting_requests:
            assert min(sum(held.values()) for held in on.values()) + dispatcher.waiting_requests[0].n > 6
        for engine in chance.sample(sorted(on), 2):
            for request_id in list(on[engine])[: chance.randint(0, 3)]:
                assert dispatcher.finish(engine, request_id)
                del on[engine][request_id]
                answered += 1
        if chance.random() < 0.02:
            engine = chance.choice(sorted(on))
            assert {r.request_id for r in dispatcher.remove_engine(engine)} == set(on.pop(engine))
            engine = next(fresh)
            dispatcher.add_engine(engine)
            on[engine] = {}
    assert answered + dispatcher.in_flight == 2000


@pytest.mark.parametrize("workers", [1, 40])
@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_the_whole_schedule_with_dying_engines_loses_nothing(stale: str, workers: int) -> None:
    simulation = Simulation(workers, groups=3000, max_age=2, stale=stale, seed=1)
    simulation.run()
    simulation.check()
    assert simulation.engines.num_killed == max(1, workers // 20)
    assert 1 <= simulation.max_group_age <= 2
