"""Environment `products_by_tool`: a product, one call of the tool `mul`, and the answer."""

import random
from typing import Any

from envs.environments.interface import Example, Message, Step, tool


class ProductsByTool:
    """Products whose right answer after one call of the tool has the reward 1."""

    def __init__(self, max_factor: int = 99) -> None:
        self.max_factor, self.calls = max_factor, 0

    def examples(self, split: str) -> list[dict[str, Any]]:
        """Returns a tenth of all pairs of factors for `test`, the others for `train`."""
        pairs = [(a, b) for a in range(2, self.max_factor + 1) for b in range(2, self.max_factor + 1)]
        random.Random(0).shuffle(pairs)
        held_out = len(pairs) // 10
        chosen = pairs[:held_out] if split == "test" else pairs[held_out:]
        return [{"prompt": f"{a}*{b}=", "answer": a * b} for a, b in chosen]

    async def reset(self, example: Example) -> None:
        self.product: int = example.answer

    @tool
    async def mul(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: the first factor
            b: the second factor
        """
        self.calls += 1
        return int(a) * int(b)

    async def step(self, turn: Message) -> Step:
        right = float(self.calls == 1 and turn["content"].strip() == str(self.product))
        return Step(reward=right, components={"accuracy": right})


environment = ProductsByTool
