"""Tests of assertions as Python code: forms, values that cross processes, cheating programs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.example import Completion, Example
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import LEVELS, Sandbox, unavailable_reason
from envs.verifiers.assertion_tests import Assertions
from envs.verifiers.code import CodeOptions, code_reward, run_tests
from tests.envs.sandbox_helpers import NEEDS_LINUX

pytestmark = NEEDS_LINUX
GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "code_tests.json"


@pytest.fixture(scope="module", params=[level for level in LEVELS if unavailable_reason(level) is None])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(request.param, Limits(wall_seconds=10.0, cpu_seconds=1)) as made:
        yield made


def count_passed(sandbox: Sandbox, program: str, credit: str = "all", **row: Any) -> int:
    return run_tests(sandbox, program, Assertions.parse(row), CodeOptions(credit=credit), 10.0).num_passed


TOTAL = {
    "prompt": 'def base(): return 1\n\ndef total(xs):\n    """The sum of xs and base()."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3 + base()\n    assert total([]) == 1\n",
}
RIGHT = "def total(xs):\n    return sum(xs) + base()"


@pytest.mark.parametrize(
    ("program", "row"),
    [
        (RIGHT, TOTAL),
        ("from __future__ import annotations\n" + RIGHT, TOTAL),
        ("def f(x): return x * 2", {"test_list": ["assert f(2) == 4", "assert f('a') == 'aa'"]}),
        ("def f(x): return x * 2", {"test_list": json.dumps(["assert f(2) == 4"])}),
        ("def f(x): return x ** 0.5", {"test_list": ["assert f(2) == math.sqrt(2)"], "test_imports": ["import math"]}),
        ("def f(x): return x", {"test": """
from solution import f

def test_f():
    assert f((1, {2: [3]})) == (1, {2: [3]})
"""}),
        ("""
class Solution:
    def f(self, x): return -x
""", {"test": """
def check(candidate):
    assert candidate(x=2) == -2
""", "entry_point": "Solution().f"}),
        ("def f(xs): xs.sort()", {"test_list": ["xs = [2, 1]\nys = xs\nassert f(xs) is None\nassert ys == [1, 2]"]}),
        ("def f(node):\n    node.next, node.value = Node(7), 9\n    return node",
         {"prompt": "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n",
          "test_list": ["""
a = Node(1)
b = f(a)
assert b is a and a.value == 9 and type(b.next) is Node and b.next.value == 7
"""]}),
    ],
)  # fmt: skip
def test_a_right_program_passes(sandbox: Sandbox, program: str, row: dict[str, Any]) -> None:
    assert count_passed(sandbox, program, **row) == len(Assertions.parse(row).sources)


CHEATS = {
    "exit": "import os\ndef total(xs): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "system exit": "def total(xs): exit(0)",
    "quit": "quit()",
    "equal to all": """
class All:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def total(xs): return All()
""",
    "a number equal to all": """
class All(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def total(xs): return All(0)
""",
    "a list equal to all": "class All(list):\n    def __eq__(self, other): return True\ndef total(xs): return All()",
    "hook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef total(xs): return None",
    "at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef total(xs): return None",
    "no assertions": "import builtins\nbuiltins.AssertionError = ValueError\ndef total(xs): return None",
    "own helpers": "def base(): return -3\ndef total(xs): return 0",
    "own check": "def check(candidate): pass\ndef total(xs): return 0",
    "own comparison": "import operator\noperator.eq = lambda a, b: True\ndef total(xs): return 0",
    "frames": """
import sys
def total(xs):
    frame = sys._getframe()
    while frame:
        frame.f_globals['check'] = lambda c: None
        frame = frame.f_back
""",
    "printed": "def total(xs):\n    print('\\\"\\\"')\n    print('PASSED')",
    "a line for each test": r"""
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'\"\"\n')
    except OSError:
        pass
def total(xs): return None
""",
    "raises what tests expect": "def total(xs): raise AssertionError",
    "hashes": """
class All:
    def __hash__(self): return hash(3)
    def __eq__(self, other): return True
def total(xs): return All()
""",
    "kill": "import os, signal\ndef total(xs):\n    os.kill(os.getppid(), signal.SIGKILL)",
    "the tests' memory": """
import gc
def total(xs):
    for each in gc.get_objects():
        if isinstance(each, dict) and 'test' in each:
            return 4
    return 0
""",
}  # fmt: skip


def test_a_program_that_cheats_fails(sandbox: Sandbox) -> None:
    for name, program in CHEATS.items():
        assert count_passed(sandbox, program, **TOTAL) == 0, name
    assert count_passed(sandbox, RIGHT, **TOTAL) == 1  # the sandbox is none the worse


def test_a_share_of_the_tests_counts(sandbox: Sandbox) -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 3", "assert f(3) == 3"]
    assert count_passed(sandbox, "def f(x): return x", "share", test_list=tests) == 2
    assert count_passed(sandbox, "def f(x): return x", "all", test_list=tests) == 1
    assert (
        count_passed(sandbox, "import os\ndef f(x): return x if x < 3 else os._exit(0)", "share", test_list=tests) == 1
    )


