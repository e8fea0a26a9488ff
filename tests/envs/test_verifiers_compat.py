"""Graders named after a system give that system's recorded verdicts.

`../shared/golden/grading.jsonl.gz` holds the outputs of the systems' own functions; a dozen of them, retyped here,
cover the same code without it.
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
from envs.verifiers.compat_normalize import minerva
from envs.verifiers.compat_rewards import REWARDS

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden" / "grading.jsonl.gz"
Case = dict[str, Any]
GRADERS: dict[str, Any] = {**vars(compat_text), **vars(compat), "verl_dapo_normalize": minerva}
"""Every grader, and every step of one that was recorded, by the name of its system and function."""

SLOW = 3
"""Of graders on math-verify with its default extraction every third row is run: some 20 ms each."""
NOT_REPRODUCED = {
    "reward_score.prime_math.compute_score": "verl's fourth grader (data sources numina_*): a normaliser and a "
    "comparison in sympy of its own, whose rules for units, tuples and percent are not written down anywhere but there"
}
DIFFERENT = {("reward_fn.boxed_math_reward_fn (boxed)", "G0111"): "the recording left out empty responses"}


def on_text(name: str) -> Callable[[Case], Any]:
    return lambda case: GRADERS[name](case["input"])


def on_gold(name: str) -> Callable[[Case], Any]:
    return lambda case: GRADERS[name](case["gold"])


def on_both(name: str, *parameters: str) -> Callable[[Case], Any]:
    return lambda case: GRADERS[name](
        case["input"], case["gold"], **{key: case["params"][key] for key in parameters}
    )


def coati(name: str) -> Callable[[Case], Any]:
    """One character is one token; the limits were recorded relative to the length."""
    limits = {"len+1000": 1000, "len+50": 50, "len (over length)": 0}

    def grade(case: Case) -> Any:
        given, length = case["params"], len(case["input"])
        return GRADERS[name](
            case["input"],
            case["gold"],
            length=length,
            max_new_tokens=length + limits[given["max_new_tokens"]],
            cache_length=given.get("cache_length", 0),
            soft_over_length_punishment=given.get("soft_over_length_punishment", False),
        )

    return grade


def countdown(name: str, number: Callable[[str], float]) -> Callable[[Case], Any]:
    def grade(case: Case) -> Any:
        found = re.fullmatch(r"target=([-\d.]+), numbers=([\d,]+)", case["gold"])
        assert found is not None
        return GRADERS[name](case["input"], number(found[1]), [int(each) for each in found[2].split(",")])

    return grade


def openai(case: Case) -> Any:
    verdict = GRADERS["openai_gsm8k"](case["input"], case["gold"])
    return "gold_unparseable" if verdict is None else verdict


def trl(case: Case) -> Any:
    gold = case["gold"] if case["params"]["solution"] == "raw gold" else f"${case['gold']}$"
    return GRADERS["trl_accuracy"](case["input"], gold)


def math_verify(case: Case) -> Any:
    """One of its two recordings has the parsed expressions beside the verdict."""
    in_dollars = not isinstance(case["output"], dict)
    verdict = GRADERS["math_verify"](case["input"], case["gold"], in_dollars)
    return verdict if in_dollars else {**case["output"], "verify": verdict}


GRADER_OF: dict[str, tuple[Callable[[Case], Any], int]] = {
    "tasks.gsm8k.extract_answer": (on_text("nanochat_answer"), 1),
    "tasks.gsm8k.GSM8K.evaluate": (on_both("nanochat_gsm8k"), 1),
    "dataset.is_correct": (openai, 1),
    "reward_score.gsm8k.extract_solution": (
        lambda case: GRADERS["verl_gsm8k_answer"](case["input"], case["params"]["method"]), 1,
    ),
    "reward_score.gsm8k.compute_score": (on_both("verl_gsm8k", "method"), 1),
    "reward_score.math_dapo.normalize_final_answer": (on_gold("verl_dapo_normalize"), 1),
    "reward_score.math_dapo.compute_score": (on_both("verl_dapo", "strict_box_verify"), 1),
    "reward_score.math_reward.compute_score": (on_both("verl_math"), 1),
    "reward_score.math_verify.compute_score": (on_both("verl_math_verify"), SLOW),
    "GSM8KRewardParser.normalize_answer": (on_gold("torchrl_number"), 1),
    "GSM8KRewardParser extract_tags+_single_correctness_reward": (on_both("torchrl_gsm8k", "format_reward"), 1),
    "MATHRewardParser.extract_boxed": (on_text("torchrl_boxed"), 1),
    "MATHRewardParser extract_tags+_single_correctness_reward": (on_both("torchrl_math", "format_reward"), 1),
    "CountdownRewardParser extract_tags+_parse_ground_truth+_single_correctness_reward": (
        countdown("torchrl_countdown", lambda text: int(float(text))), 1,
    ),
    "reward_utils.extract_solution": (on_text("coati_solution"), 1),
    "reward_utils.extract_boxed_solution": (on_text("coati_boxed_solution"), 1),
    "reward_utils.validate_response_structure": (on_text("coati_structure"), 1),
    "reward_fn.verify_math_representation": (on_both("coati_equal"), 1),
    "reward_fn.math_reward_fn (think_answer_tags)": (coati("coati_think_answer_tags"), 1),
    "reward_fn.boxed_math_reward_fn (boxed)": (coati("coati_boxed"), 1),
    "examples.rl.environments.math.MathAgent.compute_score": (
        on_both("megatron_math", "finish_reason", "format_reward", "negative_reward", "partial_end_reward"),
        1,
    ),
    "examples.rl.environments.countdown.compute_score": (countdown("megatron_countdown", float), 1),
    "rewards.accuracy_reward": (trl, SLOW),
    "rewards.reasoning_accuracy_reward": (on_both("trl_reasoning_accuracy"), 1),
    "rewards.think_format_reward": (on_text("trl_think_format"), 1),
    "verify(parse(gold), parse(output))": (math_verify, SLOW),
    'verify(parse("$"+gold+"$"), parse(output))': (math_verify, SLOW),
}  # fmt: skip


def recorded() -> list[Case]:
    if not GOLDEN.is_file():
        return []
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as lines:
        return [case for case in map(json.loads, lines) if case["comparable"]]


def same(got: Any, want: Any) -> bool:
    """Long texts were recorded as length and beginning, TorchRL's floats in single precision."""
    if isinstance(want, dict) and set(want) >= {"str_len", "head"}:
        return isinstance(got, str) and len(got) == want["str_len"] and got.startswith(want["head"])
    if isinstance(want, dict):
        return (
            isinstance(got, dict)
            and got.keys() == want.keys()
            and all(same(got[key], want[key]) for key in want)
        )
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, int | float):
        return isinstance(got, int | float) and bool(got == pytest.approx(want, abs=1e-7))
    return bool(got == want)


