"""Tests every data file: reference answers score 1, and reference answers plus 1 score 0."""

from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from envs.reward_workers.task_scorer import make_scorer
from envs.task import Completion, Example, Task, make_task
from tests.punkt import OWN_PUNKT, use_punkt

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / ".." / "shared" / "data"
FIXTURE = ROOT / "tests" / "fixtures" / "data" / "gsm8k.jsonl"
MAX_FORMULAS = 150
"""Number of formulas of a file that are changed by 1, since each comparison is slow."""
FILES = [
    ("gsm8k", FIXTURE, "#### {}", 2),
    ("gsm8k", SHARED / "gsm8k" / "train.jsonl", "#### {}", 7473),
    ("gsm8k", SHARED / "gsm8k" / "test.jsonl", "#### {}", 1319),
    ("math", SHARED / "math_train.json", "\\boxed{{{}}}", 7470),
    ("dapo_math", SHARED / "dapo_math_1500.jsonl", "Answer: {}", 1500),
    ("aime", SHARED / "aime2024.jsonl", "\\boxed{{{}}}", 30),
    ("ifeval", SHARED / "ifeval.jsonl", "{}", 541),
    ("code", SHARED / "code_contests_80.jsonl", "{}", 80),
]


def load_task(dataset: str, file: Path) -> Task:
    """Loads the task of a data file, or skips the test without the file."""
    if not file.is_file():
        pytest.skip(f"{file.name} is not on this machine")
    return make_task(EnvConfig(dataset=dataset, data_files=str(file)))


@pytest.mark.parametrize(("dataset", "file", "form", "count"), FILES[:6])
def test_reference_answers_score_one_and_others_zero(dataset: str, file: Path, form: str, count: int) -> None:
    task = load_task(dataset, file)
    examples = task.examples("train")
    score = make_scorer(task)
    assert len(examples) == count
    rejected_rows = [e.row for e in examples if score(Completion(form.format(e.answer)), e).score != 1.0]
    assert rejected_rows == []
    integer_examples = [example for example in examples if has_integer_answer(example)]
    formulas = [example for example in examples if not has_integer_answer(example)]
    tried_examples = integer_examples + formulas[:: max(1, len(formulas) // MAX_FORMULAS)]
    accepted_rows = [
        e.row
        for e in tried_examples
        if score(Completion(form.format(answer_plus_one(e))), e).components["accuracy"] != 0.0
    ]
    assert accepted_rows == []


def has_integer_answer(example: Example) -> bool:
    """Whether the reference answer is an integer."""
    return bool(example.answer.replace(",", "").lstrip("-").isdigit())


def answer_plus_one(example: Example) -> str:
    """Returns the reference answer plus 1."""
    return str(int(example.answer.replace(",", "")) + 1) if has_integer_answer(example) else f"{example.answer}+1"


@pytest.mark.parametrize(("dataset", "file", "form", "count"), FILES[6:])
def test_files_without_final_answers_load_completely(
    dataset: str, file: Path, form: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_punkt(OWN_PUNKT, tmp_path, monkeypatch)
    examples = load_task(dataset, file).examples("train")
    assert len(examples) == count
    assert all(example.messages[-1]["content"].strip() for example in examples)
