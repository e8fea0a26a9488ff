"""Calls a scorer on one completion, and turns rewards and exceptions into scoring results.

behaviour of the scorer                        outcome
returns a reward of finite numbers             the reward's own: scored or invalid
returns anything else (NaN, a text, ...)       error: counted, and never a score
raises an exception, or SystemExit             error
runs out of memory or recursion depth          crashed: `crash_attribution` decides between invalid and error
hangs, or its process dies                     crashed: only the service sees that, from outside
"""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, SupportsFloat

from envs.example import Completion, Example, Reward
from envs.group import OUTCOMES, Verdict
from envs.user_code import describe_exception

Scorer = Callable[[Completion, Example], Reward]
CRASHED_OUTCOME: Literal["crashed"] = "crashed"
OUT_OF_MEMORY = "MemoryError"
RESERVED_COMPONENTS = frozenset(
    (
        *("mean", "std", "zero_variance_groups", "errors", "invalid", "invalid_gap", "length"),
        *("errors_total", "invalid_total", "workers_replaced", "control_tokens", "overlong_penalty"),
    )
)
"""Names that no reward component may have, because `reward/NAME` is another metric."""
MAX_FLOAT32 = 3.4028234663852886e38
"""The largest float32, because rewards become float32 tensors."""


class ScoringResult(NamedTuple):
    """Result of one verification. seconds: duration. message: reason of a crash or an error."""

    score: float
    components: dict[str, float]
    outcome: Literal["scored", "invalid", "error", "crashed"]
    seconds: float
    message: str = ""

    def verdict(self) -> Verdict:
        """Builds the verdict on the completion; a crash must be attributed first."""
        score, components, outcome, seconds, _ = self
        assert outcome != CRASHED_OUTCOME
        return Verdict(score, components, outcome, seconds)


def crash_result(seconds: float, message: str) -> ScoringResult:
    """Builds the result of a crashed verification."""
    return ScoringResult(0.0, {}, CRASHED_OUTCOME, seconds, message)


def score_completion(scorer: Scorer, completion: Completion, example: Example) -> ScoringResult:
    """Scores a completion in this process, and turns any exception into an outcome."""
    start = time.perf_counter()
    try:
        reward = scorer(completion, example)
        score, components = check_reward(reward)
        return ScoringResult(score, components, reward.outcome, time.perf_counter() - start)
    except MemoryError:
        return crash_result(time.perf_counter() - start, OUT_OF_MEMORY)
    except RecursionError:
        return crash_result(time.perf_counter() - start, "RecursionError")
    except (Exception, SystemExit) as error:  # counted as an error and never scored
        return ScoringResult(0.0, {}, "error", time.perf_counter() - start, describe_exception(error))


def finite_float(value: Any, label: str) -> float:
    """Converts a number of Python, numpy or torch (0 or 1 dimensions) to a float.

    label: name of the value in messages.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is not finite in float32.
    """
    is_plain_number = isinstance(value, (float, int))  # a check of the protocol is far slower
    if not is_plain_number and (not isinstance(value, SupportsFloat) or isinstance(value, str)):
        raise TypeError(f"{label} is {value!r}; a number is needed")
    result = float(value)
    if not abs(result) <= MAX_FLOAT32:
        raise ValueError(f"{label} is {result}; a number that is finite in float32 is needed")
    return result


def check_reward(reward: Reward, name: str = "reward") -> tuple[float, dict[str, float]]:
    """Checks a reward; returns its score and components as plain floats.

    name: name of the reward in messages.

    Raises:
        TypeError, ValueError: a value that is not a number or not finite in float32; a wrong outcome; a
            component whose name is reserved.
    """
    if not isinstance(reward, Reward):
        raise TypeError(f"the {name} returned {reward!r}; a Reward is needed")
    if reward.outcome == "error":
        raise ValueError(f"the {name} itself returned the outcome 'error'")
    if reward.outcome not in OUTCOMES:
        raise ValueError(f"the {name}'s outcome is {reward.outcome!r}; known: {', '.join(OUTCOMES)}")
    if not isinstance(reward.components, dict):
        raise TypeError(f"the {name}'s components are {reward.components!r}; {{NAME: number}} is needed")
    components: dict[str, float] = {}
    for component, value in reward.components.items():
        if not isinstance(component, str) or not component:
            raise TypeError(f"the {name} has a component called {component!r}; a text is needed")
        if component in RESERVED_COMPONENTS:
            raise ValueError(
                f"the {name} has a component called {component!r}, but reward/{component} is a metric; "
                "rename the component"
            )
        components[component] = finite_float(value, f"the component {component}")
    return finite_float(reward.score, f"the {name}'s score"), components