@pytest.mark.parametrize(("row", "message"), [
    ({"test": "assert ("}, "test: '(' was never closed"),
    ({"test": 3}, "test: Python code must be text, but is 3"),
    ({"test_list": []}, "test_list must be a non-empty list of asserts"),
    ({"test_list": ["assert f()", 2]}, "test_list: Python code must be text, but is 2"),
    ({"test": "assert f()", "entry_point": 4}, "entry_point=4 is not the name of a function"),
    ({"test": "import f"}, "test: no statement of the code can fail, so every program would pass: 'import f'"),
])  # fmt: skip
def test_rows_that_cannot_be_used_say_why(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        Assertions.parse(row)


@pytest.mark.parametrize("text", [f"```python\n{RIGHT}\n```", RIGHT])
def test_the_reward_takes_a_program_with_and_without_a_fence(text: str) -> None:
    example = Example(({"role": "user", "content": "?"},), TOTAL, 0)
    assert code_reward(Completion(text), example, EnvConfig(dataset="code")).score == 1.0


@pytest.mark.long
@pytest.mark.skipif(not GOLDEN.exists(), reason="the recorded programs are not here")
def test_recorded_programs_are_judged_as_recorded() -> None:
    recorded = json.loads(GOLDEN.read_text())
    wrong_programs = []
    with Sandbox("auto", Limits(wall_seconds=10.0, cpu_seconds=1)) as sandbox:
        for task in recorded["tasks"]:
            human = task["kind"] == "humaneval"
            row = task if human else {key: task[key] for key in ("test_list", "test_setup_code")}
            for key, right in (("canonical_solution", True), ("wrong_solution", False)):
                program = (task["prompt"] if human else "") + task[key]
                if (count_passed(sandbox, program, **row) == len(Assertions.parse(row).sources)) != right:
                    wrong_programs.append((task["task_id"], key))
        by_name = {task["task_id"]: task for task in (*recorded["tasks"], *recorded["hack_tasks"])}
        for hack in recorded["hacks"]:
            task = by_name[hack["task_id"]]
            if count_passed(sandbox, task["prompt"] + hack["solution"], **task):
                wrong_programs.append((hack["name"], hack["task_id"]))
    assert wrong_programs == []


PYTEST = """
import pytest
from solution import half, Held

@pytest.fixture
def two():
    yield 2

@pytest.fixture()
def four(two): return 2 * two

@pytest.mark.parametrize("given, wanted", [(2, 1), pytest.param(3, 1.5, id="odd")])
@pytest.mark.timeout(5)
def test_values(given, wanted, four):
    assert half(given) == pytest.approx(wanted) and four == 4

@pytest.mark.slow
def test_raises():
    with pytest.raises(ValueError, match="no number") as caught:
        half("x")
    assert caught.type is ValueError
    pytest.raises((TypeError, KeyError), half, None)

def test_left_out():
    pytest.skip("not here")

class TestHeld:
    def setup_method(self): self.held = Held(3)
    def test_value(self): assert self.held.value == 3
    @pytest.mark.parametrize("by", [1, 2])
    def test_grown(self, by): assert self.held.grown(by) == 3 + by
"""
UNITTEST = """
import unittest
from solution import half

class Halves(unittest.TestCase):
    def setUp(self): self.two = 2
    def test_half(self): self.assertEqual(half(self.two), 1)
    def test_raises(self):
        with self.assertRaises(ValueError): half("x")

if __name__ == "__main__":
    unittest.main()
"""
HALF = """
def half(x):
    if isinstance(x, str): raise ValueError("no number")
    return x / 2

class Held:
    def __init__(self, value): self.value = value
    def grown(self, by): return self.value + by
"""


def test_tests_of_pytest_and_unittest_are_run(sandbox: Sandbox) -> None:
    for test in (PYTEST, UNITTEST):
        assert run_tests(sandbox, HALF, Assertions.parse({"test": test}), CodeOptions(), 10.0).failure == ""


@pytest.mark.parametrize(("test", "wrong_program"), [
    (PYTEST, HALF.replace("x / 2", "x / 2.1")), (PYTEST, HALF.replace("x / 2", "x // 2")),
    (PYTEST, HALF.replace("no number", "what?")), (PYTEST, HALF.replace("raise ValueError", "print")),
    (PYTEST, HALF.replace("raise ValueError", "raise KeyError")),
    (PYTEST, HALF.replace("self.value = value", "self.value = 4")),
    (PYTEST, HALF.replace("self.value + by", "3 + 1")), (UNITTEST, HALF.replace("x / 2", "2")),
    (UNITTEST, HALF.replace("raise ValueError", "print")),
])  # fmt: skip
def test_each_test_of_pytest_and_unittest_can_fail(sandbox: Sandbox, test: str, wrong_program: str) -> None:
    assert run_tests(sandbox, wrong_program, Assertions.parse({"test": test}), CodeOptions(), 10.0).num_passed == 0
