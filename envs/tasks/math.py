"""MATH (Hendrycks et al. 2021): competition problems with answers in LaTeX."""

from envs.data import Row
from envs.task import register
from envs.tasks.math_rows import MathTask
from envs.verifiers.extract import boxed


@register("math")
class Math(MathTask):
    """1.0 for a final answer equal to the gold in value, however it is marked; the prompt asks for a box.

    Rows have `problem` and `answer`, or `solution` with the answer in its last box.
    """

    hub = ("DigitalLearningGmbH/MATH-lighteval", "default")

    def gold(self, row: Row) -> str | None:
        if "answer" in row.values or "reward_model" in row.values:
            return super().gold(row)
        return boxed(row.text("solution")) or None
