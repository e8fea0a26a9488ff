"""Task `environment`: prompts that the class of `env.environment` makes by its method `examples(split)`.

{"prompt": "12+7=", "answer": 19}      a text or messages, the answer, and columns of your own; or an `Example`
"""

from collections.abc import Mapping, Sequence
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.conversations import read_messages
from envs.data import Row
from envs.environments.definition import find_environment
from envs.row_files import format_value
from envs.task import Completion, Example, Message, Reward, Task, register
from envs.user_code import describe_exception


@register("environment")
class EnvironmentPrompts(Task):
    """Task whose rows and rewards come from the environment.

    A completion without a reward of the environment has the reward 0.
    """

    reads_files = False
    reads_hub = False
    in_process = True

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        definition = find_environment(env)
        assert definition is not None
        self.place = f"env.environment={env.environment}"
        self.make_instance = definition.make_instance
        if "examples" not in dir(definition.target):
            raise ConfigError(
                f"{self.place}: env.dataset=environment needs its method examples(split), which is missing; define it, "
                "or set another env.dataset"
            )

    def examples(self, split: str) -> Sequence[Example]:
        try:
            rows = list(self.make_instance().examples(split))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.place}: examples({split!r}) failed: {describe_exception(error)}") from error
        return [self._example(index, row) for index, row in enumerate(rows)]

    def _example(self, index: int, row: Any) -> Example:
        if isinstance(row, Example):
            return row
        place = f"{self.place}: row {index} of examples()"
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        if not isinstance(prompt, str | list | Mapping) or not prompt:
            raise ConfigError(
                f"{place} is {format_value(row)}; return dictionaries with a `prompt`, which is a text or messages, "
                "and an `answer`"
            )
        columns = dict(row)
        return Example(self._messages(columns, place, index), columns.get("answer"), index, row_data=columns)

    def _messages(self, columns: dict[str, Any], place: str, index: int) -> tuple[Message, ...]:
        if isinstance(columns["prompt"], str):
            return self.messages(columns["prompt"])
        return self.conversation(read_messages(Row(columns, place, index), columns["prompt"], "prompt"))

    def reward(self, completion: Completion, example: Example) -> Reward:
        return Reward(0.0, {"accuracy": 0.0})
