"""Environment `debugging`: a function with a bug, and the failing test as reply."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from config.schema.env import EnvConfig
from envs.environments.interface import Example, Message, Step
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import ProgramResult
from envs.sandbox.sandbox_pool import SandboxPool
from envs.sandbox.sandbox_selection import ProgramRunner
from envs.verifiers.code import extract_code
from envs.verifiers.outputs import same_value

PROGRAMS = Path(__file__).with_name("debugging_programs.json")
MAX_REASON_CHARACTERS = 200
LIMITS = Limits(wall_seconds=2.0, cpu_seconds=2)
NO_CODE = "Reply with the whole function in a block that begins with ```python."


class Debugging:
    """Python functions to correct in several tries.

    The reward is 1 at the first try, and 0.3 less at each further try.
    The model's code runs in the sandbox; the expected results stay outside.
    """

    def __init__(self, env: EnvConfig, tries: int = 3) -> None:
        self.sandboxes = _sandbox_pool(os.getpid(), env.sandbox, env.sandbox_url)
        self.tries, self.turn = tries, 0

    def examples(self, split: str) -> list[dict[str, Any]]:
        """Returns every fifth bug for `test`, the others for `train`."""
        rows = []
        for task in json.loads(PROGRAMS.read_text(encoding="utf-8")):
            name, tests = task["name"], task["tests"]
            for right, wrong in task["bugs"]:
                program = task["program"].replace(right, wrong)
                prompt = f"This function has a bug:\n\n```python\n{program}```\n\nThis test fails:\n\n"
                prompt += f"{assertion(name, *tests[0])}\n\n{NO_CODE}"
                rows.append({"prompt": prompt, "answer": {"name": name, "tests": tests}})
        return [row for index, row in enumerate(rows) if (index % 5 == 4) == (split == "test")]

    def reset(self, example: Example) -> None:
        self.answer: dict[str, Any] = example.answer

    def step(self, turn: Message) -> Step:
        self.turn += 1
        code = extract_code(turn["content"])
        failure, share = NO_CODE, 0.0
        if code is not None:
            with self.sandboxes.sandbox() as sandbox:
                failure, share = run_tests(sandbox, code, **self.answer)
        if not failure:
            return Step(reward=1.0 - 0.3 * (self.turn - 1), components={"accuracy": 1.0})
        if self.turn == self.tries:
            return Step(reward=0.0, components={"accuracy": 0.0, "passed_tests": share})
        return Step(({"role": "user", "content": failure},), reward=0.0)


def run_tests(sandbox: ProgramRunner, code: str, name: str, tests: list[Any]) -> tuple[str, float]:
    """Runs a function on its tests.

    tests: pairs of arguments and expected result. Returns the first failure as text, empty without one, and the share
    of tests that passed.
    """
    failures = []
    for arguments, expected in tests:
        if reason := _failure_reason(sandbox.call_function(code, name, arguments), expected):
            failures.append(f"{assertion(name, arguments, expected)}\n{reason[:MAX_REASON_CHARACTERS]}")
    return failures[0] if failures else "", 1 - len(failures) / len(tests)


def _failure_reason(run: ProgramResult, expected: Any) -> str:
    """Returns why a test failed; empty if the test passed."""
    if not run.is_success:
        lines = run.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if run.status == "finished" and lines else str(run.status)
    try:
        value = json.loads(run.value)
    except (ValueError, RecursionError):  # the program ended early, or its result is no JSON
        return "There is no result."
    return "" if same_value(value, expected) else f"The result is {value!r:.{MAX_REASON_CHARACTERS}}."


def assertion(name: str, arguments: list[Any], expected: Any) -> str:
    """Returns a test as a line of Python."""
    return f"assert {name}({', '.join(map(repr, arguments))}) == {expected!r}"


@cache
def _sandbox_pool(pid: int, sandbox: str, sandbox_url: str | None) -> SandboxPool:
    """Returns the sandboxes of a process."""
    return SandboxPool(EnvConfig(sandbox=sandbox, sandbox_url=sandbox_url), LIMITS)


environment = Debugging
