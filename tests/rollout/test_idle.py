"""Shares of idle time: each second counts once, where it lies, whoever asks when."""

import threading
import time

import pytest

from torchgrpo.rollout.idle import IdleClock


def test_a_span_is_divided_where_somebody_asks() -> None:
    now = 0.0
    clock = IdleClock(lambda: now)
    now = 6.0
    clock.begin()
    now = 8.0
    assert clock.share() == pytest.approx(2 / 8)
    now = 10.0
    assert clock.share() == 1.0
    now = 10.5
    clock.begin()  # it goes on
    now = 11.0
    clock.end()
    clock.end()
    now = 14.0
    assert clock.share() == pytest.approx(1 / 4)
    assert clock.share() == 0.0


def test_no_share_is_above_one_and_no_second_is_lost() -> None:
    """A thread that is always idle, asked again and again by another."""
    clock, begun, ending = IdleClock(), threading.Event(), threading.Event()

    def stand_idle() -> None:
        clock.begin()
        begun.set()
        ending.wait()
        clock.end()

    thread = threading.Thread(target=stand_idle)
    thread.start()
    assert begun.wait(600.0)
    shares = []
    for _ in range(200):
        time.sleep(0.001)
        shares.append(clock.share())
    ending.set()
    thread.join()
    assert max(shares) <= 1.0
    assert shares[-1] == 1.0
