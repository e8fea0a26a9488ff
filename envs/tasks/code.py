"""Programming problems judged by running the answer on tests: standard input and output, or a function."""

import json
from collections.abc import Sequence
from typing import Any

from config.env import EnvConfig
from config.errors import ConfigError
from envs.data import Row, load_rows
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.code import SYSTEM_PROMPT, CodeOptions, Tests, code_reward, warm_up

PROBLEM_COLUMNS = ("problem", "prompt", "question", "description")
HUB_TESTS = ("public_tests", "private_tests", "generated_tests")


@register("code")
class Code(Task):
    """1.0 for a program that passes all tests; with `credit=share` the share that passes.

    Rows: a problem, and `inputs`, `outputs` and perhaps `fn_name`, or `test_cases` with these; or CodeContests'.

    Options: those of `CodeOptions`.
    """

    system_prompt = SYSTEM_PROMPT

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        unknown = sorted(set(env.options) - set(CodeOptions.__dataclass_fields__))
        if unknown:
            known = ", ".join(CodeOptions.__dataclass_fields__)
            raise ConfigError(f"env.options.{unknown[0]}: the code task knows {known}")
        CodeOptions.of(env)

    def examples(self, split: str) -> Sequence[Example]:
        rows = load_rows(self.env, "deepmind/code_contests", None, split)
        return [Example(self.messages(_problem(row)), tests_of(row), row.index) for row in rows]

    def reward(self, completion: Completion, example: Example) -> Reward:
        return code_reward(completion, example, self.env)

    def warm_up(self) -> None:
        warm_up(self.env)


def _problem(row: Row) -> str:
    column = next((name for name in PROBLEM_COLUMNS if name in row.values), PROBLEM_COLUMNS[0])
    return row.text(column).strip()


def tests_of(row: Row) -> Any:
    """The row's tests, as `Tests.parse` reads them.

    Raises:
        ConfigError: none, or none that can be used.
    """
    found: Any = row.values.get("test_cases", row.values)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{row.place}: test_cases is not JSON ({error.msg})") from error
    if any(name in row.values for name in HUB_TESTS):
        given = [row.values[name] for name in HUB_TESTS if row.values.get(name)]
        found = {
            f"{side}s": [each for tests in given for each in tests[side]] for side in ("input", "output")
        }
    try:
        Tests.parse(found)
    except ValueError as error:
        raise ConfigError(f"{row.place}: {error}") from error
    if found is not row.values:
        return found
    return {key: found[key] for key in ("inputs", "outputs", "fn_name") if key in found}
