"""The order in which prompts are trained on: every row once an epoch, shuffled by seed and epoch, resumable.

A mixture has one such order per member; which member is next follows from the weights alone, as evenly as whole
prompts allow. Prompts whose recent success rate lies outside `env.difficulty` are passed over for a few epochs.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from config.env import DifficultyConfig
from config.errors import ConfigError
from envs.example import Example, Mixed


class _Order:
    """The rows [start, end), each once an epoch. `salt` keeps members of equal size from going in step.

    served: rows of this epoch that were drawn. unfiltered: the last epoch served none, so this one takes all.
    """

    def __init__(self, start: int, end: int, salt: str) -> None:
        self.start, self.end, self.salt = start, end, salt
        self.go_to(0, 0, 0, False)

    def go_to(self, epoch: int, position: int, served: int, unfiltered: bool) -> None:
        self.epoch, self.position, self.served, self.unfiltered = epoch, position, served, unfiltered
        self.rows = list(range(self.start, self.end))
        random.Random(f"{self.salt}{epoch}").shuffle(self.rows)

    def next(self) -> int | None:
        """The next row, or None once at the end of each epoch."""
        if self.position == len(self.rows):
            self.go_to(self.epoch + 1, 0, 0, self.served == 0)
            return None
        self.position += 1
        return self.rows[self.position - 1]


class PromptSource:
    """An endless, seeded stream of examples.

    Args:
        examples: one split of a task; several data sets where it is a `Mixed`.
        seed: with the epoch it fixes the order.
        keep: examples it refuses (a prompt over the limit) are left out and counted; asked once a row, when
            the row first comes up.
        difficulty: which success rates are worth training on; see `observe`.
        told: what a message says of prompts that `keep` all refused: how long they are.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        seed: int,
        keep: Callable[[Example], bool],
        difficulty: DifficultyConfig | None = None,
        told: Callable[[Sequence[Example]], str] | None = None,
    ) -> None:
        if not len(examples):
            raise ConfigError("the dataset has no rows: check env.data_files and env.split")
        self.examples = examples
        self.keep = keep
        self.told = told
        self.difficulty = difficulty or DifficultyConfig()
        bounds = examples.bounds if isinstance(examples, Mixed) else {"": (0, len(examples))}
        empty = [name for name, (start, end) in bounds.items() if start == end]
        if empty:
            raise ConfigError(
                f"env.mixture.{empty[0]}: this member has no rows; check its data_files and split"
            )
        self.weights = examples.weights if isinstance(examples, Mixed) else {"": 1.0}
        self._orders = {
            name: _Order(start, end, f"{seed}/{name}/" if name else f"{seed}/")
            for name, (start, end) in bounds.items()
        }
        self._drawn = dict.fromkeys(bounds, 0)
        self._left_out: set[int] = set()
        self._kept: set[int] = set()
        self._success: dict[tuple[str, int], tuple[float, int]] = {}

    @property
    def left_out(self) -> int:
        """Rows met so far that `keep` refused."""
        return len(self._left_out)

    def draw(self, count: int) -> list[Example]:
        """The next `count` examples.

        Raises:
            ConfigError: when no row of a data set passes `keep`.
        """
        return [self._draw_from(self._next_member()) for _ in range(count)]

    def observe(self, example: Example, success: float) -> None:
        """Remember a group's success rate, 0 to 1: `env.difficulty` decides by it when the row comes up again."""
        order = self._orders[example.source]
        self._success[example.source, example.row] = (success, order.epoch)

    def _next_member(self) -> str:
        """The member that is furthest behind its share."""
        return min(self._drawn, key=lambda name: (self._drawn[name] + 1) / self.weights[name])

    def _draw_from(self, name: str) -> Example:
        order = self._orders[name]
        while True:
            index = order.next()
            if index is None:
                self._check_left_out(order)
            elif self._accepts(index):
                example = self.examples[index]
                if order.unfiltered or not self._passed_over(example, order.epoch):
                    self._drawn[name] += 1
                    order.served += 1
                    return example

    def _passed_over(self, example: Example, epoch: int) -> bool:
        """Too easy or too hard lately."""
        known = self._success.get((example.source, example.row))
        if known is None or epoch - known[1] > self.difficulty.retry_epochs:
            return False
        return not self.difficulty.low <= known[0] <= self.difficulty.high

    def _accepts(self, index: int) -> bool:
        if index in self._kept:
            return True
        if index in self._left_out:
            return False
        accepted = self.keep(self.examples[index])
        (self._kept if accepted else self._left_out).add(index)
        return accepted

    def _check_left_out(self, order: _Order) -> None:
        if all(index in self._left_out for index in order.rows):
            lengths = "" if self.told is None else f" ({self.told([self.examples[order.start]])})"
            raise ConfigError(
                f"all {len(order.rows)} prompts are longer than env.max_prompt_tokens{lengths}: raise it (and "
                "inference_model.max_model_len, where that is set)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "orders": {
                name: (order.epoch, order.position, order.served, order.unfiltered)
                for name, order in self._orders.items()
            },
            "drawn": dict(self._drawn),
            "left_out": sorted(self._left_out),
            "success": dict(self._success),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the state is of another mixture."""
        if set(state["orders"]) != set(self._orders):
            raise ConfigError(
                f"env.mixture: the checkpoint was made with {', '.join(state['orders']) or 'one data set'}; "
                "resume with the same members"
            )
        for name, place in state["orders"].items():
            self._orders[name].go_to(*place)
        self._drawn = dict(state["drawn"])
        self._left_out = set(state["left_out"])
        self._success = dict(state["success"])


class PromptQueue:
    """A prompt source with a way back: examples that were drawn and not trained on are drawn again first.

    next_group_id: of the group that is begun next.
    """

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self.returned: deque[Example] = deque()
        self.next_group_id = 0

    def begin(self, count: int) -> list[tuple[int, Example]]:
        """The next `count` examples, each with the id of the group that is made of it."""
        return [self.begin_one() for _ in range(count)]

    def begin_one(self) -> tuple[int, Example]:
        example = self.returned.popleft() if self.returned else self.source.draw(1)[0]
        self.next_group_id += 1
        return self.next_group_id - 1, example

    def observe(self, example: Example, success: float) -> None:
        self.source.observe(example, success)

    def state_dict(self, outstanding: list[Example] | None = None) -> dict[str, Any]:
        """`outstanding`: examples in flight or buffered, to be drawn first after a resume."""
        waiting = [*(outstanding or []), *self.returned]
        return {
            "source": self.source.state_dict(),
            # Without the row, which may hold what a checkpoint cannot; the data still has it.
            "returned": [
                asdict(replace(example, row_data={})) | {"messages": list(example.messages)}
                for example in waiting
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        returned = [
            Example(**(fields | {"messages": tuple(fields["messages"])})) for fields in state["returned"]
        ]
        wanted = {(example.source, example.row) for example in returned}
        rows: dict[tuple[str, int], Mapping[str, Any]] = {}
        for example in self.source.examples if wanted else ():
            if (example.source, example.row) in wanted:
                rows[example.source, example.row] = example.row_data
        self.returned = deque(
            replace(example, row_data=rows.get((example.source, example.row), {})) for example in returned
        )
