"""Tests of the engines' idle clock."""

import threading
import time

import pytest

from torchgrpo.rollout.engine_idle_clock import EngineIdleClock


def test_a_span_is_divided_at_each_reading() -> None:
    now = 0.0
    clock = EngineIdleClock(lambda: now)
    now = 6.0
    clock.begin()
    now = 8.0
    assert clock.share() == pytest.approx(2 / 8)
    now = 10.0
    assert clock.share() == 1.0
    now = 10.5
    clock.begin()  # the span is open already
    now = 11.0
    clock.end()
    clock.end()
    now = 14.0
    assert clock.share() == pytest.approx(1 / 4)
    assert clock.share() == 0.0


def test_no_share_is_above_one_and_no_second_is_lost() -> None:
    """One thread is always idle while another reads the share again and again."""
    clock, began_idle, stop = EngineIdleClock(), threading.Event(), threading.Event()

    def be_idle() -> None:
        clock.begin()
        began_idle.set()
        stop.wait()
        clock.end()

    thread = threading.Thread(target=be_idle)
    thread.start()
    assert began_idle.wait(600.0)
    shares = []
    for _ in range(200):
        time.sleep(0.001)
        shares.append(clock.share())
    stop.set()
    thread.join()
    assert max(shares) <= 1.0
    assert shares[-1] == 1.0
