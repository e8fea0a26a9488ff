"""Task `arithmetic`: generated additions, used by the quickstart.

Every pair of operands is a row; a tenth of the rows is held out for the test split.
"""

import random
from collections.abc import Sequence

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.extract import text_after_thinking

OPTIONS = {"max_operand": 99}


@register("arithmetic")
class Arithmetic(Task):
    """Task with reward 1.0 if the answer to `A+B=` is exactly the sum.

    Options: `max_operand` (largest operand). Columns for a curriculum: `operand` (the larger operand) and `sum`.
    """

    reads_files = False
    reads_hub = False
    in_process = True

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.check_options(OPTIONS)
        self.largest = {**OPTIONS, **env.options}["max_operand"]
        if not isinstance(self.largest, int) or self.largest < 1:
            raise ConfigError(f"env.options.max_operand={self.largest!r}: must be a whole number above 0")

    def examples(self, split: str) -> Sequence[Example]:
        if split not in ("train", "test"):
            raise ConfigError(f"env.split={split!r}: the arithmetic task has the splits train and test only")
        side = self.largest + 1
        rows = list(range(side * side))
        random.Random(0).shuffle(rows)
        held_out = len(rows) // 10
        chosen = rows[:held_out] if split == "test" else rows[held_out:]
        return [self._example(row, *divmod(row, side)) for row in chosen]

    def _example(self, row: int, a: int, b: int) -> Example:
        columns = {"operand": max(a, b), "sum": a + b}
        return Example(self.messages(f"{a}+{b}="), str(a + b), row, row_data=self.curriculum_columns(columns))

    def reward(self, completion: Completion, example: Example) -> Reward:
        answer_text = text_after_thinking(completion.full_text)
        correct = float(answer_text is not None and answer_text.strip() == example.answer)
        return Reward(correct, {"accuracy": correct})
