"""Tests that the graders named after a system return that system's recorded verdicts.

`../shared/golden/grading.jsonl.gz` holds the outputs of the systems' own functions. A dozen of them, retyped
here, cover the same code without the file.
"""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.rewards import find_reward
from envs.task import Completion, Example
from envs.verifiers import compat, compat_text
from envs.verifiers.compat_normalize import normalize_minerva
from envs.verifiers.compat_rewards import REWARDS

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden" / "grading.jsonl.gz"
Case = dict[str, Any]
GRADERS: dict[str, Any] = {**vars(compat_text), **vars(compat), "verl_dapo_normalize": normalize_minerva}
"""Every grader, and every recorded step of one, by the name of its system and function."""

SLOW_STEP = 3
"""Step between the tested rows of graders with math-verify's default extraction, which is slow."""
NOT_REPRODUCED = {
    "reward_score.prime_math.compute_score": "verl's fourth grader (data sources numina_*): a normaliser and a "
    "comparison in sympy of its own, whose rules for units, tuples and percent are not written down anywhere but there"
}
"""Recorded graders that are not reproduced, with the reason."""
EXPECTED_DIFFERENCES = {("reward_fn.boxed_math_reward_fn (boxed)", "G0111"): "the recording left out empty responses"}
"""Recorded cases whose verdict differs, with the reason."""


def text_grader(name: str) -> Callable[[Case], Any]:
    """Returns a function that grades the text of a case."""
    return lambda case: GRADERS[name](case["input"])


def reference_grader(name: str) -> Callable[[Case], Any]:
    """Returns a function that grades the reference answer of a case."""
    return lambda case: GRADERS[name](case["gold"])


def pair_grader(name: str, *parameters: str) -> Callable[[Case], Any]:
    """Returns a function that grades the text and the reference answer of a case.

    parameters: recorded parameters that the grader takes.
    """
    return lambda case: GRADERS[name](case["input"], case["gold"], **{key: case["params"][key] for key in parameters})


def coati_grader(name: str) -> Callable[[Case], Any]:
    """Returns a function that grades a case with ColossalChat's length limits.

    One character is one token; the limits were recorded relative to the length.
    """
    limits = {"len+1000": 1000, "len+50": 50, "len (over length)": 0}

    def grade(case: Case) -> Any:
        params, length = case["params"], len(case["input"])
        return GRADERS[name](
            case["input"],
            case["gold"],
            length=length,
            max_new_tokens=length + limits[params["max_new_tokens"]],
            cache_length=params.get("cache_length", 0),
            soft_over_length_punishment=params.get("soft_over_length_punishment", False),
        )

    return grade


def countdown_grader(name: str, number: Callable[[str], float]) -> Callable[[Case], Any]:
    """Returns a function that grades a countdown case."""

    def grade(case: Case) -> Any:
        found = re.fullmatch(r"target=([-\d.]+), numbers=([\d,]+)", case["gold"])
        assert found is not None
        return GRADERS[name](case["input"], number(found[1]), [int(each) for each in found[2].split(",")])

    return grade


def grade_openai(case: Case) -> Any:
    """Grades a case by the rule of the GSM8K data set."""
    verdict = GRADERS["openai_gsm8k"](case["input"], case["gold"])
    return "gold_unparseable" if verdict is None else verdict


def grade_trl(case: Case) -> Any:
    """Grades a case by TRL's accuracy reward."""
    reference = case["gold"] if case["params"]["solution"] == "raw gold" else f"${case['gold']}$"
    return GRADERS["trl_accuracy"](case["input"], reference)


def grade_math_verify(case: Case) -> Any:
    """Grades a case by math-verify.

    One of the two recordings has the parsed expressions beside the verdict.
    """
    in_dollars = not isinstance(case["output"], dict)
    verdict = GRADERS["math_verify"](case["input"], case["gold"], in_dollars)
    return verdict if in_dollars else {**case["output"], "verify": verdict}


