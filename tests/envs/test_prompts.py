import pytest

from config.schema.env import DifficultyConfig
from config.schema.errors import ConfigError
from envs.example import Mixed
from envs.prompts import PromptQueue, PromptSource
from tests.generating import draw_from
from tests.tiny import numbered_examples


def source(count: int = 10, seed: int = 0, longest: int = 99) -> PromptSource:
    return PromptSource(
        numbered_examples(count), seed, lambda example: len(example.messages[0]["content"]) <= longest
    )


def test_an_epoch_visits_every_row_once_in_a_seeded_order() -> None:
    first, second = (draw_from(source(seed=3), 20) for _ in range(2))
    rows = [example.row for example in first]
    assert rows == [example.row for example in second]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert rows != [example.row for example in draw_from(source(seed=4), 20)]


def test_a_restored_source_continues_where_it_was() -> None:
    whole = source()
    draw_from(whole, 7)
    state = whole.state_dict()
    restored = source()
    restored.load_state_dict(state)
    assert draw_from(restored, 15) == draw_from(whole, 15)


def test_long_prompts_are_left_out_and_counted() -> None:
    prompts = source(count=12, longest=5)  # "10+70=" has six letters, "2+14=" five
    kept = {example.row for example in draw_from(prompts, 20)}
    assert kept == {row for row in range(12) if len(f"{row}+{row * 7}=") <= 5}
    assert prompts.left_out == 12 - len(kept)


def test_a_member_without_rows_is_named() -> None:
    examples = Mixed({"sums": numbered_examples(3), "nothing": []}, {"sums": 1.0, "nothing": 1.0})
    with pytest.raises(ConfigError, match=r"env\.mixture\.nothing: this member has no rows"):
        PromptSource(examples, 0, lambda example: True)


def test_the_default_difficulty_passes_over_nothing() -> None:
    prompts = source(count=3)
    for example in draw_from(prompts, 3):
        prompts.observe(example, float(example.row % 2))
    assert sorted(example.row for example in draw_from(prompts, 6)) == [0, 0, 1, 1, 2, 2]


def test_a_prompt_is_passed_over_for_as_many_epochs_as_asked_whenever_it_was_seen() -> None:
    """Row 0 turns out too easy in epoch 3: it is out in epochs 4 and 5 and back in epoch 6."""
    difficulty = DifficultyConfig(low=0.2, high=0.8, retry_epochs=2)
    prompts = PromptSource(numbered_examples(3), 0, lambda example: True, difficulty)
    for example in draw_from(prompts, 12):
        prompts.observe(example, 0.2 if example.row else 0.8)  # both ends are drawn
    prompts.observe(numbered_examples(1)[0], 1.0)
    assert sorted(example.row for example in draw_from(prompts, 2 + 2)) == [1, 1, 2, 2]
    assert sorted(example.row for example in draw_from(prompts, 3)) == [0, 1, 2]


def test_an_epoch_that_would_be_empty_is_followed_by_one_of_all_rows() -> None:
    difficulty = DifficultyConfig(high=0.5, retry_epochs=100)
    prompts = PromptSource(numbered_examples(3), 0, lambda example: True, difficulty)
    for epoch in (0, 2, 4):
        drawn = draw_from(prompts, 3)
        assert sorted(example.row for example in drawn) == [0, 1, 2]
        assert prompts.state_dict()["orders"][""][0] == epoch
        for example in drawn:
            prompts.observe(example, 1.0)


def test_examples_put_back_come_first_and_survive_a_checkpoint() -> None:
    prompts = PromptQueue(source())
    drawn = [example for _, example in prompts.begin(6)]
    state = prompts.state_dict(outstanding=drawn[2:5])
    restored = PromptQueue(source())
    restored.load_state_dict(state)
    assert [example for _, example in restored.begin(4)] == [*drawn[2:5], prompts.begin_one()[1]]


def test_how_long_prompts_are_that_are_all_too_long() -> None:
    prompts = PromptSource(
        numbered_examples(3),
        0,
        lambda example: False,
        told=lambda examples: (f"row {examples[0].row}: 61 tokens", ""),
    )
    with pytest.raises(ConfigError, match=r"all 3 .*max_prompt_tokens \(row 0: 61 tokens\): raise"):
        draw_from(prompts, 1)
