"""The judging rule: what becomes of a completion, whatever its judge does.

the judge                                          outcome
returns a reward of finite numbers                 the reward's own: scored or invalid
returns anything else (NaN, a text, ...)           error: counted, and never a score
raises an exception, or SystemExit                 error
runs out of memory or recursion depth              crashed: `blame` decides between invalid and error
hangs, or its process dies                         crashed: only the service sees that, from outside
"""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, SupportsFloat

from envs.example import Completion, Example, Reward
from envs.group import OUTCOMES, Verdict
from envs.user_code import described

Judge = Callable[[Completion, Example], Reward]
CRASHED: Literal["crashed"] = "crashed"
OUT_OF_MEMORY = "MemoryError"
RESERVED_PARTS = frozenset(
    (
        *("mean", "std", "zero_variance_groups", "errors", "invalid", "invalid_gap", "length"),
        *("errors_total", "invalid_total", "workers_replaced", "control_tokens"),
    )
)
"""Names that mean something else as `reward/...` in the log, so that no part may have one of them."""
LARGEST = 3.4028234663852886e38
"""The largest float32: rewards become tensors of those."""


class Result(NamedTuple):
    """What came of one verification. seconds: that it took. message: why it crashed or is an error."""

    score: float
    parts: dict[str, float]
    outcome: Literal["scored", "invalid", "error", "crashed"]
    seconds: float
    message: str = ""

    def verdict(self) -> Verdict:
        """The verdict on the completion; a crash is none before `blame` has decided."""
        score, parts, outcome, seconds, _ = self
        assert outcome != CRASHED
        return Verdict(score, parts, outcome, seconds)


def crashed(seconds: float, message: str) -> Result:
    """A verification that the judge could not get through."""
    return Result(0.0, {}, CRASHED, seconds, message)


def judged(judge: Judge, completion: Completion, example: Example) -> Result:
    """Judge in this process. Whatever the reward raises becomes an outcome of its own."""
    began = time.perf_counter()
    try:
        reward = judge(completion, example)
        score, parts = checked(reward)
        return Result(score, parts, reward.outcome, time.perf_counter() - began)
    except MemoryError:
        return crashed(time.perf_counter() - began, OUT_OF_MEMORY)
    except RecursionError:
        return crashed(time.perf_counter() - began, "RecursionError")
    except (Exception, SystemExit) as error:  # counted as an error and never scored
        return Result(0.0, {}, "error", time.perf_counter() - began, described(error))


def number(value: Any, what: str) -> float:
    """A number of Python, numpy or torch (of no or one dimension) as a float.

    Raises:
        TypeError: it is none.
        ValueError: it is not finite in float32.
    """
    known = isinstance(value, (float, int))  # asking for the protocol takes ten times as long
    if not known and (not isinstance(value, SupportsFloat) or isinstance(value, str)):
        raise TypeError(f"{what} is {value!r}; a number is needed")
    result = float(value)
    if not abs(result) <= LARGEST:
        raise ValueError(f"{what} is {result}; a number that is finite in float32 is needed")
    return result


def checked(reward: Reward, name: str = "reward") -> tuple[float, dict[str, float]]:
    """Score and parts in plain floats. name: what a message calls the reward.

    Raises:
        TypeError, ValueError: what is no number, or none that is finite in float32; an outcome or a part whose name
            means something else.
    """
    if not isinstance(reward, Reward):
        raise TypeError(f"the {name} returned {reward!r}; a Reward is needed")
    if reward.outcome == "error":
        raise ValueError(f"the {name} itself gave the outcome 'error'")
    if reward.outcome not in OUTCOMES:
        raise ValueError(f"the {name}'s outcome is {reward.outcome!r}; known: {', '.join(OUTCOMES)}")
    if not isinstance(reward.parts, dict):
        raise TypeError(f"the {name}'s parts are {reward.parts!r}; {{NAME: number}} is needed")
    parts: dict[str, float] = {}
    for part, value in reward.parts.items():
        if not isinstance(part, str) or not part:
            raise TypeError(f"the {name} has a part called {part!r}; a text is needed")
        if part in RESERVED_PARTS:
            raise ValueError(
                f"the {name} has a part called {part!r}, but reward/{part} is a metric; rename the part"
            )
        parts[part] = number(value, f"the part {part}")
    return number(reward.score, f"the {name}'s score"), parts
