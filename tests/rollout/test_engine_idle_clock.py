"""Tests of the engines' idle clock."""

import threading
import time

import pytest

from envs.group import Sampling
from tests.rollout.scripted_engine import ScriptedEngine
from torchgrpo.rollout.engine_idle_clock import EngineIdleClock
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request


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


def test_engines_without_anything_to_do_are_idle() -> None:
    engine, now = ScriptedEngine(), [0.0]
    engine.answer(1)
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    loop.idle_clock = EngineIdleClock(lambda: now[0])

    def advance() -> None:
        loop.idle_clock.share()
        now[0] += 1

    with loop.thread():
        loop.run(loop.generate(Request(0, (5, 6, 7), 2, Sampling(max_tokens=12), seed=1)))
        loop.call(lambda: None)
        advance()
        assert loop.idle_clock.share() == 1.0
        loop.call(advance)
        assert loop.idle_clock.share() == 0.0
    loop.close()
