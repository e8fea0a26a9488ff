"""Reference answers as data sets write them: unwrapped, and each judged once."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.env import EnvConfig
from config.errors import ConfigError
from envs.task import Completion, make_task
from envs.verifiers.reference_answers import (
    FORMS,
    LONGEST_JUDGED,
    judging_rule,
    reference_answer,
    unwrapped,
)
from envs.verifiers.rules import RULES
from tests.logged import Logged


def written(path: Path, *golds: Any) -> str:
    rows = [{"prompt": f"{place}?", "answer": gold} for place, gold in enumerate(golds)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


WRAPPED = [
    ('["2"]', "2"),
    ("['2']", "2"),
    ('[ "\\\\frac{1}{2}" ]', "\\frac{1}{2}"),
    ('["The answer is 2."]', "2"),
    ("Natalia sold 48/2 = 24 clips.\n#### 72", "72"),
    ("48/2 = 24 #### 72 ", "72"),
    ("The answer is 2.", "2"),
    ("the answer is: 2", "2"),
    ("So the answer is 2", "2"),
    ("1+1 is 2. Therefore, the final answer is 2.", "2"),
    ("He has 1 and 1.\nThe answer is 2", "2"),
    ("**Answer:** 2", "2"),
    ("Answer: 2", "2"),
    ("Final answer: 2 apples", "2 apples"),
    ("The final answer is 2. I hope it is correct.", "2"),
    ("<answer>2</answer>", "2"),
    ("= 2", "2"),
    ("It is 2.", "2"),
    ("\\text{The answer is } 2", "2"),
    ("<think>1+1</think>\n<answer> 2 </answer>", "2"),
]
IN_LATEX = [
    ("$2$", "2"),
    ("$$x+1$$", "x+1"),
    ("\\(2\\)", "2"),
    ("\\[ 2 \\]", "2"),
    ("The final answer is $2$", "2"),
    ("\\boxed{2}", "2"),
    ("We add, so it is $\\boxed{2}$.", "2"),
    ("a=\\boxed{2} and b=\\boxed{3}", "2, 3"),
]
NOT_WRAPPED = [
    "2",
    "-1.5",
    "(1,2)",
    "[2]",
    "[1,2]",
    "[1, 2)",
    "['2', '3']",
    '["2","3"]',
    "$5-$10",
    "$2$ or $3$",
    "\\(2\\) or \\(3\\)",
    "\\$5",
    "The answer",
    "the wrong answer is 3",
    "The answer is 2. No, it is 3 after all.",
    "#### ",
    "A # B",
    "<answer>2",
    "\\boxed{2",
    "[[2]]",
    '["2"',
    "x = 2",
    "= 2 = 3",
    "It is raining",
    "\\text{yes}",
    "a question and an answer",
    "May 17, 2024",
]


@pytest.mark.parametrize(("text", "inner"), WRAPPED + IN_LATEX)
def test_a_wrapped_answer_is_unwrapped(text: str, inner: str) -> None:
    assert unwrapped(text) == inner


@pytest.mark.parametrize("text", NOT_WRAPPED)
def test_any_other_text_stays(text: str) -> None:
    assert unwrapped(text) == text.strip()
    assert unwrapped(text, keep_latex=True) == text.strip()


@pytest.mark.parametrize("rule", ["math", "boxed", "dapo", "think_answer_tags"])
@pytest.mark.parametrize(("text", "inner"), WRAPPED + IN_LATEX)
def test_the_final_answer_equals_the_wrapped_one(text: str, inner: str, rule: str) -> None:
    env = EnvConfig(dataset="jsonl", reward=rule)
    gold = reference_answer(text, env)
    assert RULES[rule].judge(FORMS[rule].format(inner), gold, env)["accuracy"] == 1.0


def test_an_answer_that_the_rule_reads_as_it_is_stays() -> None:
    maths = EnvConfig(dataset="jsonl")
    for text in ("$2$", "$3-2$", "\\boxed{2}", "it is \\boxed{2}", '["2","3"]', "$5-$10"):
        assert reference_answer(text, maths) == text
    texts = EnvConfig(dataset="jsonl", reward="exact")
    for text in ("The answer is 2.", '["2"]', "a cat"):
        assert reference_answer(text, texts) == text
    assert reference_answer("$x$", texts) == "x"
    assert reference_answer("$2$", EnvConfig(dataset="jsonl", reward="gsm8k")) == "2"


def test_a_list_in_the_row() -> None:
    maths = EnvConfig(dataset="jsonl")
    assert reference_answer(["2"], maths) == "2"
    assert reference_answer([2], maths) == 2
    for value in (["2", "3"], [], [["2"]], [True], [None], 2, 2.5, None, {"a": 1}):
        assert reference_answer(value, maths) == value


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "math"),
        ({"reward": "gsm8k"}, "gsm8k"),
        ({"reward": "strict_math_verify"}, "math"),
        ({"reward": ["exact", "math"]}, "exact"),
        ({"reward": "my_rewards:brief"}, None),
        ({"reward": ["exact", "my_rewards:brief"]}, None),
        ({"reward": "math_verify"}, None),
        ({"reward": "compat_openai_gsm8k"}, None),
        ({"reward": "code"}, None),
        ({"reward_second_opinion": "my_rewards:brief"}, None),
        ({"reward_second_opinion": "strict_math_verify"}, "math"),
        ({"dataset": "my_tasks:Mine"}, None),
    ],
)
def test_the_rule_that_judges(settings: dict[str, Any], rule: str | None) -> None:
    env = EnvConfig(**{"dataset": "jsonl"} | settings)
    assert judging_rule(env) == rule
    assert reference_answer('["2"]', env) == ("2" if rule not in (None, "exact") else '["2"]')
    assert reference_answer(["2"], env) == ("2" if rule else ["2"])


def test_jsonl_rows_are_unwrapped_and_judged(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", '["2"]', ["2"], "Sold 2.\n#### 2", "The answer is 2.", 2)
    task = make_task(EnvConfig(dataset="jsonl", data_files=path))
    examples = task.examples("train")
    assert [example.answer for example in examples] == ["2"] * 5
    assert all(task.reward(Completion("\\boxed{2}"), example).score == 1.0 for example in examples)


def test_rows_of_mathematics_are_unwrapped(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", "Answer: 2", ["2"], "$2$", ["2", "3"])
    for dataset in ("math", "dapo_math"):
        examples = make_task(EnvConfig(dataset=dataset, data_files=path)).examples("train")
        assert [example.answer for example in examples] == ["2", "2", "$2$"]


def test_answers_that_cannot_be_equalled_are_counted(tmp_path: Path, logged: Logged) -> None:
    path = written(tmp_path / "rows.jsonl", "2", '["2","3"]', "\\frac{1}{2", "10-20", "a cat", '["2","3"]')
    make_task(EnvConfig(dataset="jsonl", data_files=path)).examples("train")
    assert len(logged.messages) == 1
    assert logged.text.startswith(
        "3 of 6 reference answers can be equalled by no final answer that the rule math"
    )
    assert 'rows.jsonl:2: \'["2","3"]\'; write the final answer alone' in logged.text


@pytest.mark.parametrize(
    "gold",
    [
        '[["2"]]',
        "[[2]]",
        '{"answer": "2"}',
        '[{"input": "1", "output": "2"}]',
        json.dumps({"cases": ["1"] * LONGEST_JUDGED, "outputs": ["2"]}),
        "We add both of them. Then the sum is 2.",
    ],
)
def test_data_and_prose_are_reported(gold: str, tmp_path: Path, logged: Logged) -> None:
    path = written(tmp_path / "rows.jsonl", "2", gold)
    make_task(EnvConfig(dataset="jsonl", data_files=path)).examples("train")
    assert "1 of 2 reference answers" in logged.text
    logged.messages.clear()
    for reward in ("exact", "compat_openai_gsm8k"):
        make_task(EnvConfig(dataset="jsonl", data_files=path, reward=reward, system_prompt="")).examples(
            "train"
        )
    assert logged.messages == []


def test_matrices_sets_and_names_are_no_data_and_no_prose(tmp_path: Path, logged: Logged) -> None:
    golds = (
        "[[1, 2], [3, 4]]",
        "{1, 2}",
        "[1, 2]",
        "Dr. Smith and Mr. Jones",
        "First add. So $\\boxed{2}$ is right.",
    )
    make_task(EnvConfig(dataset="jsonl", data_files=written(tmp_path / "rows.jsonl", *golds))).examples(
        "train"
    )
    assert logged.messages == []


def test_a_rule_that_reads_numbers_says_so(tmp_path: Path, logged: Logged) -> None:
    path = written(tmp_path / "rows.jsonl", "2", "x+1", "-7", "1/2")
    make_task(EnvConfig(dataset="jsonl", data_files=path, reward="gsm8k")).examples("train")
    assert "1 of 4 reference answers" in logged.text
    assert "rows.jsonl:2: 'x+1'" in logged.text


def test_no_answer_that_can_be_equalled_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", '["2","3"]', '["a","b"]')
    with pytest.raises(ConfigError, match=r"^2 of 2 reference answers .*rows\.jsonl:1: "):
        make_task(EnvConfig(dataset="jsonl", data_files=path)).examples("train")


def test_good_answers_and_rewards_of_others_are_silent(tmp_path: Path, logged: Logged) -> None:
    good = written(
        tmp_path / "good.jsonl", "2", "1/2", "x+1", "$5-$10", "2024-05-17", "H2O", "yes", "(1,2)", "[1,2]"
    )
    make_task(EnvConfig(dataset="jsonl", data_files=good)).examples("train")
    bad = written(tmp_path / "bad.jsonl", '["2","3"]', '["a"]')
    for reward in ("compat_openai_gsm8k", "my_rewards:brief"):
        examples = make_task(
            EnvConfig(dataset="jsonl", data_files=bad, reward=reward, system_prompt="")
        ).examples("train")
        assert [example.answer for example in examples] == ['["2","3"]', '["a"]']
    assert logged.messages == []


def test_long_answers_are_not_judged(tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    monkeypatch.setattr(
        "envs.verifiers.reference_answers._is_right",
        lambda answer, gold, rule, env: judged.append(gold) or True,
    )
    path = written(
        tmp_path / "rows.jsonl", "{" * (LONGEST_JUDGED + 1), "12", "x+1", "x+1", "{" * LONGEST_JUDGED
    )
    make_task(EnvConfig(dataset="jsonl", data_files=path)).examples("train")
    assert judged == ["x+1", "{" * LONGEST_JUDGED]
    assert logged.messages == []


def test_each_rule_has_its_form() -> None:
    assert set(FORMS) == set(RULES)
    for rule, form in FORMS.items():
        assert RULES[rule].judge(form.format("7"), "7", EnvConfig(dataset="jsonl"))["accuracy"] == 1.0


def test_hostile_texts_are_left_quickly() -> None:
    for text in (
        "[" * 100_000,
        '["' * 50_000,
        "answer is " * 50_000,
        "$" * 100_001,
        "#### " * 50_000,
        "\\(" * 50_000,
    ):
        unwrapped(text)
        unwrapped(text, keep_latex=True)
