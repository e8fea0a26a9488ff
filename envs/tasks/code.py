"""Task `code`: programming problems, scored by running the model's program on tests."""

from collections.abc import Sequence
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row, load_rows
from envs.row_files import read_json
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.assertion_tests import TEST_COLUMNS
from envs.verifiers.code import CodeOptions, Tests, check_programs, code_reward, language_of, system_prompt, warm_up

PROBLEM_COLUMNS = ("problem", "prompt", "question", "description")
HUB_TESTS = ("public_tests", "private_tests", "generated_tests")


@register("code")
class Code(Task):
    """Task with reward 1.0 for a program that passes all tests.

    With `credit=share` the reward is the share of passed tests. Tests use standard input and output, or call a
    function. A row has a problem and tests in one of these forms: the columns `inputs`, `outputs` and optionally
    `fn_name` and `language`; the same as an object in `test_cases`; the columns of CodeContests; or Python code that
    asserts, as in HumanEval, MBPP, KodCode and LeetCode (`Assertions.parse`).

    Options: those of `CodeOptions`.
    """

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.check_options(CodeOptions.__dataclass_fields__)
        self.options = CodeOptions.from_config(env)

    def examples(self, split: str) -> Sequence[Example]:
        rows = load_rows(self.env, "deepmind/code_contests", None, split)
        examples = [self._example(row) for row in rows]
        check_programs(self.env, (example.answer for example in examples))
        return examples

    def _example(self, row: Row) -> Example:
        answer = read_tests(row)
        language = language_of(Tests.parse(answer), self.options)
        problem = row.text(row.first_column(PROBLEM_COLUMNS)).strip()
        messages = self.messages(problem, system_prompt(language))
        return Example(messages, answer, row.index, row_data=self.row_data(row))

    def reward(self, completion: Completion, example: Example) -> Reward:
        return code_reward(completion, example, self.env)

    def warm_up(self) -> None:
        warm_up(self.env)


def read_tests(row: Row) -> Any:
    """Reads the tests of a row, in the form of `Tests.parse`.

    Raises ConfigError for unusable tests.
    """
    if any(name in row.values for name in HUB_TESTS):  # CodeContests: the tests of all columns
        columns = [row[name] for name in HUB_TESTS if row.values.get(name)]
        if not all(isinstance(tests, dict) and {"input", "output"} <= tests.keys() for tests in columns):
            raise ConfigError(f"{row.place}: {', '.join(HUB_TESTS)} must each be {{input: [...], output: [...]}}")
        found = {f"{side}s": [each for tests in columns for each in tests[side]] for side in ("input", "output")}
    elif "test_cases" in row.values:
        found = row["test_cases"]
        if isinstance(found, str):
            found = read_json(found, f"{row.place}: column 'test_cases'")
    elif "test" in row.values or "test_list" in row.values:
        found = {key: row[key] for key in (*TEST_COLUMNS, "prompt") if key in row.values}
    else:
        found = {key: row[key] for key in ("inputs", "outputs", "fn_name", "language") if key in row.values}
    return check_tests(found, row.place)


def check_tests(tests: Any, place: str) -> Any:
    """Returns tests unchanged. Raises ConfigError if `Tests.parse` fails. place: place of the row, for messages."""
    try:
        Tests.parse(tests)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}") from error
    return tests
