"""A state of prompts over data that were mended, appended to, shortened or exchanged since."""

import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import torch

from config.schema.curriculum import CurriculumConfig
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data_digest import SIZE, DataDigest, compare
from envs.example import Example, Mixed
from envs.prompts import PromptQueue, PromptSource
from envs.task import make_task
from tests.generating import draw_from
from tests.tiny import numbered_examples


def source(
    examples: Sequence[Example], keep: Callable[[Example], bool] = lambda example: True
) -> PromptSource:
    return PromptSource(examples, 0, keep, setting="env.data_files=rows.jsonl")


def mended(examples: Sequence[Example], *rows: int) -> list[Example]:
    return [replace(one, answer="mended") if one.row in rows else one for one in examples]


def rows_of(digests: str) -> list[str]:
    return [digests[at : at + SIZE] for at in range(0, len(digests), SIZE)]


@pytest.mark.parametrize("change", [
    {"answer": "9"}, {"row": 7}, {"prefill": "<think>"}, {"tools": ({"name": "add"},)},
    {"messages": ({"role": "user", "content": "?"},)},
    {"messages": ({"role": "system", "content": "Own."}, {"role": "user", "content": "1+7="})},
])  # fmt: skip
def test_what_is_asked_and_its_answer_make_the_digest(change: dict[str, Any]) -> None:
    before = numbered_examples(3)
    after = [before[0], replace(before[1], **change), before[2]]
    first, second = rows_of(DataDigest.of(before).rows), rows_of(DataDigest.of(after).rows)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]


def test_a_system_prompt_of_all_rows_is_no_part_of_it() -> None:
    """It comes from the reward, which may be another when a run goes on."""
    made = [
        make_task(EnvConfig(dataset="arithmetic", system_prompt=prompt)).examples("test")
        for prompt in ("Add.", "Think, then add.", None)
    ]
    assert len({DataDigest.of(examples) for examples in made}) == 1


def test_any_answer_has_the_same_digest_in_every_process() -> None:
    @dataclasses.dataclass
    class Gold:
        values: set[str]

    class Bare: ...

    for make in (
        lambda: {"b": 1, "a": Decimal("0.50")}, lambda: {1: "x", (2, 3): "y"}, lambda: {"tip", "pu", "rob"},
        lambda: Bare(), lambda: [Gold({"x"}), Bare()], lambda: "\ud800",
    ):  # fmt: skip
        one, other = (Example(({"role": "user", "content": "?"},), make(), 0) for _ in range(2))
        assert DataDigest.of([one]) == DataDigest.of([other])


def test_columns_that_a_reward_reads_count_where_both_runs_read_them() -> None:
    before = [replace(one, row_data={"schema": "t", "answer": one.answer}) for one in numbered_examples(4)]
    after = [replace(one, row_data=one.row_data | {"schema": "u"}) if one.row == 2 else one for one in before]
    found = compare("env.data_files=x", DataDigest.of(before), DataDigest.of(after), range(4))
    assert found.changed == {2}
    more = [replace(one, row_data={"schema": "u", "answer": one.answer, "x": 1}) for one in before]
    (line,) = compare("env.data_files=x", DataDigest.of(before), DataDigest.of(more), range(4)).lines
    assert "columns that one of both lacks (x)" in line
    without = DataDigest.of(numbered_examples(4))
    assert not compare("env.data_files=x", without, DataDigest.of(after), range(4)).changed


def test_a_number_is_what_its_text_is() -> None:
    """Under a reward of the user's the answer of a row is the number, else its text."""
    numbers = [replace(one, answer=int(one.answer)) for one in numbered_examples(4)]
    assert DataDigest.of(numbers) == DataDigest.of(numbered_examples(4))


def test_the_prefill_of_a_config_is_no_part_of_it() -> None:
    before = numbered_examples(4)
    after = [replace(one, prefill="<think>") for one in before]
    assert DataDigest.of(before) == DataDigest.of(after)


