import pytest

from config.errors import ConfigError
from envs.prompts import PromptSource
from rollout.streaming import PromptQueue
from tests.tiny import numbered_examples


def source(count: int = 10, seed: int = 0, longest: int = 99) -> PromptSource:
    return PromptSource(
        numbered_examples(count), seed, lambda example: len(example.messages[0]["content"]) <= longest
    )


def test_an_epoch_visits_every_row_once_in_a_seeded_order() -> None:
    first, second = (source(seed=3).draw(20) for _ in range(2))
    rows = [example.row for example in first]
    assert rows == [example.row for example in second]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert rows != [example.row for example in source(seed=4).draw(20)]


def test_a_restored_source_continues_where_it_was() -> None:
    whole = source()
    whole.draw(7)
    state = whole.state_dict()
    restored = source()
    restored.load_state_dict(state)
    assert restored.draw(15) == whole.draw(15)


def test_long_prompts_are_left_out_and_counted() -> None:
    prompts = source(count=12, longest=5)  # "10+70=" has six letters, "2+14=" five
    kept = {example.row for example in prompts.draw(20)}
    assert kept == {row for row in range(12) if len(f"{row}+{row * 7}=") <= 5}
    assert prompts.left_out == 12 - len(kept)


def test_when_nothing_fits_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"all 10 prompts are longer than env\.max_prompt_tokens"):
        source(longest=1).draw(1)


def test_examples_put_back_come_first_and_survive_a_checkpoint() -> None:
    prompts = PromptQueue(source())
    drawn = prompts.draw(6)
    state = prompts.state_dict(outstanding=drawn[2:5])
    restored = PromptQueue(source())
    restored.load_state_dict(state)
    assert restored.draw(4) == [*drawn[2:5], *prompts.draw(1)]


def test_how_long_prompts_are_that_are_all_too_long() -> None:
    prompts = PromptSource(
        numbered_examples(3),
        0,
        lambda example: False,
        told=lambda examples: f"row {examples[0].row}: 61 tokens",
    )
    with pytest.raises(
        ConfigError, match=r"all 3 prompts are longer than env\.max_prompt_tokens \(row 0: 61 tokens\): raise"
    ):
        prompts.draw(1)
