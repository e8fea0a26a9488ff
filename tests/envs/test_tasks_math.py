"""Tests of tasks of mathematics, instructions and puzzles: rows, references, duplicates, rewards."""

import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.duplicates import distinct_examples, resolve_duplicates
from envs.task import Completion, Example, Task, make_task
from tests.log_capture import LogCapture

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "data"


def task(dataset: str, file: Path | None = None, **settings: Any) -> Task:
    return make_task(EnvConfig(dataset=dataset, data_files=str(file) if file else None, **settings))


def accuracy(judge: Task, example: Example, text: str) -> float:
    return judge.reward(Completion(text), example).components["accuracy"]


def test_math_reads_answers_and_solutions_and_reports_rows_without(log_capture: LogCapture) -> None:
    judge = task("math", FIXTURES / "math.jsonl")
    examples = judge.examples("train")
    assert [example.answer for example in examples] == ["\\frac{3}{2}", "2\\sqrt{2}", "\\text{east}"]
    assert "1 rows have no answer" in log_capture.text
    assert "math.jsonl:4" in log_capture.text
    assert "\\boxed" in examples[0].messages[0]["content"]
    for example, text in zip(examples, ("\\boxed{1.5}", "$2\\sqrt2$", "\\boxed{East}"), strict=True):
        assert accuracy(judge, example, text) == 1.0
        assert accuracy(judge, example, "\\boxed{west}") == 0.0
    assert accuracy(judge, examples[1], "$\\sqrt{8}$") == 0.0, "the problem says: simplify \\sqrt{8}"


def test_dapo_cuts_the_published_instructions_from_the_prompt() -> None:
    examples = task("dapo_math", FIXTURES / "dapo_math.jsonl").examples("train")
    assert [example.messages[-1]["content"] for example in examples[:2]] == ["What is 30 + 4?"] * 2
    assert [example.answer for example in examples] == ["34", "34", "4", "5", "2"]


@pytest.mark.parametrize(("mode", "rows"), [("keep", [0, 1, 2, 3, 4]), ("first", [0, 2, 4]), ("drop", [0, 4])])
def test_duplicates_are_reported_and_handled(mode: str, rows: list[int], log_capture: LogCapture) -> None:
    judge = task("dapo_math", FIXTURES / "dapo_math.jsonl", duplicates=mode)
    assert [example.row for example in distinct_examples(judge, "train")] == rows
    assert (
        "5 rows, 2 of them repeat a prompt; 1 prompts have contradictory answers (for example rows 2 and 3"
        in log_capture.text
    )
    assert f"{len(rows)} are used" in log_capture.text


def test_a_missing_problem_column_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "1+1=", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no column 'problem' \(columns: answer, text\)"):
        task("math", rows).examples("train")


def test_equal_references_in_other_notations_are_no_contradiction() -> None:
    examples = [
        Example(({"role": "user", "content": "x"},), reference, row)
        for row, reference in enumerate(("1,000", "1000", "\\frac12"))
    ]
    _, report = resolve_duplicates(examples[:2], "drop")
    assert (report.num_repeated, report.num_contradictory, report.first_contradiction) == (1, 0, None)
    kept, report = resolve_duplicates(examples, "drop")
    assert (kept, report.num_contradictory, report.first_contradiction) == ([], 1, (0, 2))


def test_conversations_are_equal_if_all_messages_are_equal() -> None:
    last = {"role": "user", "content": "and?"}
    heads = ("Add.", "Subtract.", "Add. ")
    examples = [Example(({"role": "system", "content": head}, last), str(row), row) for row, head in enumerate(heads)]
    kept, report = resolve_duplicates(examples, "first")
    assert [example.row for example in kept] == [0, 1]
    assert (report.num_repeated, report.num_contradictory, report.first_contradiction) == (1, 1, (0, 2))


