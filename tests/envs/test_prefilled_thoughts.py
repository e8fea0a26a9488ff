"""Tests of rewards on prefilled answers, whose prompt opened or closed a thought."""

from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.rewards import find_reward
from envs.task import Completion, Example, make_task
from envs.verifiers.rules import RULES

OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
FORMS = {
    "math": "\\boxed{2}", "boxed": "\\boxed{2}", "think_answer_tags": "<answer>2</answer>", "gsm8k": "#### 2",
    "dapo": "Answer: 2", "exact": "2", "last_number": "2", "strict_math_verify": "\\boxed{2}",
}  # fmt: skip


def is_correct(rule: str, completion: Completion, reference: Any = "2") -> bool:
    example = Example(({"role": "user", "content": "?"},), reference, 0)
    verdict = find_reward(rule).function(completion, example, EnvConfig(dataset="jsonl", reward=rule))
    return verdict.components["accuracy"] == 1.0


@pytest.mark.parametrize("rule", FORMS)
def test_an_opened_thought_is_a_thought(rule: str) -> None:
    form = FORMS[rule]
    assert is_correct(rule, Completion(f"perhaps 3</think>\n{form}", prefill=OPENED))
    assert not is_correct(rule, Completion(f"so it is {form} but let me check", prefill=OPENED))
    assert not is_correct(rule, Completion(form, prefill=OPENED))
    assert not is_correct(rule, Completion(f"{form}</think>\n", prefill=OPENED))


@pytest.mark.parametrize("rule", FORMS)
def test_a_thought_that_the_prompt_closed_is_no_answer(rule: str) -> None:
    assert is_correct(rule, Completion(FORMS[rule], prefill=CLOSED))
    assert not is_correct(rule, Completion(FORMS[rule].replace("2", "3"), prefill=CLOSED))


def test_the_forms_cover_every_rule() -> None:
    assert set(FORMS) == {*RULES, "strict_math_verify"}


def test_a_number_alone_is_the_final_answer_behind_a_thought_that_the_prompt_closed() -> None:
    assert is_correct("math", Completion("2", prefill=CLOSED))
    assert not is_correct("math", Completion("2", prefill=OPENED))
    assert not is_correct("math", Completion("so 1+1 is 2</think>\n2", prefill=OPENED))


def test_one_thought_only() -> None:
    assert not is_correct("think_answer_tags", Completion("<think>a</think><answer>2</answer>", prefill=OPENED))
    assert is_correct("think_answer_tags", Completion("a</think><answer>2</answer>", prefill=OPENED))
    assert not is_correct("think_answer_tags", Completion("a</think><answer>2</answer>"))


def test_the_beginning_of_the_answer_is_part_of_it() -> None:
    assert is_correct("dapo", Completion(" 2", prefill="Answer:"))
    assert is_correct("gsm8k", Completion("2", prefill="#### "))
    assert is_correct("boxed", Completion("2}", prefill="\\boxed{"))


TASKS: dict[str, tuple[Any, str, str]] = {
    "arithmetic": ("5", "5", "6"),
    "countdown": ({"numbers": [2, 3], "target": 5}, "<answer>2+3</answer>", "<answer>2*3</answer>"),
    "jsonl": ("a cat", "a cat", "a dog"),
}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_read_what_follows_the_thought(name: str) -> None:
    reference, answer, other = TASKS[name]
    task = make_task(EnvConfig(dataset=name))
    example = Example(({"role": "user", "content": "?"},), reference, 0)

    def accuracy(text: str, prefill: str) -> float:
        return task.reward(Completion(text, prefill=prefill), example).components["accuracy"]

    for beginning, prefill in (("", ""), ("a</think>\n", OPENED), ("", CLOSED)):
        assert accuracy(beginning + answer, prefill) == 1.0
        assert accuracy(beginning + other, prefill) == 0.0
    assert accuracy(answer, OPENED) == 0.0


def test_a_program_follows_the_thought() -> None:
    reference = {"inputs": [""], "outputs": ["7"]}
    example = Example(({"role": "user", "content": "?"},), reference, 0)
    task = make_task(EnvConfig(dataset="code"))
    program = "```python\nprint(7)\n```"
    assert task.reward(Completion(f"a</think>{program}", prefill=OPENED), example).score == 1.0
    assert task.reward(Completion("print(7)\n```", prefill="```python\n"), example).score == 1.0
    assert task.reward(Completion(program, prefill=OPENED), example).outcome == "invalid"


def test_instructions_apply_to_the_visible_text() -> None:
    task = make_task(EnvConfig(dataset="ifeval"))
    answer = {"ids": ["punctuation:no_comma"], "arguments": [{}]}
    example = Example(({"role": "user", "content": "?"},), answer, 0)
    assert task.reward(Completion("well, so</think>\n\nyes", prefill=OPENED), example).score == 1.0
    assert task.reward(Completion("well</think>\n\nyes, sir", prefill=OPENED), example).score == 0.0
    assert task.reward(Completion("well", prefill=OPENED), example).score == 0.0
    assert task.reward(Completion(" yes", prefill="Well,"), example).score == 0.0
    assert task.reward(Completion(" yes", prefill="Well"), example).score == 1.0


def test_graders_of_other_systems_read_the_text_alone() -> None:
    assert is_correct("compat_verl_math", Completion("it is \\boxed{2}", prefill=OPENED))
