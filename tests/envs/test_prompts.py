"""Tests of the prompt source and its queue: order, restoring, difficulty and too long prompts."""

import pytest

from config.schema.env import DifficultyConfig
from config.schema.errors import ConfigError
from envs.example import MixedExamples
from envs.prompts import PromptQueue, PromptSource
from tests.group_collection import next_examples
from tests.tiny_models import numbered_examples


def source(count: int = 10, seed: int = 0, max_characters: int = 99) -> PromptSource:
    return PromptSource(
        numbered_examples(count), seed, lambda example: len(example.messages[0]["content"]) <= max_characters
    )


def test_an_epoch_visits_every_row_once_in_a_seeded_order() -> None:
    first, second = (next_examples(source(seed=3), 20) for _ in range(2))
    rows = [example.row for example in first]
    assert rows == [example.row for example in second]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert rows != [example.row for example in next_examples(source(seed=4), 20)]


def test_a_restored_source_continues_the_order() -> None:
    original = source()
    next_examples(original, 7)
    state = original.state_dict()
    restored = source()
    restored.load_state_dict(state)
    assert next_examples(restored, 15) == next_examples(original, 15)


def test_long_prompts_are_left_out_and_counted() -> None:
    prompts = source(count=12, max_characters=5)  # "10+70=" has six letters, "2+14=" five
    sampled_rows = {example.row for example in next_examples(prompts, 20)}
    assert sampled_rows == {row for row in range(12) if len(f"{row}+{row * 7}=") <= 5}
    assert prompts.num_too_long == 12 - len(sampled_rows)


def test_a_member_without_rows_is_named() -> None:
    examples = MixedExamples({"sums": numbered_examples(3), "nothing": []}, {"sums": 1.0, "nothing": 1.0})
    with pytest.raises(ConfigError, match=r"env\.mixture\.nothing: this member has no rows"):
        PromptSource(examples, 0, lambda example: True)


def test_the_default_difficulty_passes_over_nothing() -> None:
    prompts = source(count=3)
    for example in next_examples(prompts, 3):
        prompts.observe(example, float(example.row % 2))
    assert sorted(example.row for example in next_examples(prompts, 6)) == [0, 0, 1, 1, 2, 2]


def test_a_prompt_outside_the_difficulty_is_skipped_for_retry_epochs() -> None:
    """Row 0 is too easy in epoch 3 and returns in epoch 6."""
    difficulty = DifficultyConfig(low=0.2, high=0.8, retry_epochs=2)
    prompts = PromptSource(numbered_examples(3), 0, lambda example: True, difficulty)
    for example in next_examples(prompts, 12):
        prompts.observe(example, 0.2 if example.row else 0.8)  # both bounds are within the difficulty
    prompts.observe(numbered_examples(1)[0], 1.0)
    assert sorted(example.row for example in next_examples(prompts, 2 + 2)) == [1, 1, 2, 2]
    assert sorted(example.row for example in next_examples(prompts, 3)) == [0, 1, 2]


def test_an_epoch_that_would_be_empty_is_followed_by_one_of_all_rows() -> None:
    difficulty = DifficultyConfig(high=0.5, retry_epochs=100)
    prompts = PromptSource(numbered_examples(3), 0, lambda example: True, difficulty)
    for epoch in (0, 2, 4):
        examples = next_examples(prompts, 3)
        assert sorted(example.row for example in examples) == [0, 1, 2]
        assert prompts.state_dict()["orders"][""][0] == epoch
        for example in examples:
            prompts.observe(example, 1.0)


def test_returned_examples_come_first_and_survive_a_checkpoint() -> None:
    prompts = PromptQueue(source())
    examples = [example for _, example in prompts.next_prompts(6)]
    state = prompts.state_dict(outstanding=examples[2:5])
    restored = PromptQueue(source())
    restored.load_state_dict(state)
    assert [example for _, example in restored.next_prompts(4)] == [*examples[2:5], prompts.next_prompt()[1]]


def test_the_message_on_too_long_prompts_has_their_length() -> None:
    prompts = PromptSource(
        numbered_examples(3),
        0,
        lambda example: False,
        describe_length=lambda examples: (f"row {examples[0].row}: 61 tokens", ""),
    )
    with pytest.raises(ConfigError, match=r"all 3 .*max_prompt_tokens \(row 0: 61 tokens\); raise"):
        next_examples(prompts, 1)