def test_duplicates_of_any_task_are_handled(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    cases = [{"inputs": ["1"], "outputs": [out]} for out in ("1", "2")]
    rows: list[dict[str, Any]] = [{"prompt": "a", "answer": "1"}] * 2
    rows += [{"prompt": "b", "answer": "2"}]
    rows += [{"messages": [{"role": "user", "content": "c"}], "test_cases": case} for case in cases]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = {
        mode: [e.row for e in distinct_examples(task("jsonl", file, duplicates=mode), "train")]
        for mode in ("keep", "first", "drop")
    }
    assert found == {"keep": [0, 1, 2, 3, 4], "first": [0, 2, 3], "drop": [0, 2]}


def test_aime_references_are_whole_numbers_and_each_problem_counts_once() -> None:
    examples = distinct_examples(task("aime", FIXTURES / "aime.jsonl"), "test")
    assert [(example.answer, example.row) for example in examples] == [("336", 0), ("73", 1)]


@pytest.mark.parametrize("answer", ["1000", "12.5", "", None, "-3", "\\frac12"])
def test_aime_refuses_other_references(answer: Any, tmp_path: Path) -> None:
    file = tmp_path / "aime.jsonl"
    file.write_text(json.dumps({"problem": "x", "answer": answer}))
    with pytest.raises(ConfigError, match=r"aime.jsonl:1: an answer of AIME must be a whole number from 0 to 999"):
        task("aime", file).examples("test")


NAME_SEVERAL = r"name=composite: datasets.*\[\{name: GENERATOR, weight: NUMBER"
GYM = {"name": "leg_counting", "num_rows": 60}


@pytest.mark.parametrize(("dataset", "options", "split", "message"), [
    ("aime", {"year": 2020}, "test", r"env.options.year=2020: choose one of 2024, 2025"),
    ("aime", {"yaer": 2024}, "test", r"env.options.yaer"),
    ("math", {}, "dev", r"env.split='dev': math has only the splits train, test"),
    ("ifeval", {"verdict": "soft"}, "train", r"env.options.verdict='soft'.*verdict: strict, loose"),
    ("reasoning_gym", GYM | {"name": "nothing"}, "train", r"env.options.name='nothing': not a generator.*leg_counting"),
    ("reasoning_gym", GYM | {"no_such": 1}, "train", r"name=leg_counting: .*no_such"),
    ("reasoning_gym", GYM, "dev", r"env.split='dev'"),
    *(
        ("reasoning_gym", {"name": "composite", "num_rows": 60, "datasets": datasets}, "train", NAME_SEVERAL)
        for datasets in (None, [], ["sudoku"], [{"name": "no such"}], [{"name": "sudoku", "wieght": 1}])
    ),
])  # fmt: skip
def test_a_task_refuses_options(dataset: str, options: dict[str, Any], split: str, message: str) -> None:
    if dataset == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        task(dataset, options=options).examples(split)


def test_bad_math_rows_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "x", "answer": "1"}\n{"problem": 3, "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: column 'problem' must be a non-empty text"):
        task("math", file).examples("train")
    file.write_text('{"prompt": "x", "reward_model": {"style": "rule"}}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no 'reward_model.ground_truth': .* has no 'gr"):
        task("dapo_math", file).examples("train")


def test_ifeval_rewards_shares_or_all() -> None:
    pytest.importorskip("langdetect")
    file = FIXTURES / "ifeval.jsonl"
    judge = task("ifeval", file)
    first, second = judge.examples("train")
    assert judge.reward(Completion("hello you there"), first).score == 1.0
    half = judge.reward(Completion("hello there"), first)
    assert (half.score, half.components["accuracy"], half.components["instructions"]) == (0.5, 0.0, 0.5)
    assert judge.reward(Completion("{}"), second).score == 1.0
    assert judge.reward(Completion(""), first).score == 0.0
    strict = task("ifeval", file, options={"credit": "all"})
    assert strict.reward(Completion("hello there"), first).score == 0.0
    fenced = Completion("Sure:\n{}")
    assert judge.reward(fenced, second).components["loose"] == 1.0
    assert judge.reward(fenced, second).score == 0.0
    loose = task("ifeval", file, options={"verdict": "loose", "credit": "all"})
    assert loose.reward(fenced, second).score == 1.0


def puzzles(**options: Any) -> Task:
    pytest.importorskip("reasoning_gym")
    return task("reasoning_gym", options=GYM | options)


@pytest.mark.parametrize("name", ["leg_counting", "sudoku"])
def test_reasoning_gym_oracle(name: str) -> None:
    judge = puzzles(name=name, num_rows=20)
    for example in pickle.loads(pickle.dumps(judge.examples("train"))):
        answer = example.answer["answer"]
        assert accuracy(judge, example, f"<think>a</think><answer>{answer}</answer>") == 1.0
        assert judge.reward(Completion(f"<think>{answer}</think>"), example).score == 0.0
        assert accuracy(judge, example, "<answer>nonsense</answer>") < 0.5


def test_an_answer_on_which_a_scorer_without_a_solution_fails_is_invalid() -> None:
    puzzle_task = puzzles(name="boxnet", num_rows=3)
    for row in puzzle_task.examples("train"):
        assert puzzle_task.reward(Completion("<answer>[0]</answer>"), row).outcome == "invalid"


def test_reasoning_gym_samples_from_several_generators() -> None:
    several = [{"name": "leg_counting", "weight": 3}, {"name": "coin_flip"}]
    several += [{"name": "sudoku", "config": {"min_empty": 30}}]
    puzzle_task = puzzles(name="composite", num_rows=40, datasets=several)
    generators = set()
    for row in puzzle_task.examples("train"):
        generators.add(row.answer["metadata"]["source_dataset"])
        answer = row.answer["answer"]
        assert puzzle_task.reward(Completion(f"<answer>{answer}</answer>"), row).score == 1.0
        if row.answer["metadata"]["source_dataset"] == "coin_flip":
            assert puzzle_task.reward(Completion("<answer>0</answer>"), row).score < 1.0
    assert generators == {"leg_counting", "coin_flip", "sudoku"}


def test_reasoning_gym_splits_are_disjoint_and_seeded() -> None:
    train, test = (puzzles().examples(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (60, 6)
    assert not {example.answer["question"] for example in train} & {example.answer["question"] for example in test}
    assert [e.messages for e in puzzles().examples("train")] == [e.messages for e in train]
    assert [e.messages for e in puzzles(seed=1).examples("train")] != [e.messages for e in train]


def test_a_scorer_has_the_options_of_its_generator() -> None:
    from reasoning_gym import get_score_answer_fn

    puzzle_task = puzzles(name="decimal_arithmetic", num_rows=5, max_num_decimal_places=8)
    by_default = get_score_answer_fn("decimal_arithmetic")
    for row in puzzle_task.examples("train"):
        right = Decimal(row.answer["answer"])
        off = str(right + Decimal("0.0005"))
        assert by_default(off, row.answer) == 1.0
        assert [accuracy(puzzle_task, row, f"<answer>{text}</answer>") for text in (right, off)] == [1.0, 0.0]


def test_a_scorer_that_fails_on_an_answer_makes_it_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = puzzles()
    example = judge.examples("train")[0]

    def scorer(answer: str, entry: dict[str, Any]) -> float:
        if answer == "bad":
            raise RuntimeError("scorer")
        return float(answer == entry["answer"])

    monkeypatch.setattr("envs.tasks.reasoning_gym._scorer", lambda generator, settings: scorer)
    assert judge.reward(Completion("<answer>bad</answer>"), example).outcome == "invalid"
    broken = Example(example.messages, {**example.answer, "answer": "bad"}, 0)
    with pytest.raises(RuntimeError, match="scorer"):
        judge.reward(Completion("<answer>bad</answer>"), broken)
