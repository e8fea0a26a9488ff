"""Task `countdown`: generated puzzles that reach a target by arithmetic on numbers."""

import ast
import operator
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.expressions import parse_expression, reaches_target
from envs.verifiers.extract import text_after_thinking

OPTIONS = {"num_rows": 10_000, "min_numbers": 3, "max_numbers": 4, "max_number": 99, "max_target": 999}
FORMAT_SCORE = 0.1
MAX_CHARACTERS = 200
_ANSWER = re.compile(r"<answer>([^<]*)</answer>")


@register("countdown")
class Countdown(Task):
    """Task with reward 1.0 for a correct expression in `<answer>`.

    Any other `<answer>` has the reward 0.1.
    A correct expression uses every number exactly once and equals the target. Columns for a curriculum: `numbers` (the
    count of numbers) and `target`.
    """

    reads_files = False
    reads_hub = False
    in_process = True
    system_prompt = (
        "Combine all the given numbers, each exactly once, with + - * / and brackets to reach the target. "
        "Think first, then give the expression alone inside <answer> and </answer>."
    )

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.check_options(OPTIONS)
        self.options = {**OPTIONS, **env.options}

    def examples(self, split: str) -> Sequence[Example]:
        if split not in ("train", "test"):
            raise ConfigError(f"env.split={split!r}: the countdown task has the splits train and test only")
        return list(self._generate(split))

    def _generate(self, split: str) -> Iterator[Example]:
        """Yields the puzzles of a split.

        The numbers and the target of a puzzle determine its split, so the splits are disjoint.
        """
        rng = random.Random(f"countdown/{split}")
        keys: set[tuple[tuple[int, ...], int]] = set()
        while len(keys) < self.options["num_rows"]:
            numbers, target = self._puzzle(rng)
            key = (tuple(sorted(numbers)), target)
            is_test_puzzle = (sum(numbers) * 31 + target) % 10 == 0
            if key in keys or is_test_puzzle != (split == "test"):
                continue
            keys.add(key)
            listed = ", ".join(str(number) for number in numbers)
            messages = self.messages(f"Numbers: {listed}. Target: {target}.")
            columns = self.curriculum_columns({"numbers": len(numbers), "target": target})
            yield Example(messages, {"numbers": numbers, "target": target}, len(keys) - 1, row_data=columns)

    def _puzzle(self, rng: random.Random) -> tuple[list[int], int]:
        """Samples numbers, and a target computed from the numbers."""
        while True:
            count = rng.randint(self.options["min_numbers"], self.options["max_numbers"])
            numbers = [rng.randint(1, self.options["max_number"]) for _ in range(count)]
            value = Fraction(numbers[0])
            for number in numbers[1:]:
                value = rng.choice((operator.add, operator.sub, operator.mul))(value, Fraction(number))
            if 0 < value <= self.options["max_target"]:
                rng.shuffle(numbers)
                return numbers, int(value)

    def reward(self, completion: Completion, example: Example) -> Reward:
        found = _ANSWER.findall(text_after_thinking(completion.full_text) or "")
        if not found:
            return Reward(0.0, {"accuracy": 0.0, "format": 0.0})
        accuracy = float(reaches(found[-1], example.answer["numbers"], example.answer["target"]))
        return Reward(1.0 if accuracy else FORMAT_SCORE, {"accuracy": accuracy, "format": 1.0})


def reaches(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Whether an expression without signs combines exactly these numbers to the target."""
    if len(expression) > MAX_CHARACTERS or not reaches_target(expression, numbers, target):
        return False
    return not any(isinstance(node, ast.UnaryOp) for node in ast.walk(parse_expression(expression.strip())))
