"""Task `math`: MATH (Hendrycks et al. 2021), competition problems with answers in LaTeX."""

from envs.data import Row
from envs.task import register
from envs.tasks.math_task import MathTask
from envs.verifiers.extract import last_boxed


@register("math")
class Math(MathTask):
    """Task with reward 1.0 for a final answer equal in value to the reference answer.

    The final answer may have any notation; the system prompt requests `\\boxed{}`. Rows have `problem` and `answer`, or
    `solution` with the answer in its last box.
    """

    hub = ("DigitalLearningGmbH/MATH-lighteval", "default")

    def reference_answer(self, row: Row) -> str | None:
        """Returns the reference answer of a row, also from the last box of `solution`."""
        if "answer" in row.values or "reward_model" in row.values:
            return super().reference_answer(row)
        return last_boxed(row.text("solution")) or None
