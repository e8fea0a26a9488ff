"""Parses tests that are Python code with asserts, in the formats of public data sets.

The formats are one text with an entry point, or a list of asserts.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.sandbox.sandbox import ProgramResult

TEST_COLUMNS = ("test", "test_list", "entry_point", "test_setup_code", "test_imports")
"""Columns of a row that belong to such tests; the column `prompt` also belongs to them if it is Python code."""

SETUP_COLUMNS = ("test_imports", "test_setup_code")
"""Columns whose code does not have to contain an assertion."""
FAILING_NODES = (ast.Assert, ast.Call, ast.Raise)
"""Syntax nodes that can make a test fail."""


@dataclass(frozen=True)
class Assertions:
    """Python code that calls a program and asserts its results.

    sources: code of the tests; every entry is one test.
    preamble: code that runs before the tests, and before the program in the program's process: the definitions
        of the problem.
    setup: code that runs before the tests and after the program, so that it may use the program.
    entry_point: the expression that is `candidate` in the tests, such as `f` or `Solution().f`.
    """

    sources: tuple[str, ...]
    preamble: str = ""
    setup: str = ""
    entry_point: str | None = None

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> "Assertions":
        """Parses the test columns of a row.

        The columns are {"test": code, "entry_point": optional}, or {"test_list": [code, ...]}. Both may have a
        `prompt`.
        The code in `test` may define `check(candidate)` or functions `test_...`, or assert at once (HumanEval,
        KodCode, LeetCode). A `test_list` may have `test_setup_code` or `test_imports` (MBPP).

        Raises:
            ValueError: The columns have another format, or the code has a syntax error.
        """
        if "test" in value:
            sources = [_checked_source(value["test"], "test")]
        else:
            listed = value["test_list"]
            listed = json.loads(listed) if isinstance(listed, str) else listed
            if not isinstance(listed, list) or not listed:
                raise ValueError("test_list must be a non-empty list of asserts")
            sources = [_checked_source(each, "test_list") for each in listed]
        entry_point = value.get("entry_point")
        if entry_point is not None and not isinstance(entry_point, str):
            raise ValueError(f"entry_point={entry_point!r} is not the name of a function")
        function_names = [node.name for node in ast.parse(sources[0]).body if isinstance(node, ast.FunctionDef)]
        if entry_point is not None and "check" in function_names:
            sources = [f"{source}\n\ncheck(candidate)" for source in sources]
        imports = value.get("test_imports") or []
        setup = _checked_source(value.get("test_setup_code") or "", "test_setup_code")
        lines = list(imports) if isinstance(imports, list) else [imports]
        top_level = ast.parse(setup).body  # its top-level imports run before the program too
        lines += [ast.unparse(node) for node in top_level if isinstance(node, ast.Import | ast.ImportFrom)]
        prompt = value.get("prompt")
        program = prompt if isinstance(prompt, str) and is_program(prompt) else ""  # a prompt of HumanEval is code
        preamble = "\n".join([program, *(_checked_source(line, "test_imports") for line in lines)])
        return cls(tuple(sources), preamble.strip("\n"), setup, entry_point)

    def sandbox_job(self, max_tests: int | None, stop_at_failure: bool) -> dict[str, Any]:
        """Builds the job that `Sandbox.run_tests` takes.

        max_tests: number of tests to run; None runs all of them.
        stop_at_failure: end the run at the first test that fails.
        """
        settings = {"preamble": self.preamble, "setup": self.setup, "entry_point": self.entry_point}
        return settings | {"tests": list(self.sources[:max_tests]), "all": stop_at_failure}


def _checked_source(value: Any, column: str) -> str:
    """Returns the source code in a column after checks of its syntax and assertions.

    Raises:
        ValueError: The value is not text, not Python, or nothing in the code can fail.
    """
    if not isinstance(value, str):
        raise ValueError(f"{column}: Python code must be text, but is {value!r:.80}")
    try:
        tree = ast.parse(value)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{column}: {error}: {value!r:.80}") from None
    if column not in SETUP_COLUMNS and not any(isinstance(node, FAILING_NODES) for node in ast.walk(tree)):
        raise ValueError(f"{column}: no statement of the code can fail, so every program would pass: {value!r:.80}")
    return value


def is_program(text: str) -> bool:
    """Whether the whole text is Python code that does something.

    `print(1)` is a program; a single word or number is not.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    defining = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign
    return any(isinstance(node, defining | ast.Call | ast.For | ast.While) for node in ast.walk(tree))


def failure_reasons(run: ProgramResult, total: int) -> list[str]:
    """Returns one failure reason per test; the reason is empty if the test passed.

    Tests without a verdict have failed.
    """
    reasons = [str(json.loads(line)) for line in run.value.splitlines()][:total]
    default_reason = run.status if run.status != "finished" else "the tests ended early"
    return reasons + [default_reason] * (total - len(reasons))
