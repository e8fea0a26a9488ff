"""Tests of data digests: resuming a prompt source over changed, appended, missing or other rows."""

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
from envs.data_digest import CHARACTERS_PER_ROW, DataDigest, compare_digests
from envs.example import Example, MixedExamples
from envs.prompts import PromptQueue, PromptSource
from envs.task import make_task
from tests.group_collection import next_examples
from tests.tiny_models import numbered_examples


def source(examples: Sequence[Example], fits_limit: Callable[[Example], bool] = lambda example: True) -> PromptSource:
    return PromptSource(examples, 0, fits_limit, setting="env.data_files=rows.jsonl")


def with_changed_rows(examples: Sequence[Example], *rows: int) -> list[Example]:
    return [replace(one, answer="mended") if one.row in rows else one for one in examples]


def split_digests(digests: str) -> list[str]:
    return [digests[at : at + CHARACTERS_PER_ROW] for at in range(0, len(digests), CHARACTERS_PER_ROW)]


@pytest.mark.parametrize("change", [
    {"answer": "9"}, {"row": 7}, {"prefill": "<think>"}, {"tools": ({"name": "add"},)},
    {"messages": ({"role": "user", "content": "?"},)},
    {"messages": ({"role": "system", "content": "Own."}, {"role": "user", "content": "1+7="})},
])  # fmt: skip
def test_the_digest_depends_on_prompt_and_answer(change: dict[str, Any]) -> None:
    before = numbered_examples(3)
    after = [before[0], replace(before[1], **change), before[2]]
    first, second = (
        split_digests(DataDigest.from_examples(before).rows),
        split_digests(DataDigest.from_examples(after).rows),
    )
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]


def test_the_digest_ignores_a_system_prompt_of_all_rows() -> None:
    """The system prompt comes from the reward, which may change when a run resumes."""
    versions = [
        make_task(EnvConfig(dataset="arithmetic", system_prompt=prompt)).examples("test")
        for prompt in ("Add.", "Think, then add.", None)
    ]
    assert len({DataDigest.from_examples(examples) for examples in versions}) == 1


def test_any_answer_has_the_same_digest_in_every_process() -> None:
    @dataclasses.dataclass
    class Reference:
        values: set[str]

    class Bare: ...

    for make in (
        lambda: {"b": 1, "a": Decimal("0.50")}, lambda: {1: "x", (2, 3): "y"}, lambda: {"tip", "pu", "rob"},
        lambda: Bare(), lambda: [Reference({"x"}), Bare()], lambda: "\ud800",
    ):  # fmt: skip
        one, other = (Example(({"role": "user", "content": "?"},), make(), 0) for _ in range(2))
        assert DataDigest.from_examples([one]) == DataDigest.from_examples([other])


def test_columns_that_a_reward_reads_count_where_both_runs_read_them() -> None:
    before = [replace(one, row_data={"schema": "t", "answer": one.answer}) for one in numbered_examples(4)]
    after = [replace(one, row_data=one.row_data | {"schema": "u"}) if one.row == 2 else one for one in before]
    found = compare_digests(
        "env.data_files=x", DataDigest.from_examples(before), DataDigest.from_examples(after), range(4)
    )
    assert found.changed_positions == {2}
    more = [replace(one, row_data={"schema": "u", "answer": one.answer, "x": 1}) for one in before]
    (line,) = compare_digests(
        "env.data_files=x", DataDigest.from_examples(before), DataDigest.from_examples(more), range(4)
    ).lines
    assert "columns in only one of the two data sets (x)" in line
    without = DataDigest.from_examples(numbered_examples(4))
    assert not compare_digests("env.data_files=x", without, DataDigest.from_examples(after), range(4)).changed_positions


def test_a_number_has_the_digest_of_its_text() -> None:
    """With a user reward the answer of a row is the number, else its text."""
    numbers = [replace(one, answer=int(one.answer)) for one in numbered_examples(4)]
    assert DataDigest.from_examples(numbers) == DataDigest.from_examples(numbered_examples(4))


def test_the_digest_ignores_the_prefill_of_a_config() -> None:
    before = numbered_examples(4)
    after = [replace(one, prefill="<think>") for one in before]
    assert DataDigest.from_examples(before) == DataDigest.from_examples(after)


