"""Tests number parsing, answer extraction and answer comparison on tables and hostile texts."""

import gzip
import json
import multiprocessing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.schema.env import EnvConfig
from envs.task import Completion, Example
from envs.verifiers import extract
from envs.verifiers.equivalence import same_answer
from envs.verifiers.formula_size import is_bounded
from envs.verifiers.latex import canonical_text
from envs.verifiers.numbers import extract_final_number, is_simplified_number, parse_number, same_number
from envs.verifiers.rules import RULES
from envs.verifiers.units import split_unit

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared"
GOLDEN = SHARED / "golden" / "grading.jsonl.gz"
ENV = EnvConfig(dataset="math")
EXPECTED_MISSES = {
    "P0404": "an infinite sum is not evaluated: sums are bombs more often than answers",
    "M0183": "2/4 for 1/2 is not in lowest terms",
    "M0210": "\\sqrt{8} for 2\\sqrt{2} is not in lowest terms",
    "M0239": "5! for 120 is not worked out",
    "M0242": "2^{10} for 1024 is not worked out",
    "M0243": "|{-3}| for 3 is not worked out",
}
"""Recorded right answers that are not accepted, with the reason."""


@pytest.mark.parametrize(("text", "value"), [
    ("7", Fraction(7)), ("1,000", Fraction(1000)), ("-.5", Fraction(-1, 2)), ("+3.", Fraction(3)),
    ("3/6", Fraction(1, 2)), ("1 1/2", Fraction(3, 2)), ("-2\\frac{1}{3}", Fraction(-7, 3)),
    ("\\frac12", Fraction(1, 2)), ("-\\dfrac{3}{-4}", Fraction(3, 4)),
    *((text, None) for text in ("", "-", ".", "1,00", "1.2.3", "1e9", "3/0", "\\frac10", "٧", "７", "12 3")),
    ("9" * 401, None), ("inf", None), ("nan", None),
])  # fmt: skip
def test_numbers_are_exact(text: str, value: Fraction | None) -> None:
    assert parse_number(text) == value


def test_unreadable_numbers_are_never_the_same() -> None:
    assert not same_number("?", "?")
    assert not same_number("9999", "10,000")
    assert same_number("1,000", "1000.0")
    assert same_answer("(" * 500 + "7" + ")" * 500, "7")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18$", "18"),
        ("**#### 7**", "7"),
        ("####7", "7"),
        ("#### −5", "-5"),
        ("#### $1,234.50 dollars.", "1,234.50"),
        ("#### 50%", "50"),
        *((f"#### 1{mark}234", "1234") for mark in ("\\,", "\\!", "\\ ", "{,}", "\xa0", "\u2009", "\u202f")),
        ("#### 12{,}345{,}678 apples", "12345678"),
        ("#### 12 m/s", "12"),
        ("#### 8\n#### 7", "7"),
        ("<answer>\n 12 </answer>", "12"),
        ("<think>#### 8</think>#### 7", "7"),
        *(
            (text, None)
            for text in (
                *("#### 7 or 8", "#### 3:30", "#### 1.2.3", "#### ,", "#### -", "####", "#### 12 apples and 3 pears"),
                *("#### 9**9**9", "#### 12k", "#### 7 million", "#### 7x", "#### 3 4", "<think>#### 7", "", "7"),
                *("#### 7 dozen", "#### 3 pi", "#### seven"),
            )
        ),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert extract_final_number(text) == number


@pytest.mark.parametrize(("text", "contents"), [
    ("\\boxed{7}", "7"), ("\\boxed{7} then \\boxed{8}", "8"), ("\\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"), ("\\boxed {7}", "7"), ("\\boxed{}", ""), ("\\boxed{7", None),
    ("\\boxed{7} \\boxed{8", None), ("\\boxed 7", None), ("\\fbox{7}", None), ("7", None),
])  # fmt: skip
def test_boxes_match_their_braces(text: str, contents: str | None) -> None:
    assert extract.last_boxed(text) == contents