@pytest.fixture(scope="module")
def golden() -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for case in recorded():
        cases.setdefault(case["function"], []).append(case)
    if not cases:
        pytest.skip("no ../shared/golden/grading.jsonl.gz")
    return cases


def test_every_recorded_grader_is_reproduced_or_listed_with_a_reason(golden: dict[str, list[Case]]) -> None:
    assert set(golden) - set(GRADER_OF) == set(NOT_REPRODUCED)


@pytest.mark.long
@pytest.mark.parametrize("function", sorted(GRADER_OF))
def test_recorded_verdicts(function: str, golden: dict[str, list[Case]]) -> None:
    grade, every = GRADER_OF[function]
    cases = golden[function][::every]
    wrong = [
        (case["case_id"], case["params"], case["output"], grade(case))
        for case in cases
        if (function, case["case_id"]) not in DIFFERENT and not same(grade(case), case["output"])
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:3]}"


TAGS = "<think>a</think><answer>{}</answer>"


@pytest.mark.parametrize(("text", "length", "expected"), [
    (TAGS.format(42), 75, [10.0, 1.0, 1.0]), (TAGS.format(42), 76, [9.6, 1.0, 1.0]),
    (TAGS.format(42), 99, [0.4, 1.0, 1.0]), (TAGS.format(42), 100, [0.0, 1.0, 1.0]),
    (TAGS.format(43), 99, [-9.6, 1.0, 0.0]), (TAGS.format(43), 100, [0.0, 1.0, 0.0]),
    (TAGS.format(42) + "\n", 10, [0.0, 0.0, 0.0]), (TAGS.format(42) + "\n", 99, [-9.6, 0.0, 0.0]),
    ("42", 99, [0.0, 0.0, 0.0]),
])  # fmt: skip
def test_coati_tags_with_soft_punishment(text: str, length: int, expected: list[float]) -> None:
    got = GRADERS["coati_think_answer_tags"](text, "42", length, 100, 25, True)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(("grader", "text", "gold", "expected"), [
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
def test_verdicts_without_the_recording(grader: str, text: str, gold: str, expected: Any) -> None:
    assert GRADERS[grader](text, gold) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("3*5+7", 1.0), ("7+3*5", 1.0), ("3*5", 0.1), ("3*5+7+0", 0.1), ("(3*5)+7", 1.0), ("3**5+7", 0.1)],
)
def test_countdown_graders(answer: str, expected: float) -> None:
    text = f"<answer>{answer}</answer>"
    assert GRADERS["megatron_countdown"](text, 22, [3, 5, 7]) == expected
    assert GRADERS["torchrl_countdown"](text, 22, [3, 5, 7])["reward"] == expected


