"""Tests that are Python code, in the forms of public data sets: one text with an entry point, or a list of asserts."""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.sandbox.sandbox import Run

COLUMNS = ("test", "test_list", "entry_point", "test_setup_code", "test_imports")
"""Of a row, what belongs to such tests; its `prompt` does where that is Python code."""

MAY_PASS = ("test_imports", "test_setup_code")
CAN_FAIL = (ast.Assert, ast.Call, ast.Raise)


@dataclass(frozen=True)
class Assertions:
    """Python code that calls a program and asserts what comes back.

    sources: each is a test of its own. preamble: run before them, and before the program in its process: what the
    problem itself defines. setup: run before them, behind the program, which it may use. entry_point: what `candidate`
    is in the tests, such as `f` or `Solution().f`.
    """

    sources: tuple[str, ...]
    preamble: str = ""
    setup: str = ""
    entry_point: str | None = None

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> "Assertions":
        """From {"test": code, "entry_point": optional}, or {"test_list": [code, ...]}; both may have a `prompt`.

        `test` may define `check(candidate)`, functions `test_...`, or assert at once (HumanEval, KodCode, LeetCode).
        `test_list` may have `test_setup_code` or `test_imports` (MBPP).

        Raises:
            ValueError: anything else, or code with a syntax error.
        """
        if "test" in value:
            sources = [_code(value["test"], "test")]
        else:
            listed = value["test_list"]
            listed = json.loads(listed) if isinstance(listed, str) else listed
            if not isinstance(listed, list) or not listed:
                raise ValueError("test_list must be a list of asserts, and not empty")
            sources = [_code(each, "test_list") for each in listed]
        entry_point = value.get("entry_point")
        if entry_point is not None and not isinstance(entry_point, str):
            raise ValueError(f"entry_point={entry_point!r} is not the name of a function")
        defined = [node.name for node in ast.parse(sources[0]).body if isinstance(node, ast.FunctionDef)]
        if entry_point is not None and "check" in defined:
            sources = [f"{source}\n\ncheck(candidate)" for source in sources]
        imports = value.get("test_imports") or []
        setup = _code(value.get("test_setup_code") or "", "test_setup_code")
        lines = list(imports) if isinstance(imports, list) else [imports]
        body = ast.parse(setup).body  # of which the imports at the top run before the program too
        lines += [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        prompt = value.get("prompt")
        program = prompt if isinstance(prompt, str) and is_program(prompt) else ""  # such as HumanEval's
        preamble = "\n".join([program, *(_code(line, "test_imports") for line in lines)])
        return cls(tuple(sources), preamble.strip("\n"), setup, entry_point)

    def job(self, at_most: int | None, stop: bool) -> dict[str, Any]:
        """As `Sandbox.check` takes it."""
        given = {"preamble": self.preamble, "setup": self.setup, "entry_point": self.entry_point}
        return given | {"tests": list(self.sources[:at_most]), "all": stop}


def _code(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column}: Python code is text, this is {value!r:.80}")
    try:
        tree = ast.parse(value)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{column}: {error}: {value!r:.80}") from None
    if column not in MAY_PASS and not any(isinstance(node, CAN_FAIL) for node in ast.walk(tree)):
        raise ValueError(f"{column}: nothing in it can fail, so every program would pass: {value!r:.80}")
    return value


def is_program(text: str) -> bool:
    """Whether all of a text is Python that does something: `print(1)` is, a word or a number is not."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    defining = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign
    return any(isinstance(node, defining | ast.Call | ast.For | ast.While) for node in ast.walk(tree))


def failures(run: Run, total: int) -> list[str]:
    """For each test: empty where it passed, else why not; those without a verdict have failed."""
    said = [str(json.loads(line)) for line in run.value.splitlines()][:total]
    why = run.status if run.status != "finished" else "the tests ended early"
    return said + [why] * (total - len(said))
