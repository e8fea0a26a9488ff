"""A second opinion: another reward that is asked where the first verdict is not "right".

    first ──▶ right                        its verdict
          └─▶ not right ──▶ second ──▶ right      the second's score, accuracy 1
                                   └─▶ anything else: the first verdict stays

It is asked in a process of its own, a fork of the worker, so that one that hangs, crashes or runs out of memory changes
nothing: at the latest shortly before `env.reward_timeout_s` it is killed and the first verdict stands. No torch here.
"""

import os
import pickle
import select
import signal
import time
from contextlib import suppress
from dataclasses import replace

from config.schema.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.judging.outcome import Judge, checked
from envs.rewards import NamedReward

SHARE_OF_DEADLINE = 0.8
"""Of `env.reward_timeout_s`, for both verdicts together; after all of it the worker is killed, and the completion with
it is invalid."""
TURNED, FAILED = "second_opinion", "second_opinion_failed"
"""Parts of every verdict: 1 where the second opinion made it right; 1 where it was asked and gave no verdict."""


def with_second_opinion(first: Judge, second: NamedReward, env: EnvConfig) -> Judge:
    """The judge that asks `second` where `first` has scored a completion as not right."""

    def judge(completion: Completion, example: Example) -> Reward:
        deadline = time.monotonic() + SHARE_OF_DEADLINE * env.reward_timeout_s
        verdict = first(completion, example)
        if verdict.outcome != "scored" or is_right(verdict):
            return _marked(verdict, 0.0, 0.0)
        if second.in_process:
            score = _score_if_right(second, completion, example, env)
        else:
            score = _asked_in_a_fork(second, completion, example, env, deadline)
        if score is None:
            return _marked(verdict, 0.0, 1.0)
        if not score:
            return _marked(verdict, 0.0, 0.0)
        return _marked(replace(verdict, score=score[0], parts=verdict.parts | {"accuracy": 1.0}), 1.0, 0.0)

    return judge


def is_right(verdict: Reward) -> bool:
    """Whether a verdict says "right": its accuracy is at least 1, or without such a part its score."""
    return bool(verdict.parts.get("accuracy", verdict.score) >= 1.0)


def _marked(verdict: Reward, turned: float, failed: float) -> Reward:
    return replace(verdict, parts=verdict.parts | {TURNED: turned, FAILED: failed})


def _score_if_right(
    second: NamedReward, completion: Completion, example: Example, env: EnvConfig
) -> tuple[float, ...] | None:
    """Its score where it says "right", nothing where it does not, None where it gives no verdict."""
    try:
        verdict = second.function(completion, example, env)
        score, _ = checked(verdict, f"reward {second.name}")
        return (score,) if verdict.outcome == "scored" and is_right(verdict) else ()
    except Exception:  # whatever it fails with, the first verdict stands, and the failure is counted
        return None


def _asked_in_a_fork(
    second: NamedReward, completion: Completion, example: Example, env: EnvConfig, deadline: float
) -> tuple[float, ...] | None:
    """Ask in a forked process; returns as `_score_if_right`.

    None also where the process cannot be made, dies, or is not done at the deadline.
    """
    reading, writing = os.pipe()
    try:
        pid = os.fork()
    except OSError:  # no memory or number for another process
        os.close(reading)
        os.close(writing)
        return None
    if pid == 0:
        with suppress(BaseException):  # a fork must never go on with what its parent was doing
            os.write(writing, pickle.dumps(_score_if_right(second, completion, example, env)))
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        answer = os.read(reading, 4096) if ready else b""
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    score: tuple[float, ...] | None = pickle.loads(answer) if answer else None
    return score
