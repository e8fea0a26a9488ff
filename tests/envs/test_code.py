"""Tests the reward `code`: extraction, test verdicts, and programs that try to cheat."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.reward_workers.service import RewardService
from envs.rewards import find_reward
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import ProgramResult, Sandbox, SandboxError
from envs.task import Completion, Task, make_task
from envs.verifiers import code
from envs.verifiers.code import CodeOptions, CodeResult, Tests, extract_code, run_tests
from tests.envs.sandbox_helpers import NEEDS_LINUX

pytestmark = NEEDS_LINUX

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
FIXTURE = ROOT / "tests" / "fixtures" / "data" / "code.jsonl"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox("auto", Limits(wall_seconds=10.0, cpu_seconds=1)) as sandbox:
        yield sandbox


def fenced_text(program: str, language: str = "python") -> str:
    """Returns a completion with a program in a fenced block."""
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


def make_code_task(**fields: Any) -> Task:
    """Returns the task `code` with the rows of the fixture."""
    return make_task(EnvConfig(dataset="code", data_files=str(FIXTURE), **fields))


def score_program(task: Task, program: str, row: int) -> float:
    """Returns the score of a program on one row."""
    return task.reward(Completion(fenced_text(program)), task.examples("train")[row]).score


@pytest.mark.parametrize(("text", "expected"), [
    (fenced_text("print(1)"), "print(1)\n"), (fenced_text("print(0)") + fenced_text("print(1)"), "print(1)\n"),
    (fenced_text("print(1)", "Python"), "print(1)\n"),
    (fenced_text("print(1)", "py") + "```\noutput\n```", "print(1)\n"), ("```python\nprint(1)\n", "print(1)\n"),
    ("1. so:\n   ```python\n   pass\n   ```", "   pass\n"),
    (fenced_text("print('''```''')"), "print('''```''')\n"), (fenced_text("print(1)", "cpp"), None),
    ("```\nprint(1)\n```", None), ("```python\n```", None), ("print(1)", "print(1)"),
    ("def f(x):\n    return x\n", "def f(x):\n    return x\n"), ("Yes", None), ("12", None),
    ("The answer is f(x).", None), ("a ```python in a line", None), ("", None),
])  # fmt: skip
def test_the_last_python_block_is_the_program(text: str, expected: str | None) -> None:
    assert extract_code(text) == expected


def test_rows_of_every_form_are_read() -> None:
    examples = make_code_task().examples("train")
    assert [Tests.parse(example.answer).function for example in examples] == [
        None, "mean", None, "pairs", None,
    ]  # fmt: skip
    assert all(example.messages[0]["content"].startswith("Solve the programming") for example in examples)
    assert examples[4].answer == {"inputs": ["1\n", "2\n"], "outputs": ["3.141592653\n", "12.566370614\n"]}
    named = find_reward("code")
    assert named is not None and named.system_prompt == code.system_prompt("python")


RIGHT = [
    "print(sum(map(int, input().split())))",
    "def mean(numbers): return sum(numbers) / len(numbers)",
    "import sys\nprint(*reversed(sys.stdin.read().split()[1:]), sep='\\n')",
    "class Solution:\n    def pairs(self, xs, t):\n        n = len(xs)\n"
    "        return [(i, j) for i in range(n) for j in range(i + 1, n) if xs[i] + xs[j] == t]",
    "import math\nprint(math.pi * float(input()) ** 2)",
]
WRONG = [
    "print(sum(map(float, input().split())))",
    "def mean(numbers): return sum(numbers) // len(numbers)",
    "import sys\nprint(*reversed(sys.stdin.read().split()), sep='\\n')",
    "class Solution:\n    def pairs(self, xs, t): return [[0, 2]]",
    "print(3.14 * float(input()) ** 2)",
]


@pytest.mark.parametrize("row", range(len(RIGHT)))
def test_right_programs_score_one_and_wrong_ones_zero(row: int) -> None:
    assert score_program(make_code_task(), RIGHT[row], row) == 1.0
    assert score_program(make_code_task(), WRONG[row], row) == 0.0


SOLUTIONS = {
    "code_contests_test-28": """
