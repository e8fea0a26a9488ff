"""Where groups are: least loaded first, a lost engine's groups again first, late answers of it ignored."""

import random

import pytest

from envs.group import Sampling
from tests.rollout.simulated_cluster import Simulation
from torchgrpo.rollout.engines.dispatch import Assigned, Dispatch
from torchgrpo.rollout.engines.interface import Request


def request(number: int, n: int = 1) -> Request:
    return Request(number, (), n, Sampling(), seed=0)


def opened(engines: int, window: int) -> Dispatch:
    dispatch = Dispatch(window)
    for engine in range(engines):
        dispatch.open(engine)
    return dispatch


def numbers(given: dict[int, list[Request]]) -> dict[int, list[int]]:
    return {engine: [request.request_id for request in requests] for engine, requests in given.items()}


def test_groups_go_to_the_least_loaded_engine_until_all_are_full() -> None:
    dispatch = opened(2, window=4)
    for number, n in enumerate((3, 1, 1, 2, 1)):
        dispatch.submit(request(number, n))
    assert numbers(dispatch.assign(0.0)) == {0: [0, 4], 1: [1, 2, 3]}
    dispatch.submit(request(5))
    assert dispatch.assign(0.0) == {}
    assert dispatch.in_flight == 6
    assert dispatch.finish(1, 3)
    assert numbers(dispatch.assign(0.0)) == {1: [5]}


def test_of_equally_loaded_engines_the_one_that_has_waited_longest_is_next() -> None:
    dispatch = opened(3, window=2)
    for number in range(6):
        dispatch.submit(request(number))
    assert numbers(dispatch.assign(0.0)) == {0: [0, 3], 1: [1, 4], 2: [2, 5]}
    for engine, number in ((2, 2), (0, 0), (1, 4)):
        assert dispatch.finish(engine, number)
    for number in (6, 7, 8):
        dispatch.submit(request(number))
    assert numbers(dispatch.assign(0.0)) == {2: [6], 0: [7], 1: [8]}


def test_a_group_beyond_the_window_goes_to_an_empty_engine() -> None:
    dispatch = opened(1, window=4)
    dispatch.submit(request(0, n=9))
    dispatch.submit(request(1, n=1))
    assert numbers(dispatch.assign(0.0)) == {0: [0]}


def test_a_lost_engines_groups_are_the_first_again_and_its_late_answers_do_not_count() -> None:
    dispatch = opened(2, window=2)
    for number in range(6):
        dispatch.submit(request(number))
    given = numbers(dispatch.assign(0.0))
    assert [r.request_id for r in dispatch.engine_lost(0)] == given[0]
    assert not dispatch.finish(0, given[0][0])
    dispatch.open(2)
    assert numbers(dispatch.assign(1.0)) == {2: given[0]}
    assert not dispatch.finish(1, given[0][0])
    assert dispatch.finish(2, given[0][0])
    assert not dispatch.finish(2, given[0][0])


def test_after_clear_there_is_neither_a_group_nor_an_engine() -> None:
    dispatch = opened(2, window=1)
    for number in range(4):
        dispatch.submit(request(number))
    assert numbers(dispatch.assign(0.0)) == {0: [0], 1: [1]}
    dispatch.clear()
    assert (dispatch.in_flight, dispatch.busy(0), dispatch.longest()) == (0, False, None)
    assert not dispatch.finish(0, 0)
    dispatch.submit(request(0))
    assert dispatch.assign(1.0) == {}
    dispatch.open(2)
    assert numbers(dispatch.assign(1.0)) == {2: [0]}


def whose(assigned: Assigned | None) -> tuple[int, int, float]:
    assert assigned is not None
    return assigned.engine, assigned.request.request_id, assigned.since


def test_the_longest_held_group_is_known() -> None:
    dispatch = opened(2, window=1)
    assert dispatch.longest() is None
    dispatch.submit(request(7))
    dispatch.assign(1.0)
    dispatch.submit(request(8))
    dispatch.assign(2.0)
    assert whose(dispatch.longest()) == (0, 7, 1.0)
    dispatch.engine_lost(0)
    assert whose(dispatch.longest()) == (1, 8, 2.0)


@pytest.mark.parametrize("seed", range(3))
def test_loads_stay_right_under_random_traffic(seed: int) -> None:
    """Against plain counting: no engine above its window, no engine idle while a group waits."""
    chance, dispatch = random.Random(seed), opened(5, window=6)
    on: dict[int, dict[int, int]] = {engine: {} for engine in range(5)}
    fresh, answered = iter(range(5, 10**6)), 0
    for number in range(2000):
        dispatch.submit(request(number, chance.randint(1, 3)))
        for engine, requests in dispatch.assign(float(number)).items():
            on[engine] |= {r.request_id: r.n for r in requests}
        assert all(sum(held.values()) <= 6 for held in on.values())
        if dispatch.waiting:
            assert min(sum(held.values()) for held in on.values()) + dispatch.waiting[0].n > 6
        for engine in chance.sample(sorted(on), 2):
            for request_id in list(on[engine])[: chance.randint(0, 3)]:
                assert dispatch.finish(engine, request_id)
                del on[engine][request_id]
                answered += 1
        if chance.random() < 0.02:
            engine = chance.choice(sorted(on))
            assert {r.request_id for r in dispatch.engine_lost(engine)} == set(on.pop(engine))
            engine = next(fresh)
            dispatch.open(engine)
            on[engine] = {}
    assert answered + dispatch.in_flight == 2000


@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_the_whole_schedule_with_dying_engines_loses_nothing(stale: str) -> None:
    simulation = Simulation(workers=40, groups=3000, max_age=2, stale=stale, seed=1)
    simulation.run()
    simulation.check()
    assert simulation.engines.killed == 2
    assert 1 <= simulation.oldest <= 2