def test_nothing_changed_is_no_change_and_lies_in_a_checkpoint_as_text() -> None:
    digest = DataDigest.of(numbered_examples(5))
    file = io.BytesIO()
    torch.save(digest.state(), file)
    file.seek(0)
    read = DataDigest.load(torch.load(file, weights_only=True))
    assert read == digest and len(read.rows) == 5 * SIZE
    found = compare("env.data_files=x", read, digest, range(5))
    assert (found.changed, found.lines) == (frozenset(), ())


def test_mended_rows_are_forgotten_and_appended_ones_come_with_the_next_epoch() -> None:
    def short(example: Example) -> bool:
        return example.row not in (2, 5)

    whole = source(numbered_examples(12), short)
    asked = draw_from(whole, 4)
    for example in asked:
        whole.observe(example, 0.5)
    whole.members[""].rows.left_out.update((2, 5))
    data = mended(numbered_examples(15), 5, asked[0].row)
    resumed = source(data)  # row 5 fits by now
    assert resumed.load_state_dict(whole.state_dict()) == [
        f"env.data_files=rows.jsonl: 2 of 12 rows changed since the checkpoint (rows "
        f"{', '.join(map(str, sorted((5, asked[0].row))))}), what was known of their success is forgotten; 3 rows "
        "appended to 12, asked once the epoch that was begun is over"
    ]
    member = resumed.members[""]
    assert set(member.rates) == set(member.asked) == {example.row for example in asked[1:]}
    assert resumed.rows.left_out == {2}
    again = source(data)  # in the middle of an epoch that began with 12 rows
    first = draw_from(resumed, 3)
    again.load_state_dict(resumed.state_dict())
    rest = draw_from(resumed, 40)
    assert draw_from(again, 40) == rest
    epoch = Counter(example.row for example in [*asked, *first, *rest[: 12 - 4 - 3 - 1]])
    assert epoch <= Counter(range(12)) and 2 not in epoch
    assert {example.row for example in rest} >= {12, 13, 14}
    assert all(example.answer == "mended" for example in rest if example.row == 5)


@pytest.mark.parametrize(("now", "said"), [
    (numbered_examples(6), "it had 16 rows, there are 6 now; the first that differs is row 6, which is gone"),
    (
        mended(numbered_examples(6), 3),
        "it had 16 rows, there are 6 now, 1 of them others; the first that differs is row 3.",
    ),
    (mended(numbered_examples(16), *range(9)), "16 rows, there are 16 now, 9 of them others; the first"),
    (
        [replace(one, row=at) for at, one in enumerate(reversed(numbered_examples(16)))],
        "16 now, 16 of them others; the first that differs is row 0",
    ),
    (mended(numbered_examples(40), *range(16)), "it had 16 rows, there are 40 now, 16 of them others"),
])  # fmt: skip
def test_other_data_are_refused_with_counts_and_the_first_row(now: list[Example], said: str) -> None:
    state = source(numbered_examples(16)).state_dict()
    prompts = source(now)
    before = prompts.state_dict()
    with pytest.raises(ConfigError) as refused:
        prompts.load_state_dict(state)
    text = str(refused.value)
    assert said in text and "env.data_files=rows.jsonl" in text and "model.name=CHECKPOINT" in text
    assert "\n" not in text and prompts.state_dict() == before


def test_examples_that_wait_are_asked_as_the_data_have_them_now() -> None:
    def fits(example: Example) -> bool:
        return example.answer != "mended" or example.row != 1

    first = PromptQueue(source(numbered_examples(8)))
    state = first.state_dict(outstanding=numbered_examples(8)[:3])
    second = PromptQueue(source(mended(numbered_examples(8), 1, 2), fits))
    second.load_state_dict(state)
    waiting = [example for _, example in second.begin(2)]
    assert [(one.row, one.answer) for one in waiting] == [(0, "0"), (2, "mended")]  # row 1 is too long now