for _ in range(int(input())):
    a, b, c = map(int, input().split())
    print((a + c) % 2)
""",
    "code_contests_test-51": "for _ in range(int(input())):\n    n = int(input())\n    print(1 - n, n)",
    "code_contests_test-26": """
import sys
ns = list(map(int, sys.stdin.read().split()))[1:]
value, answers = 1, {1: 1}
for i in range(3, 2 * max(ns) + 1):
    value = value * i % (10**9 + 7)
    answers[i / 2] = value
for n in ns:
    print(answers[n])
""",
}


def test_contest_solutions_pass_and_near_misses_fail() -> None:
    path = SHARED / "data" / "code_contests_80.jsonl"
    if not path.exists():
        pytest.skip("the shared data are not here")
    task = make_task(EnvConfig(dataset="code", data_files=str(path)))
    examples = task.examples("train")
    assert len(examples) == 80
    ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    for name, program in SOLUTIONS.items():
        example = examples[ids.index(name)]
        right = task.reward(Completion(fenced_text(program)), example)
        assert (right.score, right.components["tests"], right.outcome) == (1.0, 1.0, "scored"), name
        for near in (program.replace("print(", "print(1 + ", 1), "print(0)", "pass"):
            assert task.reward(Completion(fenced_text(near)), example).score == 0.0, name


ADDITION = Tests(("1 2\n", "10 -3\n"), ("3\n", "7\n"))
CHEATING_PROGRAMS = {
    "equality": "class E(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\nprint(E('zzz'))",
    "patched exit": "import sys, os\nsys.exit = os._exit = lambda *a: None\nprint('PASSED')",
    "exit 0": "import os; os._exit(0)",
    "raised exit": "raise SystemExit(0)",
    "closed stdout": "import os; os.close(1)",
    "right, then crashed": "print(sum(map(int, input().split())), flush=True); 1 / 0",
    "right, then killed": "import os\nprint(sum(map(int, input().split())), flush=True)\nos.abort()",
    "right, then more": "print(sum(map(int, input().split())))\nprint('correct')",
    "every answer": "print('3\\n7')",
    "forged result": "import os\nos.write(3, b'R3')\nos.write(3, b'3')",
    "forged answer": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b"\\0" * 36 + b"3")
    except OSError:
        pass
""",
    "the grader's frames": """
import sys
frame = sys._getframe()
while frame:
    print({name: value for name, value in frame.f_locals.items() if 'expect' in name or 'output' in name})
    frame = frame.f_back
""",
    "the grader's memory": "import gc\nprint([o for o in gc.get_objects() if o == '3\\n' or o == b'3\\n'])",
    "only the first": "print(3)",
    "silence": "",
}


@pytest.mark.parametrize("name", CHEATING_PROGRAMS)
def test_no_cheating_program_passes(sandbox: Sandbox, name: str) -> None:
    verdict = run_tests(sandbox, CHEATING_PROGRAMS[name], ADDITION, CodeOptions(credit="share"), 10.0)
    assert verdict.num_passed < verdict.num_tests
    assert run_tests(sandbox, RIGHT[0], ADDITION, CodeOptions(), 10.0).num_passed == 2


FORGED_RESULTS = [
    "import os\nos.write(3, b'3')\ndef add(a, b): return ''",
    "class E(int):\n    __eq__ = lambda s, o: True\ndef add(a, b): return E(4)",
    "import json\njson.dumps = lambda *a: 'true'\ndef add(a, b): return 0",
    "def add(a, b): raise SystemExit(0)", "def add(a, b):\n    import os\n    os._exit(0)",
    "def add(a, b): return [[]] * 10 ** 9",
    "def add(a, b):\n    r = []\n    for _ in range(10 ** 5): r = [r]\n    return r",
    "def add(a, b): return 10 ** 10 ** 5", "add = 3",
]  # fmt: skip