GRADER_OF: dict[str, tuple[Callable[[Case], Any], int]] = {
    "tasks.gsm8k.extract_answer": (text_grader("nanochat_answer"), 1),
    "tasks.gsm8k.GSM8K.evaluate": (pair_grader("nanochat_gsm8k"), 1),
    "dataset.is_correct": (grade_openai, 1),
    "reward_score.gsm8k.extract_solution": (
        lambda case: GRADERS["verl_gsm8k_answer"](case["input"], case["params"]["method"]), 1,
    ),
    "reward_score.gsm8k.compute_score": (pair_grader("verl_gsm8k", "method"), 1),
    "reward_score.math_dapo.normalize_final_answer": (reference_grader("verl_dapo_normalize"), 1),
    "reward_score.math_dapo.compute_score": (pair_grader("verl_dapo", "strict_box_verify"), 1),
    "reward_score.math_reward.compute_score": (pair_grader("verl_math"), 1),
    "reward_score.math_verify.compute_score": (pair_grader("verl_math_verify"), SLOW_STEP),
    "GSM8KRewardParser.normalize_answer": (reference_grader("torchrl_number"), 1),
    "GSM8KRewardParser extract_tags+_single_correctness_reward": (pair_grader("torchrl_gsm8k", "format_reward"), 1),
    "MATHRewardParser.extract_boxed": (text_grader("torchrl_boxed"), 1),
    "MATHRewardParser extract_tags+_single_correctness_reward": (pair_grader("torchrl_math", "format_reward"), 1),
    "CountdownRewardParser extract_tags+_parse_ground_truth+_single_correctness_reward": (
        countdown_grader("torchrl_countdown", lambda text: int(float(text))), 1,
    ),
    "reward_utils.extract_solution": (text_grader("coati_solution"), 1),
    "reward_utils.extract_boxed_solution": (text_grader("coati_boxed_solution"), 1),
    "reward_utils.validate_response_structure": (text_grader("coati_structure"), 1),
    "reward_fn.verify_math_representation": (pair_grader("coati_equal"), 1),
    "reward_fn.math_reward_fn (think_answer_tags)": (coati_grader("coati_think_answer_tags"), 1),
    "reward_fn.boxed_math_reward_fn (boxed)": (coati_grader("coati_boxed"), 1),
    "examples.rl.environments.math.MathAgent.compute_score": (
        pair_grader("megatron_math", "finish_reason", "format_reward", "negative_reward", "partial_end_reward"),
        1,
    ),
    "examples.rl.environments.countdown.compute_score": (countdown_grader("megatron_countdown", float), 1),
    "rewards.accuracy_reward": (grade_trl, SLOW_STEP),
    "rewards.reasoning_accuracy_reward": (pair_grader("trl_reasoning_accuracy"), 1),
    "rewards.think_format_reward": (text_grader("trl_think_format"), 1),
    "verify(parse(gold), parse(output))": (grade_math_verify, SLOW_STEP),
    'verify(parse("$"+gold+"$"), parse(output))': (grade_math_verify, SLOW_STEP),
}  # fmt: skip
"""Grader and step between the tested rows, by recorded function."""


def load_recorded_cases() -> list[Case]:
    """Returns the recorded cases that can be compared; an empty list without the file."""
    if not GOLDEN.is_file():
        return []
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as lines:
        return [case for case in map(json.loads, lines) if case["comparable"]]