def test_members_of_a_mixture_are_compared_each_by_itself_in_any_order() -> None:
    weights = {"a": 1.0, "b": 1.0}
    whole = source(Mixed({"a": numbered_examples(4), "b": numbered_examples(7)}, weights))
    for example in draw_from(whole, 9):
        whole.observe(example, example.row / 10)
    state = whole.state_dict()
    same = source(Mixed({"b": numbered_examples(7), "a": numbered_examples(5)}, weights))
    (line,) = same.load_state_dict(state)
    assert line.startswith("env.mixture.a: 1 rows appended to 4")
    for name, member in same.members.items():
        known = {row - member.start: rate for row, rate in member.rates.items()}
        before = whole.members[name]
        assert known == {row - before.start: rate for row, rate in before.rates.items()}
    with pytest.raises(ConfigError, match=r"env\.mixture\.b: not the data of the checkpoint: it had 7 rows"):
        source(Mixed({"a": numbered_examples(4), "b": numbered_examples(3)}, weights)).load_state_dict(state)


@pytest.mark.parametrize(
    "settings", [{"priority": "learnability"}, {"column": "level", "window": 2, "gate": 0.5}]
)
def test_curricula_go_on_over_changed_rows(settings: dict[str, Any]) -> None:
    def graded(levels: Sequence[int], *changed: int) -> list[Example]:
        examples = mended(numbered_examples(len(levels)), *changed)
        return [replace(one, row_data={"level": level}) for one, level in zip(examples, levels, strict=True)]

    def prompts(examples: list[Example]) -> PromptSource:
        return PromptSource(examples, 0, lambda example: True, curriculum=CurriculumConfig(**settings))

    whole = prompts(graded([1, 1, 1, 3, 3, 3]))
    for example in draw_from(whole, 3):
        whole.observe(example, 1.0)
    state = whole.state_dict()
    data = graded([1, 1, 1, 3, 3, 3, 0, 2, 9], 1)
    resumed, again = prompts(data), prompts(data)
    assert resumed.load_state_dict(state) == again.load_state_dict(state)
    member = resumed.members[""]
    assert 1 not in member.asked
    if "column" in settings:
        assert member.levels.labels[member.levels.newest] == "3"  # which was open
        assert [window.mean for window in member.levels.success][1] == 1.0
    assert draw_from(resumed, 30) == draw_from(again, 30)
    third = prompts(data)
    third.load_state_dict(resumed.state_dict())
    assert draw_from(third, 30) == draw_from(resumed, 30)


@pytest.mark.parametrize(("dataset", "options", "other"), [
    ("arithmetic", {"max_operand": 9}, {"max_operand": 8}),
    ("countdown", {"num_rows": 40}, {"num_rows": 40, "max_number": 50}),
    ("reasoning_gym", {"name": "chain_sum", "num_rows": 40}, {"name": "chain_sum", "num_rows": 40, "seed": 1}),
])  # fmt: skip
def test_generated_rows_have_digests(dataset: str, options: dict[str, Any], other: dict[str, Any]) -> None:
    first, same, others = (
        make_task(EnvConfig(dataset=dataset, options=each)).examples("train")
        for each in (options, options, other)
    )
    assert DataDigest.of(first) == DataDigest.of(same)
    with pytest.raises(ConfigError, match="not the data of the checkpoint"):
        source(others).load_state_dict(source(first).state_dict())


def test_a_state_without_digests_is_of_an_earlier_version() -> None:
    state = source(numbered_examples(3)).state_dict()
    del state["members"]
    with pytest.raises(ConfigError, match="another version of this code wrote it"):
        source(numbered_examples(3)).load_state_dict(state)


def test_members_in_another_order_are_drawn_alike() -> None:
    members = {"a": numbered_examples(5), "b": numbered_examples(7)}
    drawn = []
    for names in (("a", "b"), ("b", "a")):
        mixed = Mixed({name: members[name] for name in names}, dict.fromkeys(names, 1.0))
        prompts = source(mixed)
        drawn.append([(one.source, one.row) for one in (prompts.draw() for _ in range(12))])
    assert drawn[0] == drawn[1]
