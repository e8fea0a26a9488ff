"""How far a run is: what the live view shows of it, as plain numbers."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("collect", "optimize", "push", "evaluate")
"""Where a run's time goes; what is in none of them is checkpoints, samples, logs."""
FINEST = 256
"""Means that a curve holds at most."""


@dataclass
class Curve:
    """A value of every optimizer step, as at most `FINEST` means of equally many steps each."""

    means: list[float] = field(default_factory=list)
    steps_each: int = 1
    count: int = 0
    _sum: float = 0.0
    _summed: int = 0

    def add(self, value: float) -> None:
        """What is not finite is left out."""
        if not math.isfinite(value):
            return
        self.count += 1
        self._sum += value
        self._summed += 1
        if self._summed < self.steps_each:
            return
        self.means.append(self._sum / self._summed)
        self._sum, self._summed = 0.0, 0
        if len(self.means) == FINEST:
            self.means = [
                (one + other) / 2 for one, other in zip(self.means[::2], self.means[1::2], strict=True)
            ]
            self.steps_each *= 2

    def over(self, cells: int) -> list[float]:
        """The curve in at most so many means, of as equally many steps each as can be."""
        count = len(self.means)
        cells = min(cells, count)
        parts = [self.means[cell * count // cells : (cell + 1) * count // cells] for cell in range(cells)]
        return [sum(part) / len(part) for part in parts]


@dataclass
class Course:
    """What has happened until now. All clocks are `time.monotonic`.

    total_steps: optimizer steps of the whole run; 0: it trains nothing.
    steps: done, those of an earlier part of the run included.
    began: when this part of the run began.
    training_since, steps_then: when it first collected, and the steps that were done by then.
    seconds: by phase, since `began`.
    evaluations: of each set the optimizer step and pass@1, in order.
    doing, done, of: what it does now, and how much of it is done (of 0: not counted). doing_since: when that began.
    """

    total_steps: int
    steps: int = 0
    began: float = field(default_factory=time.monotonic)
    training_since: float | None = None
    steps_then: int = 0
    rewards: Curve = field(default_factory=Curve)
    reward: float = math.nan
    length: float = math.nan
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    doing: str = ""
    done: int = 0
    of: int = 0
    doing_since: float = 0.0
    alarm: str = ""

    def does(self, name: str, done: int, of: int, now: float) -> None:
        """What it does at the clock `now`."""
        if name != self.doing or done < self.done:
            self.doing_since = now
        if name == "collect" and self.training_since is None:
            self.training_since, self.steps_then = now, self.steps
        self.doing, self.done, self.of = name, done, of

    def stepped(self, reward: float, length: float) -> None:
        """An optimizer step is done."""
        self.steps += 1
        self.reward, self.length = reward, length
        self.rewards.add(reward)

    def evaluated(self, optimizer_step: int, metrics: Mapping[str, float]) -> None:
        """metrics: `eval/SET/pass@1`, and others that are not shown."""
        for key, value in metrics.items():
            room, _, rest = key.partition("/")
            name, _, metric = rest.rpartition("/")
            if room == "eval" and metric == "pass@1" and math.isfinite(value):
                self.evaluations.setdefault(name, []).append((optimizer_step, value))

    def seconds_left(self, now: float) -> float | None:
        """As long as the steps until now have taken, with all that was between them; None before the first."""
        if self.training_since is None or self.steps == self.steps_then:
            return None
        each = (now - self.training_since) / (self.steps - self.steps_then)
        return each * max(self.total_steps - self.steps, 0)

    def stage_left(self, now: float) -> float | None:
        """Until what it does now is done; None where nobody counts or nothing has been done."""
        if not self.of or not self.done:
            return None
        return (now - self.doing_since) / self.done * max(self.of - self.done, 0)

    def shares(self, now: float) -> dict[str, float]:
        """Of the time since the beginning, by phase, `other` last; empty before a phase has ended."""
        spent = sum(self.seconds.values())
        if not spent:
            return {}
        elapsed = max(now - self.began, spent)
        shares = {name: seconds / elapsed for name, seconds in self.seconds.items()}
        return shares | {"other": 1 - spent / elapsed}
