"""Fallback reward, which scores the completions that the main reward finds wrong.

    main reward ──▶ right                          main verdict
                └─▶ wrong ──▶ fallback ──▶ right      fallback's score, accuracy 1
                                       └─▶ anything else: main verdict

The fallback reward runs in a fork of the worker. If the fork hangs, crashes or runs out of memory, the main verdict
stands; a hanging fork is killed shortly before `env.reward_timeout_s`. This module does not import torch.
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
from envs.reward_workers.scoring import Scorer, check_reward
from envs.rewards import NamedReward

SHARE_OF_DEADLINE = 0.8
"""Share of `env.reward_timeout_s` for both rewards.

After the whole time the service kills the worker, and the completion becomes invalid.
"""
ACCEPTED_METRIC, FAILED_METRIC = "fallback_reward", "fallback_reward_failed"
"""Components of every verdict: 1 if the fallback accepted the completion; 1 if the fallback failed."""


def with_fallback_reward(scorer: Scorer, fallback: NamedReward, env: EnvConfig) -> Scorer:
    """Builds a scorer that calls `fallback` if `scorer` finds a completion wrong."""

    def score_with_fallback(completion: Completion, example: Example) -> Reward:
        deadline = time.monotonic() + SHARE_OF_DEADLINE * env.reward_timeout_s
        verdict = scorer(completion, example)
        if verdict.outcome != "scored" or is_right(verdict):
            return _add_fallback_metrics(verdict, 0.0, 0.0)
        if fallback.in_process:
            score = _score_if_right(fallback, completion, example, env)
        else:
            score = _score_in_fork(fallback, completion, example, env, deadline)
        if score is None:
            return _add_fallback_metrics(verdict, 0.0, 1.0)
        if not score:
            return _add_fallback_metrics(verdict, 0.0, 0.0)
        return _add_fallback_metrics(
            replace(verdict, score=score[0], components=verdict.components | {"accuracy": 1.0}), 1.0, 0.0
        )

    return score_with_fallback


def is_right(verdict: Reward) -> bool:
    """Whether a verdict's accuracy is at least 1, or its score without an accuracy."""
    return bool(verdict.components.get("accuracy", verdict.score) >= 1.0)


def _add_fallback_metrics(verdict: Reward, acceptance: float, failure: float) -> Reward:
    return replace(verdict, components=verdict.components | {ACCEPTED_METRIC: acceptance, FAILED_METRIC: failure})


def _score_if_right(
    fallback: NamedReward, completion: Completion, example: Example, env: EnvConfig
) -> tuple[float, ...] | None:
    """Returns the fallback's score of a right completion.

    Returns an empty tuple for a wrong completion, and None if the fallback returns no verdict.
    """
    try:
        verdict = fallback.function(completion, example, env)
        score, _ = check_reward(verdict, f"reward {fallback.name}")
        return (score,) if verdict.outcome == "scored" and is_right(verdict) else ()
    except Exception:  # after any exception the main verdict stands, and the failure is counted
        return None


def _score_in_fork(
    fallback: NamedReward, completion: Completion, example: Example, env: EnvConfig, deadline: float
) -> tuple[float, ...] | None:
    """Calls the fallback in a forked process; returns as `_score_if_right` does.

    Returns None also if the process cannot be created, dies, or is still running at the deadline.
    """
    read_end, write_end = os.pipe()
    try:
        pid = os.fork()
    except OSError:  # no memory or number for another process
        os.close(read_end)
        os.close(write_end)
        return None
    if pid == 0:
        with suppress(BaseException):  # a fork must never continue its parent's work
            os.write(write_end, pickle.dumps(_score_if_right(fallback, completion, example, env)))
        os._exit(0)
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))
        reply = os.read(read_end, 4096) if ready else b""
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    score: tuple[float, ...] | None = pickle.loads(reply) if reply else None
    return score
