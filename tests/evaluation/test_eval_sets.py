"""Tests which problems of an evaluation set are selected."""

from dataclasses import replace

from envs.duplicates import distinct_examples
from envs.task import Example, load_examples, make_task
from tests.envs.environment_helpers import env_config
from tests.tiny_models import numbered_examples
from torchgrpo.evaluation.eval_sets import select_problems
from torchgrpo.monitoring.ledger_record import prompt_id


def rows(examples: list[Example]) -> list[int]:
    return [example.row for example in examples]


def test_each_prompt_once_in_the_order_of_the_data() -> None:
    problems = select_problems(numbered_examples(6) * 4, None, lambda example: True)
    assert rows(problems.examples) == [0, 1, 2, 3, 4, 5]
    assert problems.num_duplicates == 18


def test_a_limit_chooses_at_random_and_always_the_same() -> None:
    first, second = (select_problems(numbered_examples(100), 10, lambda example: True) for _ in range(2))
    assert rows(first.examples) == rows(second.examples) == sorted(rows(first.examples))
    assert len(first.examples) == 10
    assert rows(first.examples)[-1] > 20  # not the first ten


def test_a_limit_counts_distinct_prompts() -> None:
    assert len(select_problems(numbered_examples(6) * 4, 5, lambda example: True).examples) == 5


def test_prompts_that_do_not_fit_are_counted() -> None:
    problems = select_problems(numbered_examples(12), None, lambda example: example.row % 3 != 0)
    assert problems.num_too_long == 4
    assert len(problems.examples) == 8


def test_problems_of_an_environment_may_have_the_same_prompt() -> None:
    env = env_config("Secrets", dataset="environment")
    examples = distinct_examples(make_task(replace(env, duplicates="drop")), "test")
    assert [example.answer for example in examples] == [3, 4, 5], "one row for each pair of prompt and answer"
    problems = select_problems(load_examples(make_task(env), "test"), None, lambda example: True)
    assert rows(problems.examples) == [0, 1, 2] and problems.num_duplicates == 1
    ids = {prompt_id(example.messages, example.problem_id) for example in problems.examples}
    assert len(ids) == 3
    reward_only = replace(env, environment=None, dataset="arithmetic")
    assert {example.problem_id for example in load_examples(make_task(reward_only), "test")} == {""}
