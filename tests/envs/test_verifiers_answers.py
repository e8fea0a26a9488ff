"""Tests right answers in every form, and near misses that must stay wrong.

A line of data/answers.jsonl has a reference answer, right answers and wrong answers.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.verifiers.equivalence import same_answer
from envs.verifiers.math_verify_reward import strictly_same_answer
from envs.verifiers.rules import RULES
from envs.verifiers.text_references import MAX_CHARACTERS, is_text_reference

ENV = EnvConfig(dataset="math")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
KINDS: dict[str, list[dict[str, Any]]] = defaultdict(list)
for line in (Path(__file__).parent / "data" / "answers.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
    KINDS[json.loads(line)["kind"]].append(json.loads(line))


def pairs(kind: str, verdict: str) -> list[tuple[str, str]]:
    """Returns the pairs of final answer and reference answer of one kind and verdict."""
    return [(final_answer, row["reference"]) for row in KINDS[kind] for final_answer in row.get(verdict, ())]


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_are_right_and_near_misses_are_not(kind: str) -> None:
    assert [pair for pair in pairs(kind, "right") if not same_answer(*pair)] == []
    assert [pair for pair in pairs(kind, "wrong") if same_answer(*pair)] == []


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_math_verify_accepts_no_near_miss(kind: str) -> None:
    assert [pair for pair in pairs(kind, "wrong") if strictly_same_answer(*pair)] == []


LONG_TEXT = "so far \\boxed{200} and more " * 3


@pytest.mark.parametrize(("text", "reference", "right"), [
    (LONG_TEXT + "Final Answer: The final answer is $10,455$. I hope it is correct.", "10455", True),
    (LONG_TEXT + "The final answer is 7. I hope it is correct.", "200", False),
    ("The final answer is 7. I hope it is correct. No: \\boxed{8}", "8", True),
    ("The final answer is 7. I hope it is correct. No: \\boxed{8}", "7", False),
    ("The final answer is 8+3. I hope it is correct.", "11", False),
    ("Answer\n\\[\n 9 \n\\]", "9", True),
    ("Answer: \n$$ 9 $$", "9", True),
    ("it is $8$, so $$\n9\n$$", "8", False),
    ("the roots are $\\boxed{2}$ and $\\boxed{3}$.", "2,3", True),
    ("<think>\\boxed{2}</think> \\boxed{3}", "2,3", False),
    ("<think>x</think><answer>\\boxed{2}, \\boxed{3}</answer>", "\\{3,2\\}", True),
    ("\\boxed{2}, " * 70 + "\\boxed{2}", "2", True),
    ("\\boxed{2}, " * 70 + "\\boxed{3}", "3", False),
])  # fmt: skip
def test_the_final_answer_is_found_where_it_stands(text: str, reference: str, right: bool) -> None:
    assert bool(RULES["math"].score(text, reference, ENV)["accuracy"]) is right


def test_the_first_table_of_the_docs_matches_same_answer() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| reference answer | also right | wrong |")[2].partition("\n\n")[0]
    rows = [[re.findall(r"`([^`]*)`", cell) for cell in line.split(" | ")] for line in table.splitlines()[2:]]
    assert len(rows) == 15
    for references, accepted_answers, rejected_answers in rows:
        for reference in references:
            assert [text for text in accepted_answers if not same_answer(text, reference)] == [], reference
            assert [text for text in rejected_answers if same_answer(text, reference)] == [], reference


def test_the_second_table_of_the_docs_matches_same_answer() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| number in the reference answer | right | wrong |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([^`]*)`|( \| )", line) for line in table.splitlines()[2:]]
    assert len(rows) == 9
    for cells in rows:
        reference, column = cells[0][0], 0
        for code, bar in cells[1:]:
            column += bool(bar)
            assert bar or same_answer(code, reference) is (column == 1), (code, reference)


def test_formulas_are_not_text_references() -> None:
    assert [row["reference"] for row in KINDS["formulas that stay"] if is_text_reference(row["reference"])] == []
    assert is_text_reference("1-" * 20 + "1")
    assert not is_text_reference("1-" * MAX_CHARACTERS + "1")


@pytest.mark.parametrize(("final_answer", "reference", "right"), [
    ("10-20", "10-20", True), ("-10", "10-20", False), ("2HO", "H2O", False), ("fg'+f'g", "f'g+fg'", True),
    ("gf+f'g", "f'g+fg'", False), ("3=x'", "x'=3", True), ("f'(x)=2x", "f(x)=2x", False),
    ("\\gcd(a',b)+1", "1+\\gcd(a,b)", False),
])  # fmt: skip
def test_math_verify_does_not_compare_texts(final_answer: str, reference: str, right: bool) -> None:
    assert strictly_same_answer(final_answer, reference) is right
