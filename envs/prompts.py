"""The order in which prompts are trained on: every row once an epoch, shuffled by seed and epoch, resumable."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from config.errors import ConfigError
from envs.task import Example


class PromptSource:
    """An endless, seeded stream of examples.

    Args:
        examples: one split of a task.
        seed: with the epoch it fixes the order.
        keep: examples it refuses (a prompt over the limit) are left out and counted; asked once a row, when
            the row first comes up.
    """

    def __init__(self, examples: Sequence[Example], seed: int, keep: Callable[[Example], bool]) -> None:
        if not len(examples):
            raise ConfigError("the dataset has no rows: check env.data_files and env.split")
        self.examples = examples
        self.seed = seed
        self.keep = keep
        self.epoch = 0
        self.position = 0
        self._left_out: set[int] = set()
        self._kept: set[int] = set()
        self._order = self._shuffled()

    @property
    def left_out(self) -> int:
        """Rows met so far that `keep` refused."""
        return len(self._left_out)

    def draw(self, count: int) -> list[Example]:
        """The next `count` examples.

        Raises:
            ConfigError: when no row of the dataset passes `keep`.
        """
        drawn: list[Example] = []
        while len(drawn) < count:
            if self.position == len(self._order):
                self._next_epoch()
            index = self._order[self.position]
            self.position += 1
            if self._accepts(index):
                drawn.append(self.examples[index])
        return drawn

    def _accepts(self, index: int) -> bool:
        if index in self._kept:
            return True
        if index in self._left_out:
            return False
        accepted = self.keep(self.examples[index])
        (self._kept if accepted else self._left_out).add(index)
        return accepted

    def _next_epoch(self) -> None:
        if len(self._left_out) == len(self.examples):
            raise ConfigError(
                f"all {len(self.examples)} prompts are longer than env.max_prompt_tokens: raise it (and "
                "inference_model.max_model_len, where that is set)"
            )
        self.epoch += 1
        self.position = 0
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.examples)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "left_out": sorted(self._left_out)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._left_out = set(state["left_out"])
        self._order = self._shuffled()
