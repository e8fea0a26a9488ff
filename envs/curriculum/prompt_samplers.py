"""Samplers of the next row of one data set, by epoch or recent success."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig
from envs.curriculum.epoch_order import EpochOrder
from envs.curriculum.levels import Levels
from envs.curriculum.priorities import PRIORITY_RULES
from envs.curriculum.weighted_sampling import WeightTree
from envs.prompt_rows import PromptRows


@dataclass(slots=True)
class PromptStats:
    """Success and sampling state of one prompt that was sampled at least once.

    recent_success: moving mean of the success of its groups, 0 to 1.
    is_solved: a group of the prompt once reached `env.curriculum.solved`.
    groups_in_flight: groups of the prompt without verdicts yet.
    sample_weight: weight of the newest sampling, as in `SuccessWindow.add`.
    is_replay: the newest sampling was a replay of a solved prompt.
    """

    recent_success: float
    is_solved: bool = False
    groups_in_flight: int = 0
    sample_weight: float = 1.0
    is_replay: bool = False


class EpochSampler:
    """Samples every open row once an epoch.

    Rows whose recent success rate lies outside `env.difficulty` are skipped for some epochs.

    success_rates: by row, the success rate of the newest group and the epoch in which the group was scored.
    """

    def __init__(
        self,
        rows: PromptRows,
        order: EpochOrder,
        levels: Levels,
        difficulty: DifficultyConfig,
        success_rates: Mapping[int, tuple[float, int]],
    ) -> None:
        self.rows, self.order, self.levels = rows, order, levels
        self.difficulty, self.success_rates = difficulty, success_rates

    def next_row(self, rng: random.Random) -> tuple[int, float]:
        """Returns a row and its weight for `SuccessWindow.add`. Raises ConfigError if none can be sampled."""
        order = self.order
        while True:
            row = order.next_row()
            if row is None:
                self.rows.check_any_fits(order.start, order.end)
                continue
            if not self.levels.is_open(row - order.start) or not self.rows.accepts(row):
                continue
            rate_and_epoch = None if order.ignores_difficulty else self.success_rates.get(row)
            if (
                rate_and_epoch is None
                or order.epoch - rate_and_epoch[1] > self.difficulty.retry_epochs
                or self.difficulty.low <= rate_and_epoch[0] <= self.difficulty.high
            ):
                order.num_sampled += 1
                return row, 1.0

    def update_weight(self, row: int) -> None:
        """Does nothing: the order of an epoch has no weights."""

    def refresh_weights(self) -> None:
        """Does nothing: the order of an epoch has no weights."""


class SuccessSampler:
    """Samples open rows with replacement, by a priority that follows their recent success.

    Row i has the probability floor / n + (1 - floor) f(p_i) / sum_j f(p_j). p is the recent success of a row, f the
    rule of `env.curriculum.priority`. n and the sum are over the rows that can be sampled. A row with groups in flight
    is sampled again only if all other rows are in flight as well.
    """

    def __init__(
        self,
        rows: PromptRows,
        start: int,
        end: int,
        levels: Levels,
        prompt_stats: Mapping[int, PromptStats],
        config: CurriculumConfig,
    ) -> None:
        assert config.priority is not None
        self.rows, self.start, self.end, self.levels = rows, start, end, levels
        self.prompt_stats, self.floor, self.prior = prompt_stats, config.floor, config.prior
        self.priority_rule: Callable[[float], float] = PRIORITY_RULES[config.priority]
        self.refresh_weights()

    def next_row(self, rng: random.Random) -> tuple[int, float]:
        """Returns a row and its weight for `SuccessWindow.add`. Raises ConfigError if none can be sampled."""
        while True:
            is_uniform = rng.random() < self.floor or not self.priority_weights.total
            position = (self.uniform_weights if is_uniform else self.priority_weights).sample_index(rng)
            if position is None:
                in_flight = [
                    row for row, stats in self.prompt_stats.items() if stats.groups_in_flight and self._is_open(row)
                ]
                if in_flight:
                    return rng.choice(sorted(in_flight)), 1.0
                self.rows.check_any_fits(self.start, self.end)
            elif self.rows.accepts(self.start + position):
                if not self.priority_weights.total:
                    return self.start + position, 1.0
                mean = self.priority_weights.total / self.uniform_weights.total
                # The probability of this row under uniform sampling, divided by its probability here.
                weight = 1 / (self.floor + (1 - self.floor) * self.priority_weights[position] / mean)
                return self.start + position, weight
            else:
                self.update_weight(self.start + position)

    def update_weight(self, row: int) -> None:
        """Recomputes the weights of a row that was sampled or scored."""
        self.uniform_weights[row - self.start], self.priority_weights[row - self.start] = self._weights(row)

    def refresh_weights(self) -> None:
        """Recomputes the weights of all rows."""
        weights = [self._weights(row) for row in range(self.start, self.end)]
        self.uniform_weights = WeightTree([uniform for uniform, _ in weights])
        self.priority_weights = WeightTree([priority for _, priority in weights])

    def _weights(self, row: int) -> tuple[float, float]:
        """Returns the uniform weight and the priority of a row; 0 for closed rows."""
        stats = self.prompt_stats.get(row)
        if row in self.rows.too_long_rows or (stats is not None and stats.groups_in_flight) or not self._is_open(row):
            return 0.0, 0.0
        return 1.0, self.priority_rule(self.prior if stats is None else stats.recent_success)

    def _is_open(self, row: int) -> bool:
        return self.levels.is_open(row - self.start)


PromptSampler = EpochSampler | SuccessSampler
