"""Task `gsm8k`: GSM8K (Cobbe et al. 2021), grade-school word problems with whole-number answers."""

from collections.abc import Sequence

from config.schema.errors import ConfigError
from envs.data import Row, load_rows
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.numbers import extract_final_number
from envs.verifiers.rules import RULES

RULE = RULES["gsm8k"]


@register("gsm8k")
class GSM8K(Task):
    """Task with reward 1.0 for the correct number.

    A wrong number in the right format has the reward 0.1.
    """

    in_process = True
    system_prompt = RULE.system_prompt
    weights = RULE.weights

    def examples(self, split: str) -> Sequence[Example]:
        return [self._example(row) for row in load_rows(self.env, "openai/gsm8k", "main", split)]

    def _example(self, row: Row) -> Example:
        reference = row.text("answer").rpartition("####")[2].strip()
        if extract_final_number(f"#### {reference}") is None:
            raise ConfigError(f"{row.place}: the answer must end in '#### NUMBER', but ends in {reference[-40:]!r}")
        return Example(self.messages(row.text("question")), reference, row.index, row_data=self.row_data(row))

    def reward(self, completion: Completion, example: Example) -> Reward:
        return RULE.reward(completion, example, self.env)
