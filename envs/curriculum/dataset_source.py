"""Source of prompts from one data set, with their success statistics and checkpoint state."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig
from envs.curriculum.epoch_order import EpochOrder
from envs.curriculum.levels import make_levels
from envs.curriculum.prompt_samplers import EpochSampler, PromptSampler, PromptStats, SuccessSampler
from envs.curriculum.success_window import SuccessWindow
from envs.curriculum.weighted_sampling import WeightTree
from envs.data_digest import DataChange, DataDigest, compare_digests
from envs.example import Example
from envs.prompt_rows import PromptRows

_UNUSED_RNG = random.Random(0)


class DatasetSource:
    """Source of prompts from one data set: the rows [start, end) of all examples.

    The data set stands alone or is a member of a mixture. The next sample depends only on the seed, the number of
    samples before, and the observed success rates in their order. Nothing is sampled ahead of time, so the state of a
    checkpoint is the state of the samples.

    setting: name of the data's config key, for messages.
    num_sampled: number of samples so far.
    success, replay_success: success of the newest groups; of the newest replays.
    digest: digest of the rows.
    row_indices: index into all examples by row number.
    """

    def __init__(
        self,
        rows: PromptRows,
        name: str,
        setting: str,
        bounds: tuple[int, int],
        seed: int,
        difficulty: DifficultyConfig,
        config: CurriculumConfig,
    ) -> None:
        start, end = bounds
        self.rows, self.config, self.num_sampled, self.start, self.end = rows, config, 0, start, end
        self.setting = setting
        self.salt = f"{seed}/{name}/" if name else f"{seed}/"
        self.order = EpochOrder(start, end, self.salt)
        examples: Sequence[Example] = [rows.examples[row] for row in range(start, end)]
        self.digest = DataDigest.from_examples(examples)
        self.row_indices = {example.row: start + position for position, example in enumerate(examples)}
        self.levels = make_levels(examples, config.column, config)
        self._is_random = bool(config.replay or config.priority)
        self.success_rates: dict[int, tuple[float, int]] = {}
        self.prompt_stats: dict[int, PromptStats] = {}
        self.replay_weights = WeightTree([0.0] * len(examples))
        self.num_solved = 0
        self.success, self.replay_success = SuccessWindow(config.window), SuccessWindow(config.window)
        self.prompt_sampler: PromptSampler = (
            EpochSampler(rows, self.order, self.levels, difficulty, self.success_rates)
            if config.priority is None
            else SuccessSampler(rows, start, end, self.levels, self.prompt_stats, config)
        )

    def next_example(self) -> Example:
        """Samples the next example. Raises ConfigError if no row can be sampled."""
        if not self.num_sampled and self.levels.move_to_usable_level(self._accepts_position):
            self.prompt_sampler.refresh_weights()
        rng = random.Random(f"{self.salt}draw/{self.num_sampled}") if self._is_random else _UNUSED_RNG
        replay_position = self.replay_weights.sample_index(rng) if rng.random() < self.config.replay else None
        row, weight = (
            self.prompt_sampler.next_row(rng) if replay_position is None else (self.start + replay_position, 1.0)
        )
        stats = self.prompt_stats.setdefault(row, PromptStats(self.config.prior))
        stats.groups_in_flight, stats.sample_weight, stats.is_replay = (
            stats.groups_in_flight + 1,
            weight,
            replay_position is not None,
        )
        self._update_weights(row)
        self.num_sampled += 1
        return self.rows.examples[row]

    def observe(self, row: int, success: float) -> None:
        """Records the success rate of a scored group.

        row: row number of the group's example. success: 0 to 1.
        """
        index = self.row_indices[row]
        stats = self.prompt_stats.setdefault(index, PromptStats(self.config.prior))
        stats.recent_success = self.config.memory * stats.recent_success + (1 - self.config.memory) * success
        # A group that was returned to the queue runs again without a new sample, so the count may be 0 here.
        stats.groups_in_flight = max(0, stats.groups_in_flight - 1)
        if success >= self.config.solved and not stats.is_solved:
            stats.is_solved = True
            self.num_solved += 1
        self.success_rates[index] = (success, self.order.epoch)
        if stats.is_replay:
            self.replay_success.add(success, stats.sample_weight)
        else:
            self.success.add(success, stats.sample_weight)
            if self.levels.observe(index - self.start, success, stats.sample_weight):
                self.levels.move_to_usable_level(self._accepts_position)
                self.prompt_sampler.refresh_weights()
        self._update_weights(index)

    def _accepts_position(self, position: int) -> bool:
        return self.rows.accepts(self.start + position)

    def _update_weights(self, row: int) -> None:
        self.prompt_sampler.update_weight(row)
        stats, position = self.prompt_stats[row], row - self.start
        replay_weight = float(stats.is_solved and not stats.groups_in_flight)
        if self.replay_weights[position] != replay_weight:
            self.replay_weights[position] = replay_weight

    def metrics(self, suffix: str) -> dict[str, float]:
        """Returns the metrics of the data set's curriculum. Any thread may call this method.

        suffix: end of the metric names, `/NAME` in a mixture.
        """
        found: dict[str, float] = {}
        if len(self.levels.labels) > 1:
            found[f"curriculum/level{suffix}"] = self.levels.newest_level + 1.0
            for label, window in zip(self.levels.labels, self.levels.success_windows, strict=True):
                if window.mean is not None:
                    found[f"curriculum/success{suffix}/{label}"] = window.mean
        if self.config.replay:
            found[f"curriculum/solved{suffix}"] = float(self.num_solved)
            if self.replay_success.mean is not None:
                found[f"curriculum/replay{suffix}"] = self.replay_success.mean
        return found

    def compare_data(self, state: Mapping[str, Any]) -> DataChange:
        """Compares the rows with those of a checkpoint's state. Raises ConfigError for other data."""
        numbers = [example.row for example in self.rows.examples[self.start : self.end]]
        return compare_digests(self.setting, DataDigest.load(state["digest"]), self.digest, numbers)

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, with rows numbered from `start`.

        The state lacks `order` and `num_sampled`, which `PromptSource` saves.
        """
        start = self.start
        return {
            "digest": self.digest.state(),
            "left_out": sorted(row - start for row in self.rows.too_long_rows if start <= row < self.end),
            "rates": {row - start: rate for row, rate in self.success_rates.items()},
            "asked": {row - start: astuple(stats) for row, stats in self.prompt_stats.items()},
            "levels": self.levels.state(),
            "success": self.success.state(),
            "replays": self.replay_success.state(),
        }

    def load(self, state: dict[str, Any], change: DataChange) -> None:
        """Restores the state of a checkpoint, without the records of changed rows."""

        def without_changed_rows(records: Mapping[int, Any]) -> dict[int, Any]:
            unchanged = [position for position in records if position not in change.changed_positions]
            return {self.start + position: records[position] for position in unchanged}

        self.rows.too_long_rows.update(without_changed_rows(dict.fromkeys(state["left_out"])))
        self.success_rates.clear()
        self.success_rates.update(without_changed_rows(state["rates"]))
        self.prompt_stats.clear()
        self.prompt_stats.update(
            {row: PromptStats(*stats) for row, stats in without_changed_rows(state["asked"]).items()}
        )
        self.levels.load(state["levels"])
        self.success.load(state["success"])
        self.replay_success.load(state["replays"])
        if change.lines:
            self.levels.move_to_usable_level(self._accepts_position)
        self.num_solved = sum([stats.is_solved for stats in self.prompt_stats.values()])
        self.prompt_sampler.refresh_weights()
        for row in self.prompt_stats:
            self._update_weights(row)