BOXED = "\\boxed{42}"
ASKED_FOR = {
    **dict.fromkeys(("nanochat_gsm8k", "openai_gsm8k", "verl_gsm8k"), "#### 42"),
    **dict.fromkeys(("verl_math", "verl_math_verify", "trl_accuracy", "coati_boxed"), BOXED),
    **{name: TAGS.format(42) for name in ("torchrl_gsm8k", "torchrl_math", "coati_think_answer_tags")},
    "megatron_math": BOXED,
    "trl_reasoning_accuracy": f"<think>a</think>{BOXED}",
    "verl_dapo": "Answer: 42",
}
TOP = {"coati_boxed": 10.0, "coati_think_answer_tags": 10.0}


def rewarded(name: str, text: str, gold: Any, truncated: bool = False) -> tuple[float, dict[str, float]]:
    given = find_reward(f"compat_{name}").function(
        Completion(text, truncated=truncated), Example((), gold, 0), EnvConfig(dataset="x")
    )
    return given.score, given.parts


@pytest.mark.parametrize("name", sorted(ASKED_FOR))
def test_a_grader_is_a_reward_by_its_name(name: str) -> None:
    right, wrong = ASKED_FOR[name], ASKED_FOR[name].replace("42", "41")
    score, parts = rewarded(name, right, "42")
    assert (score, parts["accuracy"]) == (TOP.get(name, 1.0), 1.0)
    score, parts = rewarded(name, wrong, "42")
    assert score < TOP.get(name, 1.0) and parts["accuracy"] == 0.0
    assert rewarded(name, "", "42")[1]["accuracy"] == 0.0


def test_the_other_graders_are_rewards_too() -> None:
    gold = {"numbers": [3, 5, 7], "target": 22}
    for name in ("megatron_countdown", "torchrl_countdown"):
        assert rewarded(name, "<answer>3*5+7</answer>", gold)[0] == 1.0
        assert rewarded(name, "<answer>3+5+7</answer>", gold)[0] == 0.1
    assert rewarded("trl_think_format", "<think>a</think>b", None)[0] == 1.0
    assert {*ASKED_FOR, "megatron_countdown", "torchrl_countdown", "trl_think_format"} == set(REWARDS)


def test_what_was_cut_off_earns_nothing_where_the_system_says_so() -> None:
    for name in ("coati_boxed", "coati_think_answer_tags", "megatron_math"):
        assert rewarded(name, ASKED_FOR[name], "42", truncated=True)[0] == 0.0


def test_a_gold_that_a_grader_cannot_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the gold"):
        rewarded("openai_gsm8k", "#### 7", "\\frac12")


def test_the_gold_of_torchrl_may_stand_in_a_box() -> None:
    assert rewarded("torchrl_math", TAGS.format(7), "so it is \\boxed{7}")[0] == 1.0


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("\\boxed{8+3}", "11", 1.0),
        ("It is $1+x^2$.", "x^2+1", 1.0),
        ("It is $1+x^2$.", "so $x^2+1$", 1.0),
        ("\\boxed{2\\sqrt{2}}", "2\\sqrt2", 1.0),
        ("\\boxed{2}", "2\\sqrt2", 0.0),
        ("", "11", 0.0),
    ],
)
def test_math_verify_is_the_library_as_it_is(text: str, gold: str, right: float) -> None:
    verdict = find_reward("math_verify").function(
        Completion(text), Example((), gold, 0), EnvConfig(dataset="x")
    )
    assert (verdict.score, verdict.parts) == (right, {"accuracy": right})


def test_the_former_name_of_the_library_says_the_new_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^env\.reward='compat_math_verify' is called math_verify now: set env\."
    ):
        find_reward("compat_math_verify")
