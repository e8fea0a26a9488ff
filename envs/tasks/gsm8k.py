"""GSM8K (Cobbe et al. 2021): grade-school word problems with whole-number answers."""

from collections.abc import Sequence

from config.schema.errors import ConfigError
from envs.data import Row, load_rows
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.numbers import final_number
from envs.verifiers.rules import RULES

RULE = RULES["gsm8k"]


@register("gsm8k")
class GSM8K(Task):
    """1.0 for the right number, 0.1 for a wrong one in the asked-for format, else 0."""

    in_process = True
    system_prompt = RULE.system_prompt
    weights = RULE.weights

    def examples(self, split: str) -> Sequence[Example]:
        return [self._example(row) for row in load_rows(self.env, "openai/gsm8k", "main", split)]

    def _example(self, row: Row) -> Example:
        gold = row.text("answer").rpartition("####")[2].strip()
        if final_number(f"#### {gold}") is None:
            raise ConfigError(f"{row.place}: the answer must end in '#### NUMBER', it ends in {gold[-40:]!r}")
        return Example(self.messages(row.text("question")), gold, row.index, row_data=self.row_data(row))

    def reward(self, completion: Completion, example: Example) -> Reward:
        return RULE.reward(completion, example, self.env)