@pytest.mark.parametrize(("text", "answer"), [
    ("<think>a</think><answer>7</answer>", "7"), ("<think><answer>8</answer></think><answer>7</answer>", "7"),
    ("<think>\\boxed{8}</think>so \\boxed{7}", "7"), ("thoughts \\boxed{8}</think> \\boxed{7}", "7"),
    ("<think>\\boxed{7}", None), ("<answer>\\boxed{7}</answer>", "7"), ("#### 7", "7"), ("##### 7", None),
    ("Answer: 7\nAnswer: 8", "8"), ("Final answer:\n34", "34"), ("it follows that $x = 7$.", "x = 7"),
    ("\\(7\\)", "7"), ("seven", None), ("", None),
])  # fmt: skip
def test_the_final_answer_however_it_is_marked(text: str, answer: str | None) -> None:
    assert extract.find_marked_answer(text) == answer


@pytest.mark.parametrize(("text", "has_format"), [
    ("<think>a</think><answer>7</answer>", True), ("<think>a</think>\n<answer>7</answer>\n", True),
    ("<think>a</think><answer>7</answer> done", False), ("<think>a</think>7", False),
    ("<answer>7</answer><think>a</think>", False),
    ("<think>a</think><answer>7</answer><answer>7</answer>", False),
])  # fmt: skip
def test_think_answer_format(text: str, has_format: bool) -> None:
    assert extract.has_think_answer_format(text) is has_format


@pytest.mark.long
def test_default_grader_on_recorded_answers() -> None:
    """Checks that no wrong answer is accepted, and only the listed right ones are missed."""
    if not GOLDEN.is_file():
        pytest.skip("no ../shared/golden/grading.jsonl.gz")
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as lines:
        cases: dict[str, dict[str, Any]] = {case["case_id"]: case for case in map(json.loads, lines)}
    mathematics = [case for case in cases.values() if "countdown" not in case["tags"]]
    verdicts = {
        case["case_id"]: bool(RULES["math"].score(case["input"], case["gold"], ENV)["accuracy"])
        for case in mathematics
        if case["expected_correct"] is not None
    }
    wrong = [case["case_id"] for case in mathematics if case["expected_correct"] is False]
    right = [case["case_id"] for case in mathematics if case["expected_correct"] is True]
    assert not [case for case in wrong if verdicts[case]]
    assert {case for case in right if not verdicts[case]} == set(EXPECTED_MISSES)


EXPRESSIONS = {
    "tower": "9^{9^{9^9}}", "python tower": "9**9**9", "tower in a fraction": "9^{\\frac{9^{9}}{1}}",
    "symbolic tower": "x^{x^{x^{9}}}", "brackets": "(9^{3000})^{3000}", "factorial": "100000!",
    "factorials": "((((99999!)!)!)!)", "factorial to a factorial": "200!^{200!}",
    "sum": "\\sum_{k=1}^{10^{9}} \\frac{1}{k}", "binomial": "\\binom{10^9}{10^8}",
    "large binomial": "\\binom{1000000}{500000}", "expansion": "(x+1)^{1000}", "digits": "9" * 100_000,
    "open brackets": "(" * 50_000 + "7", "open braces": "{" * 100_000,
    "nested fractions": "\\frac{1}{" * 20_000, "nested roots": "\\sqrt{" * 3_000,
    "list": ",".join(["1"] * 50_000), "unions": "\\cup" * 20_000, "relations": "1<" * 40_000,
    "equations": "=" * 100_000, "matrix": "\\begin{pmatrix}" + "&".join(["1"] * 20_000) + "\\end{pmatrix}",
    "spaces": " " * 100_000, "words": "seven " * 20_000, "units": "7 " + "a/" * 40_000,
    "prose": "is " * 30_000, "fractions of characters": "½" * 50_000,
}  # fmt: skip
TEXTS = [
    "<think>" * 12_000, "<answer>" * 12_000, "<answer></answe" + "</answe" * 14_000, "\\boxed{" * 14_000,
    "####" * 25_000, "Answer:" * 15_000, "Answer: " + " " * 100_000, "$" * 100_000, "\\(" * 50_000,
]  # fmt: skip


