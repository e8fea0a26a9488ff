"""Environment `sums_with_hints`: a sum, several tries, and after a wrong one what is missing."""

import random
from typing import Any

from envs.environments.interface import Example, Message, Step


class SumsWithHints:
    """Sums to answer in several tries.

    The reward is 1 at the first try, and 0.3 less at each further try. The hint is a sum too: after
    41 to 12+30= it is 41+1=.
    """

    def __init__(self, max_operand: int = 49, tries: int = 3) -> None:
        self.max_operand, self.tries, self.turn = max_operand, tries, 0

    def examples(self, split: str) -> list[dict[str, Any]]:
        """Returns a tenth of all pairs of operands for `test`, the others for `train`."""
        side = self.max_operand + 1
        pairs = random.Random(0).sample([divmod(row, side) for row in range(side * side)], side * side)
        held_out = len(pairs) // 10
        chosen = pairs[:held_out] if split == "test" else pairs[held_out:]
        return [{"prompt": f"{a}+{b}=", "answer": a + b} for a, b in chosen]

    async def reset(self, example: Example) -> None:
        self.total: int = example.answer

    async def step(self, turn: Message) -> Step:
        text = turn["content"].strip()
        self.turn += 1
        if text == str(self.total):
            return Step(reward=1.0 - 0.3 * (self.turn - 1), components={"accuracy": 1.0})
        if self.turn == self.tries:
            return Step(reward=0.0, components={"accuracy": 0.0})
        missing = self.total - int(text) if text.isdecimal() and len(text) < 6 else None
        hint = "a number" if missing is None else f"{text}+{missing}=" if missing > 0 else f"{text}-{-missing}="
        return Step(({"role": "user", "content": hint},), reward=0.0)


environment = SumsWithHints
