"""Which row of a data set is asked next: each once an epoch, or by its own recent success."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig
from envs.curriculum.levels import Levels
from envs.curriculum.order import EpochOrder
from envs.curriculum.weighted_draws import Chances
from envs.curriculum.worth_of_success import RULES
from envs.prompt_rows import Rows


@dataclass(slots=True)
class Asked:
    """A prompt that was asked.

    recent: its recent success, 0 to 1. solved: a group of it once reached `env.curriculum.solved`. flying: groups that
    are answering it now. Of its newest draw: weight, as in `Window.add`; replay: it was asked again because it had been
    solved.
    """

    recent: float
    solved: bool = False
    flying: int = 0
    weight: float = 1.0
    replay: bool = False


class ByEpoch:
    """Every open row once an epoch, but those whose recent success rate lies outside `env.difficulty`.

    rates: success rate of a row's newest group, and the epoch in which it was judged.
    """

    def __init__(
        self,
        rows: Rows,
        order: EpochOrder,
        levels: Levels,
        difficulty: DifficultyConfig,
        rates: Mapping[int, tuple[float, int]],
    ) -> None:
        self.rows, self.order, self.levels = rows, order, levels
        self.difficulty, self.rates = difficulty, rates

    def next(self, chance: random.Random) -> tuple[int, float]:
        """A row, and the weight of its success in the means of its level and source (`Window.add`).

        Raises:
            ConfigError: no row can be asked.
        """
        order = self.order
        while True:
            row = order.next()
            if row is None:
                self.rows.check(order.start, order.end)
                continue
            if not self.levels.is_open(row - order.start) or not self.rows.accepts(row):
                continue
            known = None if order.unfiltered else self.rates.get(row)
            if (  # else too easy or too hard lately
                known is None
                or order.epoch - known[1] > self.difficulty.retry_epochs
                or self.difficulty.low <= known[0] <= self.difficulty.high
            ):
                order.served += 1
                return row, 1.0

    def changed(self, row: int) -> None:
        """A row was drawn, or judged, and the order stays."""

    def refresh(self) -> None:
        """A level opened, or the state was restored, and the order stays."""


class BySuccess:
    """Open rows with replacement, row i with probability floor / n + (1 - floor) f(p_i) / sum_j f(p_j).

    p is the row's recent success, f the rule of `env.curriculum.priority`. A row that is being answered is not drawn
    again before it is judged, unless no other is left. n and the sum are over the rows that may be drawn.
    """

    def __init__(
        self,
        rows: Rows,
        start: int,
        end: int,
        levels: Levels,
        asked: Mapping[int, Asked],
        config: CurriculumConfig,
    ) -> None:
        assert config.priority is not None
        self.rows, self.start, self.end, self.levels = rows, start, end, levels
        self.asked, self.floor, self.prior = asked, config.floor, config.prior
        self.worth: Callable[[float], float] = RULES[config.priority]
        self.refresh()

    def next(self, chance: random.Random) -> tuple[int, float]:
        while True:
            even = chance.random() < self.floor or not self.favoured.total
            place = (self.even if even else self.favoured).draw(chance)
            if place is None:
                answered = [row for row, one in self.asked.items() if one.flying and self._open(row)]
                if answered:
                    return chance.choice(sorted(answered)), 1.0
                self.rows.check(self.start, self.end)
            elif self.rows.accepts(self.start + place):
                if not self.favoured.total:
                    return self.start + place, 1.0
                mean = self.favoured.total / self.even.total
                # 1 over the probability of this row to that of an even draw
                weight = 1 / (self.floor + (1 - self.floor) * self.favoured[place] / mean)
                return self.start + place, weight
            else:
                self.changed(self.start + place)

    def changed(self, row: int) -> None:
        self.even[row - self.start], self.favoured[row - self.start] = self._weights(row)

    def refresh(self) -> None:
        weights = [self._weights(row) for row in range(self.start, self.end)]
        self.even = Chances([even for even, _ in weights])
        self.favoured = Chances([favoured for _, favoured in weights])

    def _weights(self, row: int) -> tuple[float, float]:
        known = self.asked.get(row)
        if row in self.rows.left_out or (known is not None and known.flying) or not self._open(row):
            return 0.0, 0.0
        return 1.0, self.worth(self.prior if known is None else known.recent)

    def _open(self, row: int) -> bool:
        return self.levels.is_open(row - self.start)


Chooser = ByEpoch | BySuccess
