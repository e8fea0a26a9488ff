"""The prompts of one data set: which is asked next, and what became of those that were."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig
from envs.curriculum.choosers import Asked, ByEpoch, BySuccess, Chooser
from envs.curriculum.levels import make_levels
from envs.curriculum.order import EpochOrder
from envs.curriculum.weighted_draws import Chances
from envs.curriculum.window import Window
from envs.data_digest import DataChange, DataDigest, compare
from envs.example import Example
from envs.prompt_rows import Rows

_NO_CHANCE = random.Random(0)


class Member:
    """A data set, alone or as a member of a mixture: the rows [start, end).

    What is drawn follows from the seed, the number of draws before, and the successes in the order in which they were
    observed. So the state is that of the draws: nothing is drawn ahead.

    setting: what names its data, for messages. drawn: how often it was drawn from. success, replays: of its newest
    groups; of those asked again. digest: of its rows.
    """

    def __init__(
        self,
        rows: Rows,
        name: str,
        setting: str,
        bounds: tuple[int, int],
        seed: int,
        difficulty: DifficultyConfig,
        config: CurriculumConfig,
    ) -> None:
        start, end = bounds
        self.rows, self.config, self.drawn, self.start, self.end = rows, config, 0, start, end
        self.setting = setting
        self.salt = f"{seed}/{name}/" if name else f"{seed}/"
        self.order = EpochOrder(start, end, self.salt)
        examples: Sequence[Example] = [rows.examples[row] for row in range(start, end)]
        self.digest = DataDigest.of(examples)
        self.places = {example.row: start + place for place, example in enumerate(examples)}
        self.levels = make_levels(examples, config.column, config)
        self._by_chance = bool(config.replay or config.priority)
        self.rates: dict[int, tuple[float, int]] = {}
        self.asked: dict[int, Asked] = {}
        self.solved = Chances([0.0] * len(examples))
        self.num_solved = 0
        self.success, self.replays = Window(config.window), Window(config.window)
        self.chooser: Chooser = (
            ByEpoch(rows, self.order, self.levels, difficulty, self.rates)
            if config.priority is None
            else BySuccess(rows, start, end, self.levels, self.asked, config)
        )

    def draw(self) -> Example:
        """The next example. Raises ConfigError where no row can be asked."""
        if not self.drawn and self.levels.settle(self._can_be_asked):
            self.chooser.refresh()
        chance = random.Random(f"{self.salt}draw/{self.drawn}") if self._by_chance else _NO_CHANCE
        again = self.solved.draw(chance) if chance.random() < self.config.replay else None
        row, weight = self.chooser.next(chance) if again is None else (self.start + again, 1.0)
        known = self.asked.setdefault(row, Asked(self.config.prior))
        known.flying, known.weight, known.replay = known.flying + 1, weight, again is not None
        self._changed(row)
        self.drawn += 1
        return self.rows.examples[row]

    def observe(self, row: int, success: float) -> None:
        """A group was judged. row: of its example. success: 0 to 1."""
        row = self.places[row]
        known = self.asked.setdefault(row, Asked(self.config.prior))
        known.recent = self.config.memory * known.recent + (1 - self.config.memory) * success
        known.flying = max(0, known.flying - 1)  # one that was handed back is answered again without a draw
        if success >= self.config.solved and not known.solved:
            known.solved = True
            self.num_solved += 1
        self.rates[row] = (success, self.order.epoch)
        if known.replay:
            self.replays.add(success, known.weight)
        else:
            self.success.add(success, known.weight)
            if self.levels.observe(row - self.start, success, known.weight):
                self.levels.settle(self._can_be_asked)
                self.chooser.refresh()
        self._changed(row)

    def _can_be_asked(self, place: int) -> bool:
        return self.rows.accepts(self.start + place)

    def _changed(self, row: int) -> None:
        self.chooser.changed(row)
        known, place = self.asked[row], row - self.start
        again = float(known.solved and not known.flying)
        if self.solved[place] != again:
            self.solved[place] = again

    def metrics(self, suffix: str) -> dict[str, float]:
        """Metrics of its curriculum, if it has one. From any thread.

        suffix: of the names, `/NAME` in a mixture.
        """
        found: dict[str, float] = {}
        if len(self.levels.labels) > 1:
            found[f"curriculum/level{suffix}"] = self.levels.newest + 1.0
            for label, window in zip(self.levels.labels, self.levels.success, strict=True):
                if window.mean is not None:
                    found[f"curriculum/success{suffix}/{label}"] = window.mean
        if self.config.replay:
            found[f"curriculum/solved{suffix}"] = float(self.num_solved)
            if self.replays.mean is not None:
                found[f"curriculum/replay{suffix}"] = self.replays.mean
        return found

    def change(self, state: Mapping[str, Any]) -> DataChange:
        """Its rows beside those of a checkpoint's state. Raises ConfigError for other data."""
        numbers = [example.row for example in self.rows.examples[self.start : self.end]]
        return compare(self.setting, DataDigest.load(state["digest"]), self.digest, numbers)

    def state(self) -> dict[str, Any]:
        """Rows are counted from the first of this data set."""
        start = self.start
        return {
            "digest": self.digest.state(),
            "left_out": sorted(row - start for row in self.rows.left_out if start <= row < self.end),
            "rates": {row - start: known for row, known in self.rates.items()},
            "asked": {row - start: astuple(known) for row, known in self.asked.items()},
            "levels": self.levels.state(),
            "success": self.success.state(),
            "replays": self.replays.state(),
        }

    def load(self, state: dict[str, Any], change: DataChange) -> None:
        """Restore the state of a checkpoint, without records of changed rows."""

        def kept(of_rows: Mapping[int, Any]) -> dict[int, Any]:
            still = [place for place in of_rows if place not in change.changed]
            return {self.start + place: of_rows[place] for place in still}

        self.rows.left_out.update(kept(dict.fromkeys(state["left_out"])))
        self.rates.clear()
        self.rates.update(kept(state["rates"]))
        self.asked.clear()
        self.asked.update({row: Asked(*known) for row, known in kept(state["asked"]).items()})
        self.levels.load(state["levels"])
        self.success.load(state["success"])
        self.replays.load(state["replays"])
        if change.lines:
            self.levels.settle(self._can_be_asked)
        self.num_solved = sum([known.solved for known in self.asked.values()])
        self.chooser.refresh()
        for row in self.asked:
            self._changed(row)