@pytest.mark.parametrize("program", FORGED_RESULTS)
def test_no_cheating_function_passes(sandbox: Sandbox, program: str) -> None:
    tests = Tests(([1, 2],), (3,), "add")
    assert run_tests(sandbox, program, tests, CodeOptions(), 10.0).num_passed == 0


def test_tests_end_at_the_first_failure_unless_their_share_counts(sandbox: Sandbox) -> None:
    program = "n = sum(map(int, input().split()))\nprint(n if n != 7 else 8)"
    tests = Tests(("1 2\n", "10 -3\n", "0 0\n"), ("3", "7", "0"))
    assert run_tests(sandbox, program, tests, CodeOptions(), 10.0) == CodeResult(1, 3, "wrong answer")
    assert run_tests(sandbox, program, tests, CodeOptions(credit="share"), 10.0) == CodeResult(2, 3, "wrong answer")
    endless = "while True: pass"
    assert run_tests(sandbox, endless, tests, CodeOptions(credit="share"), 2.0) == CodeResult(0, 3, "time")
    assert run_tests(sandbox, RIGHT[0], tests, CodeOptions(), 0.0) == CodeResult(0, 3, "no time left")
    assert run_tests(sandbox, program, tests, CodeOptions(max_tests=1), 10.0) == CodeResult(1, 1)
    share = make_code_task(options={"credit": "share"})
    assert score_program(share, "n = sum(map(int, input().split()))\nprint(n if n != 7 else 8)", 0) == 0.75


def test_wrapped_outputs_are_unwrapped_only_if_configured(sandbox: Sandbox) -> None:
    tests = Tests(([1, 2],), ([3],), "add")
    program = "def add(a, b): return a + b"
    assert run_tests(sandbox, program, tests, CodeOptions(), 10.0).num_passed == 0
    assert run_tests(sandbox, program, tests, CodeOptions(wrapped_outputs=True), 10.0).num_passed == 1


def test_outcomes() -> None:
    task = make_code_task()
    example = task.examples("train")[0]
    for text in ("The answer is to add.", "", fenced_text("print(3)", "java"), "<think>" + fenced_text(RIGHT[0])):
        verdict = task.reward(Completion(text), example)
        assert (verdict.score, verdict.outcome) == (0.0, "invalid")
    assert task.reward(Completion(f"<think>{fenced_text('1')}</think>{fenced_text(RIGHT[0])}"), example).score == 1.0
    assert task.reward(Completion(fenced_text("def f(:")), example).outcome == "scored"


def test_a_failing_sandbox_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ProgramResult:
        raise SandboxError("no memory for a process")

    monkeypatch.setattr(Sandbox, "run", fail)
    task = make_code_task()
    with pytest.raises(SandboxError):
        task.reward(Completion(fenced_text(RIGHT[0])), task.examples("train")[0])


def test_the_reward_service_judges_code() -> None:
    task = make_code_task(reward_workers=1, options={"test_seconds": 1}, reward_timeout_s=120.0)
    examples = task.examples("train")
    with closing(RewardService(task, task.env)) as service:
        texts = [
            fenced_text(RIGHT[0]), fenced_text("while True: pass"),
            fenced_text("import os\nos.kill(os.getppid(), 9)"), "?",
        ]  # fmt: skip
        scored = service.score([Completion(text) for text in texts], [examples[0]] * len(texts))
    assert [each.score for each in scored] == [1.0, 0.0, 0.0, 0.0]
    assert [each.outcome for each in scored] == ["scored", "scored", "scored", "invalid"]


