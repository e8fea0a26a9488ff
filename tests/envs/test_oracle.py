"""Every data file as a user would name it: its own golds score 1, the golds plus 1 nothing, and splits are disjoint."""

from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from envs.judging.judge import make_judge
from envs.task import Completion, Example, Task, make_task
from tests.punkt import OWN_PUNKT, use_punkt

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / ".." / "shared" / "data"
FIXTURE = ROOT / "tests" / "fixtures" / "data" / "gsm8k.jsonl"
FORMULAS_TRIED = 150
"""A gold plus 1 that is a formula costs some ten milliseconds; so many of a file are tried."""
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


def load(dataset: str, file: Path) -> Task:
    if not file.is_file():
        pytest.skip(f"{file.name} is not on this machine")
    return make_task(EnvConfig(dataset=dataset, data_files=str(file)))


@pytest.mark.parametrize(("dataset", "file", "form", "count"), FILES[:6])
def test_gold_scores_one_and_gold_plus_one_nothing(dataset: str, file: Path, form: str, count: int) -> None:
    task = load(dataset, file)
    examples = task.examples("train")
    judge = make_judge(task)
    assert len(examples) == count
    refused = [e.row for e in examples if judge(Completion(form.format(e.answer)), e).score != 1.0]
    assert refused == []
    whole = [example for example in examples if is_whole(example)]
    formulas = [example for example in examples if not is_whole(example)]
    tried = whole + formulas[:: max(1, len(formulas) // FORMULAS_TRIED)]
    accepted = [
        e.row for e in tried if judge(Completion(form.format(plus_one(e))), e).parts["accuracy"] != 0.0
    ]
    assert accepted == []


def is_whole(example: Example) -> bool:
    return bool(example.answer.replace(",", "").lstrip("-").isdigit())


def plus_one(example: Example) -> str:
    return str(int(example.answer.replace(",", "")) + 1) if is_whole(example) else f"{example.answer}+1"


@pytest.mark.parametrize(("dataset", "file", "form", "count"), FILES[6:])
def test_files_without_golds_load_whole(
    dataset: str, file: Path, form: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_punkt(OWN_PUNKT, tmp_path, monkeypatch)
    examples = load(dataset, file).examples("train")
    assert len(examples) == count
    assert all(example.messages[-1]["content"].strip() for example in examples)
