"""DAPO-Math-17k (Yu et al. 2025): competition problems with whole-number answers.

The published file repeats every problem about a hundred times and gives some of them contradictory answers:
`env.duplicates` says what becomes of them, and they are reported either way.
"""

from envs.data import Row
from envs.task import register
from envs.tasks.math_rows import MathTask

_HEAD = "Solve the following math problem step by step."
_TAIL = 'Remember to put your answer on its own line after "Answer:".'


@register("dapo_math")
class DapoMath(MathTask):
    """1.0 where the gold follows the last `Answer:`.

    Rows have `problem` and `answer`, or the published file's `prompt` and `reward_model.ground_truth`; the
    instructions that the published prompts carry are cut, since the system prompt gives them.
    """

    rule = "dapo"
    hub = ("BytedTsinghua-SIA/DAPO-Math-17k", None)
    hub_splits = {"train": "train"}  # noqa: RUF012

    def problem(self, row: Row) -> str:
        text = super().problem(row)
        if not text.startswith(_HEAD):
            return text
        _, _, body = text.partition("\n\n")
        return body.removesuffix(_TAIL).strip()
