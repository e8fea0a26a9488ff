"""Tests of the basic tasks: rows, prompts, rewards and errors."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Task, make_task
from envs.tasks.countdown import reaches

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "data"


def task(dataset: str, **options: object) -> Task:
    return make_task(EnvConfig(dataset=dataset, **options))


def score(judge: Task, text: str, row: int = 0) -> float:
    return judge.reward(Completion(text), judge.examples("train")[row]).score


def test_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'nothing': no such task; choose one of .*arithmetic.*gsm8k"):
        task("nothing")


def test_arithmetic_splits_are_disjoint_and_prompts_are_exact() -> None:
    judge = task("arithmetic", options={"max_operand": 9})
    train, test = ({example.row for example in judge.examples(split)} for split in ("train", "test"))
    assert not train & test
    assert train | test == set(range(100))
    example = judge.examples("train")[0]
    a, b = example.messages[-1]["content"].rstrip("=").split("+")
    assert example.answer == str(int(a) + int(b))
    assert judge.reward(Completion(example.answer), example).score == 1.0
    assert judge.reward(Completion(f"{example.answer}0"), example).score == 0.0


@pytest.mark.parametrize(("text", "expected"), [
    ("12 - 5 = 7\n#### 7", 1.0), ("#### 7.0", 1.0), ("#### 8", 0.1), ("#### 8\nno, wait\n#### 7", 1.0),
    ("<answer>7</answer>", 1.0), ("seven is 7", 0.0), ("", 0.0), ("#### seven", 0.0), ("#### -7", 0.1),
])  # fmt: skip
def test_gsm8k_rewards(text: str, expected: float) -> None:
    assert score(task("gsm8k", data_files=str(FIXTURES / "gsm8k.jsonl")), text) == expected


def test_gsm8k_thousands() -> None:
    judge = task("gsm8k", data_files=str(FIXTURES / "gsm8k.jsonl"))
    assert score(judge, "#### 1200", row=1) == 1.0
    assert score(judge, "#### $1,200", row=1) == 1.0
    assert score(judge, "#### 12,00", row=1) < 1.0


def test_every_countdown_puzzle_can_be_solved_and_splits_are_disjoint() -> None:
    judge = task("countdown", options={"num_rows": 300})
    keys = []
    for split in ("train", "test"):
        examples = judge.examples(split)
        assert len(examples) == 300
        assert [e.answer for e in examples] == [e.answer for e in judge.examples(split)]
        keys.append({(tuple(sorted(e.answer["numbers"])), e.answer["target"]) for e in examples})
        for example in examples[:40]:
            assert solvable([Fraction(n) for n in example.answer["numbers"]], example.answer["target"])
    assert not keys[0] & keys[1]


def solvable(numbers: list[Fraction], target: int) -> bool:
    if len(numbers) == 1:
        return numbers[0] == target
    for i in range(len(numbers)):
        for j in range(len(numbers)):
            if i == j:
                continue
            rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
            a, b = numbers[i], numbers[j]
            results = [a + b, a - b, a * b] + ([a / b] if b else [])
            if any(solvable([*rest, result], target) for result in results):
                return True
    return False


@pytest.mark.parametrize(("expression", "expected"), [
    ("(3+4)*5", True), ("5*(3 + 4)", True), ("35", False), ("3+4*5", False), ("(3+4)*5+0", False),
    ("(3+4)*5*1", False), ("__import__('os')", False), ("9**9**9", False), ("(3+4)/0*5", False),
    ("(" * 500, False), ("3+4)*5", False), ("-(-3-4)*5", False), ("", False), ("True", False),
])  # fmt: skip
def test_countdown_expressions(expression: str, expected: bool) -> None:
    assert reaches(expression, [3, 4, 5], 35) is expected


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_jsonl_formats(tmp_path: Path) -> None:
    user = {"role": "user", "content": "2+2?"}
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": "2+2?", "answer": 4},
        {"messages": user, "gt_answer": "4"},
        {"messages": [{"role": "system", "content": "Be brief."}, user], "answer": "blue"},
    )
    judge = task("jsonl", data_files=path, system_prompt="Add.")
    examples = judge.examples("train")
    assert [m["content"] for m in examples[0].messages] == ["Add.", "2+2?"]
    assert examples[1].messages == examples[0].messages
    assert examples[2].messages == examples[0].messages
    kept = task("jsonl", data_files=path).examples("train")
    assert [m["content"] for m in kept[2].messages] == ["Be brief.", "2+2?"]
    assert [score(judge, "#### 4.0", row) for row in range(3)] == [1.0, 1.0, 0.0]
    assert score(judge, "blue", 2) == 1.0


def test_a_missing_file_and_an_unreachable_hub_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"env\.data_files=nowhere\.jsonl: no such file"):
        task("jsonl", data_files="nowhere.jsonl").examples("train")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"openai/gsm8k.*could not be read from the hub.*env\.data_files="):
        task("gsm8k").examples("train")


def test_parquet_and_json_arrays_read_alike(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    both = [task("jsonl", data_files=str(tmp_path / name)).examples("train") for name in ("rows.parquet", "rows.json")]
    assert [e.answer for e in both[0]] == [e.answer for e in both[1]] == ["b", "d"]


def test_jsonl_answers_are_mathematics_and_test_cases_are_run(tmp_path: Path) -> None:
    user = {"role": "user", "content": "?"}
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"messages": [user], "gt_answer": "\\frac{1}{2}"},
        {"messages": user, "test_cases": {"inputs": ["1 2\n"], "outputs": ["3\n"]}},
    )
    judge = task("jsonl", data_files=path)
    assert [score(judge, text) for text in ("so \\boxed{0.5}", "\\boxed{0.51}", "1/2")] == [1.0, 0.0, 1.0]
    right, wrong = (f"```python\na, b = map(int, input().split())\nprint(a {sign} b)\n```" for sign in "+-")
    assert [score(judge, text, 1) for text in (right, wrong)] == [1.0, 0.0]


def test_only_jsonl_rows_with_tests_need_what_programs_need(tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "plain.jsonl", {"prompt": "?", "answer": "4"})
    quick = task("jsonl", data_files=plain, reward_timeout_s=3.0)
    quick.warm_up()
    assert len(quick.examples("train")) == 1
    cases = {"inputs": ["1"], "outputs": ["1"]}
    with_tests = write_rows(tmp_path / "tested.jsonl", {"prompt": "?", "test_cases": cases})
    with pytest.raises(ConfigError, match=r"test_seconds=4.0: must be above 0 and at most 2.4"):
        task("jsonl", data_files=with_tests, reward_timeout_s=3.0).examples("train")