def test_equal_data_have_no_change_and_a_digest_is_saved_as_text() -> None:
    digest = DataDigest.from_examples(numbered_examples(5))
    file = io.BytesIO()
    torch.save(digest.state(), file)
    file.seek(0)
    read = DataDigest.load(torch.load(file, weights_only=True))
    assert read == digest and len(read.rows) == 5 * CHARACTERS_PER_ROW
    found = compare_digests("env.data_files=x", read, digest, range(5))
    assert (found.changed_positions, found.lines) == (frozenset(), ())


def test_changed_rows_are_reset_and_appended_rows_come_with_the_next_epoch() -> None:
    def short(example: Example) -> bool:
        return example.row not in (2, 5)

    original = source(numbered_examples(12), short)
    sampled_examples = next_examples(original, 4)
    for example in sampled_examples:
        original.observe(example, 0.5)
    original.members[""].rows.too_long_rows.update((2, 5))
    data = with_changed_rows(numbered_examples(15), 5, sampled_examples[0].row)
    resumed = source(data)  # the changed row 5 fits
    assert resumed.load_state_dict(original.state_dict()) == [
        f"env.data_files=rows.jsonl: 2 of 12 rows changed since the checkpoint (rows "
        f"{', '.join(map(str, sorted((5, sampled_examples[0].row))))}) and their success statistics are reset; 3 rows "
        "appended to 12, sampled from the next epoch on"
    ]
    member = resumed.members[""]
    unchanged = {example.row for example in sampled_examples[1:]}
    assert set(member.success_rates) == set(member.prompt_stats) == unchanged
    assert resumed.rows.too_long_rows == {2}
    copy = source(data)  # resumes in the middle of an epoch of 12 rows
    first = next_examples(resumed, 3)
    copy.load_state_dict(resumed.state_dict())
    rest = next_examples(resumed, 40)
    assert next_examples(copy, 40) == rest
    epoch = Counter(example.row for example in [*sampled_examples, *first, *rest[: 12 - 4 - 3 - 1]])
    assert epoch <= Counter(range(12)) and 2 not in epoch
    assert {example.row for example in rest} >= {12, 13, 14}
    assert all(example.answer == "mended" for example in rest if example.row == 5)


@pytest.mark.parametrize(("examples", "message"), [
    (numbered_examples(6), "16 rows then, 6 rows now; the first difference is row 6 (removed)"),
    (
        with_changed_rows(numbered_examples(6), 3),
        "16 rows then, 6 rows now, 1 of them changed; the first difference is row 3.",
    ),
    (with_changed_rows(numbered_examples(16), *range(9)), "16 rows then, 16 rows now, 9 of them changed; the first"),
    (
        [replace(one, row=row) for row, one in enumerate(reversed(numbered_examples(16)))],
        "16 rows now, 16 of them changed; the first difference is row 0",
    ),
    (with_changed_rows(numbered_examples(40), *range(16)), "16 rows then, 40 rows now, 16 of them changed"),
])  # fmt: skip
def test_other_data_are_refused_with_counts_and_the_first_row(examples: list[Example], message: str) -> None:
    state = source(numbered_examples(16)).state_dict()
    prompts = source(examples)
    before = prompts.state_dict()
    with pytest.raises(ConfigError) as error:
        prompts.load_state_dict(state)
    text = str(error.value)
    assert message in text and "env.data_files=rows.jsonl" in text and "model.name=CHECKPOINT" in text
    assert "\n" not in text and prompts.state_dict() == before


def test_waiting_examples_come_from_the_current_data() -> None:
    def fits(example: Example) -> bool:
        return example.answer != "mended" or example.row != 1

    first = PromptQueue(source(numbered_examples(8)))
    state = first.state_dict(outstanding=numbered_examples(8)[:3])
    second = PromptQueue(source(with_changed_rows(numbered_examples(8), 1, 2), fits))
    second.load_state_dict(state)
    waiting = [example for _, example in second.next_prompts(2)]
    assert [(one.row, one.answer) for one in waiting] == [(0, "0"), (2, "mended")]  # the changed row 1 is too long