def _score_bombs(verdicts: Any) -> None:
    """Scores hostile texts with every rule, and puts accepted ones into a queue."""
    marked = ("\\boxed{{{}}}", "<think>a</think><answer>{}</answer>", "Answer: {}", "#### {}")
    texts = TEXTS + [mark.format(expression) for mark in marked for expression in EXPRESSIONS.values()]
    for text in texts:
        for name, reference in (("math", "x^2+\\sqrt{2}"), *((name, "8") for name in RULES if name != "code")):
            if RULES[name].score(text, reference, ENV)["accuracy"]:
                verdicts.put((name, text[:60], reference))
    verdicts.put(None)


@pytest.mark.long
def test_bombs_end_and_score_nothing() -> None:
    """Checks that hostile texts are scored as wrong, in a process with a deadline."""
    context = multiprocessing.get_context("spawn")
    verdicts = context.Queue()
    process = context.Process(target=_score_bombs, args=(verdicts,), daemon=True)
    process.start()
    process.join(900)
    hung = process.is_alive()
    process.kill()
    assert not hung, "the process did not finish in time"
    assert process.exitcode == 0
    assert verdicts.get(timeout=600) is None


@pytest.mark.parametrize(
    "expression", ["9^{9^9}", "(2^{99})^{99}", "5000!", "n!!", "2^{10!}", "10^9!", "\\int x", "a" * 301, "x+1E9"]
)
def test_unbounded_formulas_are_rejected(expression: str) -> None:
    assert not is_bounded(expression)


@pytest.mark.parametrize("expression", ["2^{2008}-2", "e^{x^2}", "x^{12}+x^{11}+x^{10}", "20!", "2^{\\frac{1}{3}}"])
def test_bounded_formulas_are_accepted(expression: str) -> None:
    assert is_bounded(expression)


WRONG = st.sampled_from(["\\boxed{8}", "<think>a</think><answer>8</answer>", "Answer: 8", "#### 8", "8"])
PADDING = st.text(alphabet="ab 1\n.{}\\$", max_size=400)


@settings(max_examples=60, deadline=None)
@given(answer=WRONG, before=PADDING, name=st.sampled_from(["math", "boxed", "dapo", "gsm8k", "think_answer_tags"]))
def test_a_wrong_answer_is_never_better_for_being_longer(answer: str, before: str, name: str) -> None:
    rule = RULES[name]
    example = Example((), "7000", 0)
    short, long = (rule.reward(Completion(text), example, ENV).score for text in (answer, before + answer))
    assert long <= short


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_reading_never_fails_and_an_answer_is_itself(text: str) -> None:
    spelled = canonical_text(text)
    assert same_answer(text, text) == bool(spelled) or "\\boxed" in text
    split_unit(spelled)
    extract.find_marked_answer(text)
    extract_final_number(text)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(1, 9999))
def test_numbers_in_every_spelling(top: int, bottom: int) -> None:
    assert same_answer(f"{top:,}", str(top))
    assert same_answer(f"{top}.0", f"\\${top}")
    assert not same_answer(str(top + 1), str(top))
    low = Fraction(top, bottom)
    assert same_answer(f"\\frac{{{low.numerator}}}{{{low.denominator}}}", f"{top}/{bottom}") == (
        low.denominator > 1 or bottom == 1 or not is_simplified_number(f"{top}/{bottom}")
    )
    assert not same_answer(f"\\frac{{{3 * top}}}{{{3 * bottom}}}", str(low))


def test_judging_numbers_imports_no_sympy() -> None:
    code = (
        "import sys; from envs.verifiers.equivalence import same_answer; "
        "assert same_answer('1,000', '1000') and not same_answer('1/3', '0.33') and not same_answer('(1,2)', '(1,3)'); "
        "sys.exit('sympy' in sys.modules)"
    )
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=900).returncode == 0
