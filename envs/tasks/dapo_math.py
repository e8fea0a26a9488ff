"""Task `dapo_math`: DAPO-Math-17k (Yu et al. 2025), competition problems with whole-number answers.

The published file repeats every problem about a hundred times, some problems with contradictory answers. A warning
reports the duplicates, and `env.duplicates` selects which rows are kept.
"""

from envs.data import Row
from envs.task import register
from envs.tasks.math_task import MathTask

_HEAD = "Solve the following math problem step by step."
_TAIL = 'Remember to put your answer on its own line after "Answer:".'


@register("dapo_math")
class DapoMath(MathTask):
    """Task with reward 1.0 if the reference answer follows the last `Answer:`.

    Rows have `problem` and `answer`, or the published file's `prompt` and `reward_model.ground_truth`. The instructions
    in the published prompts are removed, since the system prompt contains them.
    """

    rule = "dapo"
    hub = ("BytedTsinghua-SIA/DAPO-Math-17k", None)
    hub_splits = {"train": "train"}  # noqa: RUF012

    def problem(self, row: Row) -> str:
        """Returns the problem's text, without the instructions of the published file."""
        text = super().problem(row)
        if not text.startswith(_HEAD):
            return text
        _, _, body = text.partition("\n\n")
        return body.removesuffix(_TAIL).strip()