def test_members_of_a_mixture_are_compared_by_name_in_any_order() -> None:
    weights = {"a": 1.0, "b": 1.0}
    original = source(MixedExamples({"a": numbered_examples(4), "b": numbered_examples(7)}, weights))
    for example in next_examples(original, 9):
        original.observe(example, example.row / 10)
    state = original.state_dict()
    same = source(MixedExamples({"b": numbered_examples(7), "a": numbered_examples(5)}, weights))
    (line,) = same.load_state_dict(state)
    assert line.startswith("env.mixture.a: 1 rows appended to 4")
    for name, member in same.members.items():
        restored_rates = {row - member.start: rate for row, rate in member.success_rates.items()}
        before = original.members[name]
        assert restored_rates == {row - before.start: rate for row, rate in before.success_rates.items()}
    with pytest.raises(ConfigError, match=r"env\.mixture\.b: not the data of the checkpoint: 7 rows then"):
        source(MixedExamples({"a": numbered_examples(4), "b": numbered_examples(3)}, weights)).load_state_dict(state)


@pytest.mark.parametrize("settings", [{"priority": "learnability"}, {"column": "level", "window": 2, "gate": 0.5}])
def test_curricula_resume_over_changed_rows(settings: dict[str, Any]) -> None:
    def with_levels(levels: Sequence[int], *changed_rows: int) -> list[Example]:
        examples = with_changed_rows(numbered_examples(len(levels)), *changed_rows)
        return [replace(one, row_data={"level": level}) for one, level in zip(examples, levels, strict=True)]

    def prompts(examples: list[Example]) -> PromptSource:
        return PromptSource(examples, 0, lambda example: True, curriculum=CurriculumConfig(**settings))

    original = prompts(with_levels([1, 1, 1, 3, 3, 3]))
    for example in next_examples(original, 3):
        original.observe(example, 1.0)
    state = original.state_dict()
    data = with_levels([1, 1, 1, 3, 3, 3, 0, 2, 9], 1)
    resumed, copy = prompts(data), prompts(data)
    assert resumed.load_state_dict(state) == copy.load_state_dict(state)
    member = resumed.members[""]
    assert 1 not in member.prompt_stats
    if "column" in settings:
        assert member.levels.labels[member.levels.newest_level] == "3"  # open in the checkpoint
        assert [window.mean for window in member.levels.success_windows][1] == 1.0
    assert next_examples(resumed, 30) == next_examples(copy, 30)
    third = prompts(data)
    third.load_state_dict(resumed.state_dict())
    assert next_examples(third, 30) == next_examples(resumed, 30)


@pytest.mark.parametrize(("dataset", "options", "other_options"), [
    ("arithmetic", {"max_operand": 9}, {"max_operand": 8}),
    ("countdown", {"num_rows": 40}, {"num_rows": 40, "max_number": 50}),
    ("reasoning_gym", {"name": "chain_sum", "num_rows": 40}, {"name": "chain_sum", "num_rows": 40, "seed": 1}),
])  # fmt: skip
def test_generated_rows_have_digests(dataset: str, options: dict[str, Any], other_options: dict[str, Any]) -> None:
    first, same, others = (
        make_task(EnvConfig(dataset=dataset, options=each)).examples("train")
        for each in (options, options, other_options)
    )
    assert DataDigest.from_examples(first) == DataDigest.from_examples(same)
    with pytest.raises(ConfigError, match="not the data of the checkpoint"):
        source(others).load_state_dict(source(first).state_dict())


def test_a_state_without_digests_is_refused() -> None:
    state = source(numbered_examples(3)).state_dict()
    del state["members"]
    with pytest.raises(ConfigError, match="another version of this code wrote the checkpoint"):
        source(numbered_examples(3)).load_state_dict(state)


def test_the_order_of_members_does_not_change_the_samples() -> None:
    members = {"a": numbered_examples(5), "b": numbered_examples(7)}
    sampled_rows = []
    for names in (("a", "b"), ("b", "a")):
        mixed = MixedExamples({name: members[name] for name in names}, dict.fromkeys(names, 1.0))
        prompts = source(mixed)
        sampled_rows.append([(one.source, one.row) for one in (prompts.next_example() for _ in range(12))])
    assert sampled_rows[0] == sampled_rows[1]
