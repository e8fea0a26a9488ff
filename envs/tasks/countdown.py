"""Countdown puzzles: reach a target from given numbers with + - * /, each number used exactly once. Generated."""

import ast
import operator
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.expressions import makes, parse
from envs.verifiers.extract import after_thinking

OPTIONS = {"num_rows": 10_000, "min_numbers": 3, "max_numbers": 4, "max_number": 99, "max_target": 999}
FORMAT_SCORE = 0.1
MAX_CHARACTERS = 200
_ANSWER = re.compile(r"<answer>([^<]*)</answer>")


@register("countdown")
class Countdown(Task):
    """1.0 for an expression in `<answer>` that uses every number once and hits the target, 0.1 for any tag.

    Columns for a curriculum: `numbers`, how many there are, and `target`.
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
            raise ConfigError(f"env.split={split!r}: the countdown task has train and test")
        return list(self._generate(split))

    def _generate(self, split: str) -> Iterator[Example]:
        """Every puzzle belongs to one split by its own numbers, so that the splits are disjoint."""
        chance = random.Random(f"countdown/{split}")
        seen: set[tuple[tuple[int, ...], int]] = set()
        while len(seen) < self.options["num_rows"]:
            numbers, target = self._puzzle(chance)
            key = (tuple(sorted(numbers)), target)
            held_out = (sum(numbers) * 31 + target) % 10 == 0
            if key in seen or held_out != (split == "test"):
                continue
            seen.add(key)
            listed = ", ".join(str(number) for number in numbers)
            messages = self.messages(f"Numbers: {listed}. Target: {target}.")
            columns = self.kept({"numbers": len(numbers), "target": target})
            yield Example(messages, {"numbers": numbers, "target": target}, len(seen) - 1, row_data=columns)

    def _puzzle(self, chance: random.Random) -> tuple[list[int], int]:
        """Numbers and a target that they reach: the target is made from them."""
        while True:
            count = chance.randint(self.options["min_numbers"], self.options["max_numbers"])
            numbers = [chance.randint(1, self.options["max_number"]) for _ in range(count)]
            value = Fraction(numbers[0])
            for number in numbers[1:]:
                value = chance.choice((operator.add, operator.sub, operator.mul))(value, Fraction(number))
            if 0 < value <= self.options["max_target"]:
                chance.shuffle(numbers)
                return numbers, int(value)

    def reward(self, completion: Completion, example: Example) -> Reward:
        found = _ANSWER.findall(after_thinking(completion.full_text) or "")
        if not found:
            return Reward(0.0, {"accuracy": 0.0, "format": 0.0})
        accuracy = float(reaches(found[-1], example.answer["numbers"], example.answer["target"]))
        return Reward(1.0 if accuracy else FORMAT_SCORE, {"accuracy": accuracy, "format": 1.0})


def reaches(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the expression is + - * / without signs over exactly these whole numbers, and equals the target."""
    if len(expression) > MAX_CHARACTERS or not makes(expression, numbers, target):
        return False
    return not any(isinstance(node, ast.UnaryOp) for node in ast.walk(parse(expression.strip())))
