"""Tests that reference answers are unwrapped and checked once."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Example, make_task
from envs.verifiers.reference_answers import (
    ANSWER_FORMS,
    MAX_CHECKED_CHARACTERS,
    scoring_rule,
    unwrap_reference,
    unwrap_text,
)
from envs.verifiers.rules import RULES
from tests.log_capture import LogCapture


def write_rows(path: Path, *references: Any) -> str:
    """Writes rows with the given reference answers to a file, and returns its path."""
    rows = [{"prompt": f"{place}?", "answer": reference} for place, reference in enumerate(references)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


WRAPPED_ANSWERS = [
    ('["2"]', "2"), ("['2']", "2"), ('[ "\\\\frac{1}{2}" ]', "\\frac{1}{2}"), ('["The answer is 2."]', "2"),
    ("Natalia sold 48/2 = 24 clips.\n#### 72", "72"), ("48/2 = 24 #### 72 ", "72"), ("The answer is 2.", "2"),
    ("the answer is: 2", "2"), ("So the answer is 2", "2"),
    ("1+1 is 2. Therefore, the final answer is 2.", "2"), ("He has 1 and 1.\nThe answer is 2", "2"),
    ("**Answer:** 2", "2"), ("Answer: 2", "2"), ("Final answer: 2 apples", "2 apples"),
    ("The final answer is 2. I hope it is correct.", "2"), ("<answer>2</answer>", "2"), ("= 2", "2"),
    ("It is 2.", "2"), ("\\text{The answer is } 2", "2"), ("<think>1+1</think>\n<answer> 2 </answer>", "2"),
]  # fmt: skip
LATEX_ANSWERS = [
    ("$2$", "2"), ("$$x+1$$", "x+1"), ("\\(2\\)", "2"), ("\\[ 2 \\]", "2"), ("The final answer is $2$", "2"),
    ("\\boxed{2}", "2"), ("We add, so it is $\\boxed{2}$.", "2"), ("a=\\boxed{2} and b=\\boxed{3}", "2, 3"),
]  # fmt: skip
UNWRAPPED_TEXTS = [
    "2", "-1.5", "(1,2)", "[2]", "[1,2]", "[1, 2)", "['2', '3']", '["2","3"]', "$5-$10", "$2$ or $3$",
    "\\(2\\) or \\(3\\)", "\\$5", "The answer", "the wrong answer is 3",
    "The answer is 2. No, it is 3 after all.", "#### ", "A # B", "<answer>2", "\\boxed{2", "[[2]]", '["2"',
    "x = 2", "= 2 = 3", "It is raining", "\\text{yes}", "a question and an answer", "May 17, 2024",
]  # fmt: skip


@pytest.mark.parametrize(("text", "inner"), WRAPPED_ANSWERS + LATEX_ANSWERS)
def test_a_wrapped_answer_is_unwrapped(text: str, inner: str) -> None:
    assert unwrap_text(text) == inner


@pytest.mark.parametrize("text", UNWRAPPED_TEXTS)
def test_any_other_text_stays(text: str) -> None:
    assert unwrap_text(text) == text.strip()
    assert unwrap_text(text, keep_latex=True) == text.strip()


@pytest.mark.parametrize("rule", ["math", "boxed", "dapo", "think_answer_tags"])
@pytest.mark.parametrize(("text", "inner"), WRAPPED_ANSWERS + LATEX_ANSWERS)
def test_the_final_answer_equals_the_wrapped_one(text: str, inner: str, rule: str) -> None:
    env = EnvConfig(dataset="jsonl", reward=rule)
    reference = unwrap_reference(text, env)
    assert RULES[rule].score(ANSWER_FORMS[rule].format(inner), reference, env)["accuracy"] == 1.0


def test_an_answer_that_the_rule_reads_as_it_is_stays() -> None:
    math_env = EnvConfig(dataset="jsonl")
    for text in ("$2$", "$3-2$", "\\boxed{2}", "it is \\boxed{2}", '["2","3"]', "$5-$10"):
        assert unwrap_reference(text, math_env) == text
    text_env = EnvConfig(dataset="jsonl", reward="exact")
    for text in ("The answer is 2.", '["2"]', "a cat"):
        assert unwrap_reference(text, text_env) == text
    assert unwrap_reference("$x$", text_env) == "x"
    assert unwrap_reference("$2$", EnvConfig(dataset="jsonl", reward="gsm8k")) == "2"


def test_a_list_of_one_element_is_unwrapped() -> None:
    math_env = EnvConfig(dataset="jsonl")
    assert unwrap_reference(["2"], math_env) == "2"
    assert unwrap_reference([2], math_env) == 2
    for value in (["2", "3"], [], [["2"]], [True], [None], 2, 2.5, None, {"a": 1}):
        assert unwrap_reference(value, math_env) == value


@pytest.mark.parametrize(("settings", "rule"), [
    ({}, "math"), ({"reward": "gsm8k"}, "gsm8k"), ({"reward": "strict_math_verify"}, "math"),
    ({"reward": ["exact", "math"]}, "exact"), ({"reward": "my_rewards:brief"}, None),
    ({"reward": ["exact", "my_rewards:brief"]}, None), ({"reward": "compat_openai_gsm8k"}, None),
    ({"reward": "math_verify"}, None),
    ({"reward": "code"}, None), ({"fallback_reward": "my_rewards:brief"}, None),
    ({"fallback_reward": "strict_math_verify"}, "math"), ({"dataset": "my_tasks:Mine"}, None),
])  # fmt: skip
def test_scoring_rule_of_the_configured_rewards(settings: dict[str, Any], rule: str | None) -> None:
    env = EnvConfig(**{"dataset": "jsonl"} | settings)
    assert scoring_rule(env) == rule
    assert unwrap_reference('["2"]', env) == ("2" if rule not in (None, "exact") else '["2"]')
    assert unwrap_reference(["2"], env) == ("2" if rule else ["2"])


def read_examples(folder: Path, *references: Any, **settings: Any) -> list[Example]:
    """Writes rows with the given reference answers, and returns their examples."""
    path = write_rows(folder / "rows.jsonl", *references)
    return list(make_task(EnvConfig(**{"dataset": "jsonl", "data_files": path} | settings)).examples("train"))


@pytest.mark.parametrize(("dataset", "references", "answers"), [
    ("jsonl", ('["2"]', ["2"], "Sold 2.\n#### 2", "The answer is 2.", 2), ["2"] * 5),
    ("math", ("Answer: 2", ["2"], "$2$", ["2", "3"]), ["2", "2", "$2$"]),
    ("dapo_math", ("Answer: 2", ["2"], "$2$", ["2", "3"]), ["2", "2", "$2$"]),
])  # fmt: skip
def test_rows_are_unwrapped(dataset: str, references: tuple[Any, ...], answers: list[str], tmp_path: Path) -> None:
    examples = read_examples(tmp_path, *references, dataset=dataset)
    assert [example.answer for example in examples] == answers
    task = make_task(EnvConfig(dataset=dataset))
    assert all(task.reward(Completion("Answer: 2"), example).score == 1.0 for example in examples)


def test_unreachable_answers_are_counted(tmp_path: Path, log_capture: LogCapture) -> None:
    read_examples(tmp_path, "2", '["2","3"]', "\\frac{1}{2", "10-20", "a cat", '["2","3"]')
    (message,) = log_capture.messages
    assert message.startswith("3 of 6 reference answers match no final answer that the rule math")
    assert 'rows.jsonl:2: \'["2","3"]\'; write the final answer alone' in message
    read_examples(tmp_path, "2", "x+1", "-7", "1/2", reward="gsm8k")
    assert "1 of 4 reference answers" in log_capture.messages[1] and "rows.jsonl:2: 'x+1'" in log_capture.messages[1]
    with pytest.raises(ConfigError, match=r"^2 of 2 reference answers .*rows\.jsonl:1: "):
        read_examples(tmp_path, '["2","3"]', '["a","b"]')


@pytest.mark.parametrize("reference", [
    '[["2"]]', "[[2]]", '{"answer": "2"}', '[{"input": "1", "output": "2"}]',
    json.dumps({"cases": ["1"] * MAX_CHECKED_CHARACTERS, "outputs": ["2"]}),
    "We add both of them. Then the sum is 2.",
])  # fmt: skip
def test_data_and_prose_are_reported(reference: str, tmp_path: Path, log_capture: LogCapture) -> None:
    read_examples(tmp_path, "2", reference)
    assert "1 of 2 reference answers" in log_capture.text
    log_capture.messages.clear()
    for reward in ("exact", "compat_openai_gsm8k"):
        read_examples(tmp_path, "2", reference, reward=reward, system_prompt="")
    assert log_capture.messages == []


def test_good_answers_and_rewards_of_others_are_silent(tmp_path: Path, log_capture: LogCapture) -> None:
    read_examples(
        tmp_path, "2", "1/2", "x+1", "$5-$10", "2024-05-17", "H2O", "yes", "(1,2)", "[1,2]", "[[1, 2], [3, 4]]"
    )
    read_examples(tmp_path, "{1, 2}", "[1, 2]", "Dr. Smith and Mr. Jones", "First add. So $\\boxed{2}$ is right.")
    for reward in ("compat_openai_gsm8k", "my_rewards:brief"):
        examples = read_examples(tmp_path, '["2","3"]', '["a"]', reward=reward, system_prompt="")
        assert [example.answer for example in examples] == ['["2","3"]', '["a"]']
    assert log_capture.messages == []


def test_long_answers_are_not_checked(tmp_path: Path, log_capture: LogCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    scored_references: list[str] = []

    def is_right(answer: str, reference: str, rule: str, env: EnvConfig) -> bool:
        scored_references.append(reference)
        return True

    monkeypatch.setattr("envs.verifiers.reference_answers._is_right", is_right)
    read_examples(tmp_path, "{" * (MAX_CHECKED_CHARACTERS + 1), "12", "x+1", "x+1", "{" * MAX_CHECKED_CHARACTERS)
    assert scored_references == ["x+1", "{" * MAX_CHECKED_CHARACTERS]
    assert log_capture.messages == []


def test_each_rule_has_its_form() -> None:
    assert set(ANSWER_FORMS) == set(RULES)
    for rule, form in ANSWER_FORMS.items():
        assert RULES[rule].score(form.format("7"), "7", EnvConfig(dataset="jsonl"))["accuracy"] == 1.0


def test_hostile_texts_are_unwrapped_quickly() -> None:
    units = ("[", '["', "answer is ", "$", "#### ", "\\(")
    for text in (unit * (100_001 // len(unit)) for unit in units):
        unwrap_text(text)
        unwrap_text(text, keep_latex=True)