@pytest.mark.parametrize(("options", "message"), [
    ({"tests": 3}, r"env\.options\.tests: no such option of the code task; choose one of test_seconds"),
    ({"test_seconds": 9}, r"env\.options\.test_seconds=9: must be above 0 and at most 8"),
    ({"memory_mib": 1}, r"env\.options\.memory_mib=1"),
    ({"credit": "some"}, r"env\.options\.credit='some': choose one of all, share"),
    ({"comparison": "loose"}, r"env\.options\.comparison='loose': choose one of default, coati"),
    ({"max_tests": 0}, r"env\.options\.max_tests=0: must be at least 1"),
])  # fmt: skip
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_code_task(options=options)


@pytest.mark.parametrize(("row", "message"), [
    ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
    ({"inputs": [1], "outputs": ["1"]}, "must be text"),
    ({"test_cases": [1]}, "tests must be"),
    ({"test_cases": "{"}, "not valid JSON"),
    ({"test_cases": {"inputs": [1], "outputs": [1], "fn_name": "f"}}, "lists of arguments"),
    ({"test_cases": {"inputs": [[1]], "outputs": [1], "fn_name": "os.system"}}, "not the name of a function"),
    ({"answer": "3"}, "tests must be"),
])  # fmt: skip
def test_wrong_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "p", **row}) + "\n")
    with pytest.raises(ConfigError, match=f"rows.jsonl:1.*{message}"):
        make_task(EnvConfig(dataset="code", data_files=str(path))).examples("train")


# Recorded verdicts that differ from ours, by case, with the reason.
DIFFERENCES = {
    "open0": "their standard input is a mock that open(0) does not see; ours is a real one",
    "class_solution_fn": "they take inputs as text only, one JSON argument a line; ours take lists too",
}


@pytest.mark.long
def test_recorded_verdicts_of_another_grader_are_reproduced() -> None:
    path = SHARED / "golden" / "code.json"
    if not path.exists():
        pytest.skip("the recorded verdicts are not here")
    rows = json.loads(path.read_text())
    found: dict[str, bool] = {}
    compared = 0
    with Sandbox("auto", Limits(wall_seconds=10.0, cpu_seconds=1)) as sandbox:
        for row in rows:
            options = CodeOptions(credit="share" if row["params"]["continuous"] else "all", comparison="coati")
            program = extract_code(row["completion"])
            tests = Tests.parse(row["test_cases"])
            verdict = run_tests(sandbox, program, tests, options, 20.0) if program else CodeResult(0, 1)
            ours = verdict.num_passed / verdict.num_tests
            if not row["params"]["continuous"]:
                # The grader raises UnboundLocalError for every wrong program, which its callers count as wrong.
                assert row["output"] is True or row["status"] == "exception"
                ours = float(ours == 1.0)
            theirs = float(row["output"]) if row["status"] == "ok" else 0.0
            if row["case"] in DIFFERENCES:
                found[row["case"]] = True
                assert (ours, theirs) == (1.0, 0.0), row["case"]
                assert row["expected_correct"] is True
            else:
                assert ours == pytest.approx(theirs), row["case"]
                compared += 1
    assert set(found) == set(DIFFERENCES)
    assert compared == len(rows) - 2 * len(DIFFERENCES)


@pytest.mark.long
def test_default_comparison_matches_known_verdicts() -> None:
    path = SHARED / "golden" / "code.json"
    if not path.exists():
        pytest.skip("the recorded verdicts are not here")
    rows = {row["case"]: row for row in json.loads(path.read_text()) if row["expected_correct"] is not None}
    with Sandbox("auto", Limits(wall_seconds=10.0, cpu_seconds=1)) as sandbox:
        for case, row in rows.items():
            program = extract_code(row["completion"])
            tests = Tests.parse(row["test_cases"])
            verdict = run_tests(sandbox, program, tests, CodeOptions(), 20.0) if program else CodeResult(0, 1)
            right = verdict.num_passed == verdict.num_tests
            assert right == row["expected_correct"], case
