"""Tests of the rules that guard unsafe and too lenient scorers of reasoning-gym."""

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.task import Completion, Example, Task, make_task
from tests.envs.puzzle_solutions import correct_answer

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")

WrongAnswer = Callable[[dict[str, Any]], str]


OPTIONS: dict[str, dict[str, Any]] = {
    "coin_flip": {"num_rows": 40},
    "figlet_font": {"min_word_len": 11, "max_word_len": 12},
}
"""Options of generators whose scorer is too lenient in few rows at the defaults."""


@cache
def puzzles(name: str, rows: int = 10) -> tuple[Task, list[Example]]:
    options = {"name": name, "num_rows": rows, **OPTIONS.get(name, {})}
    task = make_task(EnvConfig(dataset="reasoning_gym", options=options))
    return task, list(task.examples("train"))


def score(task: Task, example: Example, text: str) -> float:
    return task.reward(Completion(f"<think>so</think><answer>{text}</answer>"), example).score


EVALUATED_PUZZLES = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
)


@pytest.mark.parametrize("name", EVALUATED_PUZZLES)
def test_no_answer_is_run_as_a_program(name: str, tmp_path: Path) -> None:
    from reasoning_gym import get_score_answer_fn

    task, rows = puzzles(name)
    trace = tmp_path / "trace"
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    get_score_answer_fn(name)(code, rows[0].answer)
    assert trace.exists()  # the library's scorer runs the code
    trace.unlink()
    for text in (
        code, f"[{code}]", f"1 + {code}", f"sqrt({code})", f"sqrt(x=1, y={code})", f"({code}, 1)[1]",
    ):  # fmt: skip
        assert score(task, rows[0], text) == 0.0
        assert not trace.exists()


@pytest.mark.parametrize("name", EVALUATED_PUZZLES)
def test_names_of_the_scorers_variables_are_no_answer(name: str) -> None:
    task, rows = puzzles(name)
    for text in ("oracle_answer", "[oracle_answer]", "entry", "valid_solutions[0]", "self", "9**9**9**9"):
        assert score(task, rows[0], text) <= 0.05  # the score of the scorers for any expression


def other_numbers(entry: dict[str, Any]) -> str:
    return "4*6*1*1" if sorted(entry["metadata"]["numbers"]) != [1, 1, 4, 6] else "8*3*1*1"


def beyond_the_exit(entry: dict[str, Any]) -> str:
    return f"{correct_answer(entry)} A+9"


def off_by(amount: float) -> WrongAnswer:
    def wrong(entry: dict[str, Any]) -> str:
        values = [float(value) for value in json.loads(entry["answer"].replace("'", '"'))]
        return json.dumps([str(value + amount) for value in values])

    return wrong


WRONG_ANSWERS: dict[str, tuple[WrongAnswer, ...]] = {
    "advanced_geometry": (lambda entry: entry["answer"] + ", 3",),
    "coin_flip": (lambda entry: "0", lambda entry: "0.", lambda entry: entry["answer"][:3]),
    "complex_arithmetic": (lambda entry: "nan",),
    "figlet_font": (lambda entry: entry["answer"] + "x",),
    "fraction_simplification": (lambda entry: entry["answer"] + " or $1/2$",),
    "game_of_life": (lambda entry: json.dumps([*json.loads(entry["answer"]), [1]]),),
    "game_of_life_halting": (lambda entry: "perhaps",),
    "gsm_symbolic": (
        lambda entry: f"-{entry['answer']}",
        lambda entry: f"{entry['answer']} or {float(entry['answer']) + 2}",
        lambda entry: f"{entry['answer']}, {float(entry['answer']) + 1}",
    ),
    "intermediate_integration": (
        lambda entry: f"Integral({entry['metadata']['integrand']}, {entry['metadata']['variable']})",
        lambda entry: f"{entry['answer']} or 1",
    ),
    "letter_jumble": (lambda entry: entry["answer"] + " and more",),
    "number_format": (lambda entry: str(float(entry["answer"].replace(",", "")) + 0.005),),
    "number_sorting": (off_by(0.9), off_by(-0.1)),
    "polynomial_equations": (lambda entry: entry["answer"] + ", none",),
    "polynomial_multiplication": (lambda entry: f"{entry['answer']} or 1",),
    "simple_integration": (lambda entry: f"{entry['answer']} or 1",),
    "puzzle24": (other_numbers, lambda entry: "24 + 0*1*1", lambda entry: "(7*7 - 1/2)/2 + 1/7"),
    "quantum_lock": (lambda entry: "Press " + entry["answer"],),
    "rush_hour": (beyond_the_exit,),
    "sokoban": (lambda entry: entry["answer"] + " or not",),
    "spell_backward": (lambda entry: entry["answer"] + "x",),
    "time_intervals": (lambda entry: entry["answer"] + " or so",),
    "word_sorting": (lambda entry: entry["answer"] + ", zebra",),
}
"""By generator, wrong answers with the full score of the library's scorer in some rows."""


@pytest.mark.parametrize("name", sorted(WRONG_ANSWERS))
def test_a_wrong_answer_has_no_full_score(name: str) -> None:
    from reasoning_gym import get_score_answer_fn

    task, rows = puzzles(name)
    scorer = get_score_answer_fn(name)
    num_scorer_errors = 0
    for wrong in WRONG_ANSWERS[name]:
        for row in rows:
            text = wrong(row.answer)
            if text == row.answer["answer"]:
                continue
            num_scorer_errors += float(scorer(text, row.answer)) >= 1.0
            assert score(task, row, text) < 1.0, text
    assert num_scorer_errors > 0


def test_countdown_is_reached_exactly() -> None:
    from reasoning_gym import get_score_answer_fn

    task, (row, *_) = puzzles("countdown")
    entry = {**row.answer, "metadata": {**row.answer["metadata"], "numbers": [1000, 1001], "target": 1001001}}
    assert get_score_answer_fn("countdown")("1000*1001", entry) == 1.0
    near = Example(row.messages, entry, row.row)
    assert score(task, near, "1000*1001") == 0.0
    exact = {**entry, "metadata": {**entry["metadata"], "target": 1001000}}
    assert score(task, Example(row.messages, exact, row.row), "1000*1001") == 1.0


@pytest.mark.parametrize("name", sorted({*WRONG_ANSWERS, *EVALUATED_PUZZLES}))
def test_the_correct_answer_has_the_full_score(name: str) -> None:
    task, rows = puzzles(name)
    for row in rows:
        assert score(task, row, correct_answer(row.answer)) >= 1.0, row.answer["answer"]


@pytest.mark.parametrize(
    ("name", "text"), [("gsm_symbolic", "{} eggs, that is {}"), ("word_sorting", " {} "), ("letter_jumble", "  {}")]
)
def test_words_around_the_right_answer_may_stay(name: str, text: str) -> None:
    task, rows = puzzles(name)
    for row in rows:
        assert score(task, row, text.replace("{}", row.answer["answer"])) >= 1.0
