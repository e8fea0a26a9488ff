"""Reference answers as data sets write them: unwrapped, and each judged once."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Example, make_task
from envs.verifiers.reference_answers import FORMS, LONGEST_JUDGED, judging_rule, reference_answer, unwrapped
from envs.verifiers.rules import RULES
from tests.logged import Logged


def written(path: Path, *golds: Any) -> str:
    rows = [{"prompt": f"{place}?", "answer": gold} for place, gold in enumerate(golds)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


WRAPPED = [
    ('["2"]', "2"), ("['2']", "2"), ('[ "\\\\frac{1}{2}" ]', "\\frac{1}{2}"), ('["The answer is 2."]', "2"),
    ("Natalia sold 48/2 = 24 clips.\n#### 72", "72"), ("48/2 = 24 #### 72 ", "72"), ("The answer is 2.", "2"),
    ("the answer is: 2", "2"), ("So the answer is 2", "2"),
    ("1+1 is 2. Therefore, the final answer is 2.", "2"), ("He has 1 and 1.\nThe answer is 2", "2"),
    ("**Answer:** 2", "2"), ("Answer: 2", "2"), ("Final answer: 2 apples", "2 apples"),
    ("The final answer is 2. I hope it is correct.", "2"), ("<answer>2</answer>", "2"), ("= 2", "2"),
    ("It is 2.", "2"), ("\\text{The answer is } 2", "2"), ("<think>1+1</think>\n<answer> 2 </answer>", "2"),
]  # fmt: skip
IN_LATEX = [
    ("$2$", "2"), ("$$x+1$$", "x+1"), ("\\(2\\)", "2"), ("\\[ 2 \\]", "2"), ("The final answer is $2$", "2"),
    ("\\boxed{2}", "2"), ("We add, so it is $\\boxed{2}$.", "2"), ("a=\\boxed{2} and b=\\boxed{3}", "2, 3"),
]  # fmt: skip
NOT_WRAPPED = [
    "2", "-1.5", "(1,2)", "[2]", "[1,2]", "[1, 2)", "['2', '3']", '["2","3"]', "$5-$10", "$2$ or $3$",
    "\\(2\\) or \\(3\\)", "\\$5", "The answer", "the wrong answer is 3",
    "The answer is 2. No, it is 3 after all.", "#### ", "A # B", "<answer>2", "\\boxed{2", "[[2]]", '["2"',
    "x = 2", "= 2 = 3", "It is raining", "\\text{yes}", "a question and an answer", "May 17, 2024",
]  # fmt: skip


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


@pytest.mark.parametrize(("settings", "rule"), [
    ({}, "math"), ({"reward": "gsm8k"}, "gsm8k"), ({"reward": "strict_math_verify"}, "math"),
    ({"reward": ["exact", "math"]}, "exact"), ({"reward": "my_rewards:brief"}, None),
    ({"reward": ["exact", "my_rewards:brief"]}, None), ({"reward": "compat_openai_gsm8k"}, None),
    ({"reward": "math_verify"}, None),
    ({"reward": "code"}, None), ({"reward_second_opinion": "my_rewards:brief"}, None),
    ({"reward_second_opinion": "strict_math_verify"}, "math"), ({"dataset": "my_tasks:Mine"}, None),
])  # fmt: skip
def test_the_rule_that_judges(settings: dict[str, Any], rule: str | None) -> None:
    env = EnvConfig(**{"dataset": "jsonl"} | settings)
    assert judging_rule(env) == rule
    assert reference_answer('["2"]', env) == ("2" if rule not in (None, "exact") else '["2"]')
    assert reference_answer(["2"], env) == ("2" if rule else ["2"])


def read(folder: Path, *golds: Any, **settings: Any) -> list[Example]:
    path = written(folder / "rows.jsonl", *golds)
    return list(make_task(EnvConfig(**{"dataset": "jsonl", "data_files": path} | settings)).examples("train"))


@pytest.mark.parametrize(("dataset", "golds", "answers"), [
    ("jsonl", ('["2"]', ["2"], "Sold 2.\n#### 2", "The answer is 2.", 2), ["2"] * 5),
    ("math", ("Answer: 2", ["2"], "$2$", ["2", "3"]), ["2", "2", "$2$"]),
    ("dapo_math", ("Answer: 2", ["2"], "$2$", ["2", "3"]), ["2", "2", "$2$"]),
])  # fmt: skip
def test_rows_are_unwrapped(dataset: str, golds: tuple[Any, ...], answers: list[str], tmp_path: Path) -> None:
    examples = read(tmp_path, *golds, dataset=dataset)
    assert [example.answer for example in examples] == answers
    judge = make_task(EnvConfig(dataset=dataset))
    assert all(judge.reward(Completion("Answer: 2"), example).score == 1.0 for example in examples)


def test_answers_that_cannot_be_equalled_are_counted(tmp_path: Path, logged: Logged) -> None:
    read(tmp_path, "2", '["2","3"]', "\\frac{1}{2", "10-20", "a cat", '["2","3"]')
    (said,) = logged.messages
    assert said.startswith("3 of 6 reference answers can be equalled by no final answer that the rule math")
    assert 'rows.jsonl:2: \'["2","3"]\'; write the final answer alone' in said
    read(tmp_path, "2", "x+1", "-7", "1/2", reward="gsm8k")
    assert "1 of 4 reference answers" in logged.messages[1] and "rows.jsonl:2: 'x+1'" in logged.messages[1]
    with pytest.raises(ConfigError, match=r"^2 of 2 reference answers .*rows\.jsonl:1: "):
        read(tmp_path, '["2","3"]', '["a","b"]')


@pytest.mark.parametrize("gold", [
    '[["2"]]', "[[2]]", '{"answer": "2"}', '[{"input": "1", "output": "2"}]',
    json.dumps({"cases": ["1"] * LONGEST_JUDGED, "outputs": ["2"]}),
    "We add both of them. Then the sum is 2.",
])  # fmt: skip
def test_data_and_prose_are_reported(gold: str, tmp_path: Path, logged: Logged) -> None:
    read(tmp_path, "2", gold)
    assert "1 of 2 reference answers" in logged.text
    logged.messages.clear()
    for reward in ("exact", "compat_openai_gsm8k"):
        read(tmp_path, "2", gold, reward=reward, system_prompt="")
    assert logged.messages == []


def test_good_answers_and_rewards_of_others_are_silent(tmp_path: Path, logged: Logged) -> None:
    read(
        tmp_path,
        "2",
        "1/2",
        "x+1",
        "$5-$10",
        "2024-05-17",
        "H2O",
        "yes",
        "(1,2)",
        "[1,2]",
        "[[1, 2], [3, 4]]",
    )
    read(tmp_path, "{1, 2}", "[1, 2]", "Dr. Smith and Mr. Jones", "First add. So $\\boxed{2}$ is right.")
    for reward in ("compat_openai_gsm8k", "my_rewards:brief"):
        examples = read(tmp_path, '["2","3"]', '["a"]', reward=reward, system_prompt="")
        assert [example.answer for example in examples] == ['["2","3"]', '["a"]']
    assert logged.messages == []


def test_long_answers_are_not_judged(tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def is_right(answer: str, gold: str, rule: str, env: EnvConfig) -> bool:
        judged.append(gold)
        return True

    monkeypatch.setattr("envs.verifiers.reference_answers._is_right", is_right)
    read(tmp_path, "{" * (LONGEST_JUDGED + 1), "12", "x+1", "x+1", "{" * LONGEST_JUDGED)
    assert judged == ["x+1", "{" * LONGEST_JUDGED]
    assert logged.messages == []


def test_each_rule_has_its_form() -> None:
    assert set(FORMS) == set(RULES)
    for rule, form in FORMS.items():
        assert RULES[rule].judge(form.format("7"), "7", EnvConfig(dataset="jsonl"))["accuracy"] == 1.0


def test_hostile_texts_are_left_quickly() -> None:
    units = ("[", '["', "answer is ", "$", "#### ", "\\(")
    for text in (unit * (100_001 // len(unit)) for unit in units):
        unwrapped(text)
        unwrapped(text, keep_latex=True)