def is_same_output(output: Any, expected: Any) -> bool:
    """Whether an output equals the recorded one.

    Long texts were recorded as length and beginning, TorchRL's floats in single precision.
    """
    if isinstance(expected, dict) and set(expected) >= {"str_len", "head"}:
        return isinstance(output, str) and len(output) == expected["str_len"] and output.startswith(expected["head"])
    if isinstance(expected, dict):
        return (
            isinstance(output, dict)
            and output.keys() == expected.keys()
            and all(is_same_output(output[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list):
        return isinstance(output, list) and len(output) == len(expected) and all(map(is_same_output, output, expected))
    if isinstance(expected, int | float):
        return isinstance(output, int | float) and bool(output == pytest.approx(expected, abs=1e-7))
    return bool(output == expected)


@pytest.fixture(scope="module")
def golden() -> dict[str, list[Case]]:
    """Recorded cases by function; skips the test without the recording."""
    cases: dict[str, list[Case]] = {}
    for case in load_recorded_cases():
        cases.setdefault(case["function"], []).append(case)
    if not cases:
        pytest.skip("no ../shared/golden/grading.jsonl.gz")
    return cases


def test_every_recorded_grader_is_reproduced_or_listed_with_a_reason(golden: dict[str, list[Case]]) -> None:
    assert set(golden) - set(GRADER_OF) == set(NOT_REPRODUCED)


@pytest.mark.long
@pytest.mark.parametrize("function", sorted(GRADER_OF))
def test_recorded_verdicts(function: str, golden: dict[str, list[Case]]) -> None:
    grade, step = GRADER_OF[function]
    cases = golden[function][::step]
    wrong_cases = [
        (case["case_id"], case["params"], case["output"], grade(case))
        for case in cases
        if (function, case["case_id"]) not in EXPECTED_DIFFERENCES and not is_same_output(grade(case), case["output"])
    ]
    assert not wrong_cases, f"{len(wrong_cases)} of {len(cases)}: {wrong_cases[:3]}"


TAGS = "<think>a</think><answer>{}</answer>"


@pytest.mark.parametrize(("text", "length", "expected"), [
    (TAGS.format(42), 75, [10.0, 1.0, 1.0]), (TAGS.format(42), 76, [9.6, 1.0, 1.0]),
    (TAGS.format(42), 99, [0.4, 1.0, 1.0]), (TAGS.format(42), 100, [0.0, 1.0, 1.0]),
    (TAGS.format(43), 99, [-9.6, 1.0, 0.0]), (TAGS.format(43), 100, [0.0, 1.0, 0.0]),
    (TAGS.format(42) + "\n", 10, [0.0, 0.0, 0.0]), (TAGS.format(42) + "\n", 99, [-9.6, 0.0, 0.0]),
    ("42", 99, [0.0, 0.0, 0.0]),
])  # fmt: skip
def test_coati_tags_with_soft_punishment(text: str, length: int, expected: list[float]) -> None:
    output = GRADERS["coati_think_answer_tags"](text, "42", length, 100, 25, True)
    assert output == pytest.approx(expected)


@pytest.mark.parametrize(("grader", "text", "reference", "expected"), [
    ("nanochat_gsm8k", "#### 1,000", "1000", 1),
    ("nanochat_gsm8k", "#### 7\n#### 8", "8", 0),
    ("verl_gsm8k", "#### 7\n#### 8", "8", 1.0),
    ("openai_gsm8k", "#### 7", "\\frac12", None),
    ("verl_math", "\\boxed{\\dfrac12}", "\\frac{1}{2}", 1.0),
    ("verl_math", "\\boxed{1/2}", "0.5", 1.0),
    ("verl_dapo", "Answer: 34 km", "34", {"score": 1.0, "acc": True, "pred": "34"}),
    ("verl_dapo", "34", "34", {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
    ("megatron_math", "\\boxed{7}", "7", 1.0),
    ("megatron_math", "no box", "7", 0.0),
    ("trl_accuracy", "\\boxed{\\frac{2}{4}}", "$\\frac12$", 1.0),
    ("verl_math_verify", "\\boxed{\\sqrt{8}}", "2\\sqrt2", 1.0),
    ("math_verify", "$3+4i$", "$4i+3$", True),
])  # fmt: skip
def test_verdicts_without_the_recording(grader: str, text: str, reference: str, expected: Any) -> None:
    assert GRADERS[grader](text, reference) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("3*5+7", 1.0), ("7+3*5", 1.0), ("3*5", 0.1), ("3*5+7+0", 0.1), ("(3*5)+7", 1.0), ("3**5+7", 0.1)],
)
def test_countdown_graders(answer: str, expected: float) -> None:
    text = f"<answer>{answer}</answer>"
    assert GRADERS["megatron_countdown"](text, 22, [3, 5, 7]) == expected
    assert GRADERS["torchrl_countdown"](text, 22, [3, 5, 7])["reward"] == expected


BOXED_ANSWER = "\\boxed{42}"
RIGHT_ANSWERS = {
    **dict.fromkeys(("nanochat_gsm8k", "openai_gsm8k", "verl_gsm8k"), "#### 42"),
    **dict.fromkeys(("verl_math", "verl_math_verify", "trl_accuracy", "coati_boxed"), BOXED_ANSWER),
    **{name: TAGS.format(42) for name in ("torchrl_gsm8k", "torchrl_math", "coati_think_answer_tags")},
    "megatron_math": BOXED_ANSWER,
    "trl_reasoning_accuracy": f"<think>a</think>{BOXED_ANSWER}",
    "verl_dapo": "Answer: 42",
}
"""Completions that every grader scores as right for the reference answer 42."""
TOP_SCORES = {"coati_boxed": 10.0, "coati_think_answer_tags": 10.0}


def score_completion(name: str, text: str, reference: Any, truncated: bool = False) -> tuple[float, dict[str, float]]:
    """Returns score and components of a text under the reward of a grader."""
    params = find_reward(f"compat_{name}").function(
        Completion(text, truncated=truncated), Example((), reference, 0), EnvConfig(dataset="x")
    )
    return params.score, params.components


@pytest.mark.parametrize("name", sorted(RIGHT_ANSWERS))
def test_a_grader_is_a_reward_by_its_name(name: str) -> None:
    right, wrong_cases = RIGHT_ANSWERS[name], RIGHT_ANSWERS[name].replace("42", "41")
    score, parts = score_completion(name, right, "42")
    assert (score, parts["accuracy"]) == (TOP_SCORES.get(name, 1.0), 1.0)
    score, parts = score_completion(name, wrong_cases, "42")
    assert score < TOP_SCORES.get(name, 1.0) and parts["accuracy"] == 0.0
    assert score_completion(name, "", "42")[1]["accuracy"] == 0.0


def test_the_other_graders_are_rewards_too() -> None:
    reference = {"numbers": [3, 5, 7], "target": 22}
    for name in ("megatron_countdown", "torchrl_countdown"):
        assert score_completion(name, "<answer>3*5+7</answer>", reference)[0] == 1.0
        assert score_completion(name, "<answer>3+5+7</answer>", reference)[0] == 0.1
    assert score_completion("trl_think_format", "<think>a</think>b", None)[0] == 1.0
    assert {*RIGHT_ANSWERS, "megatron_countdown", "torchrl_countdown", "trl_think_format"} == set(REWARDS)


def test_truncated_completions_earn_nothing_in_systems_that_say_so() -> None:
    for name in ("coati_boxed", "coati_think_answer_tags", "megatron_math"):
        assert score_completion(name, RIGHT_ANSWERS[name], "42", truncated=True)[0] == 0.0


def test_an_unreadable_reference_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the row's reference answer"):
        score_completion("openai_gsm8k", "#### 7", "\\frac12")


def test_torchrl_reads_a_boxed_reference_answer() -> None:
    assert score_completion("torchrl_math", TAGS.format(7), "so it is \\boxed{7}")[0] == 1.0


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("\\boxed{8+3}", "11", 1.0),
        ("It is $1+x^2$.", "x^2+1", 1.0),
        ("It is $1+x^2$.", "so $x^2+1$", 1.0),
        ("\\boxed{2\\sqrt{2}}", "2\\sqrt2", 1.0),
        ("\\boxed{2}", "2\\sqrt2", 0.0),
        ("", "11", 0.0),
    ],
)
def test_math_verify_is_the_library_as_it_is(text: str, reference: str, right: float) -> None:
    verdict = find_reward("math_verify").function(Completion(text), Example((), reference, 0), EnvConfig(dataset="x"))
    assert (verdict.score, verdict.components) == (right, {"accuracy": right})


def test_the_former_reward_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^env\.reward='compat_math_verify': the reward is now called math_verify; set env\."
    ):
        find_reward("compat_math_verify")
