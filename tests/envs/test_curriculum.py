"""Tests of curriculum sampling: frequencies, level gates, replay, source weights and checkpoint state."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig, EnvConfig
from config.schema.errors import ConfigError
from envs.example import Example, MixedExamples
from envs.prompts import PromptQueue, PromptSource
from envs.task import make_task
from tests.envs.test_curriculum_priorities import chi_square_ratio, rows
from tests.group_collection import next_examples


def source(
    examples: Sequence[Example], keep: Callable[[Example], bool] = lambda example: True, **settings: Any
) -> PromptSource:
    return PromptSource(examples, 0, keep, curriculum=CurriculumConfig(**settings))


def sample_and_observe(prompts: PromptSource, count: int, success: Callable[[Example], float]) -> list[Example]:
    """Samples examples one after the other and observes the success of each before the next."""
    examples = []
    for _ in range(count):
        examples += next_examples(prompts, 1)
        prompts.observe(examples[-1], success(examples[-1]))
    return examples


def source_with_success(successes: dict[int, float], **settings: Any) -> PromptSource:
    """Returns a source of rows 0 to 3 with observed success of some rows."""
    prompts = source(rows(1, 1, 1, 1), memory=0.0, **settings)
    for row, success in successes.items():
        prompts.observe(rows(1, 1, 1, 1)[row], success)
    return prompts


@pytest.mark.parametrize(
    ("rule", "priorities"), [("learnability", [0.0, 0.1875, 0.25, 0.16]), ("failure", [0.0, 0.25, 0.5, 0.8])]
)
def test_prompts_are_sampled_by_their_own_success_above_a_floor(rule: str, priorities: list[float]) -> None:
    """Row 3 has no sample, so its success is the prior, 0.2."""
    successes = {0: 1.0, 1: 0.75, 2: 0.5}
    counts: Counter[int] = Counter()
    prompts = source_with_success(successes, priority=rule, floor=0.2, prior=0.2)
    for _ in range(5_000):
        (example,) = next_examples(prompts, 1)
        counts[example.row] += 1
        stats = prompts.members[""].prompt_stats[example.row]
        stats.groups_in_flight = 0  # as before the sample
        if example.row == 3:
            del prompts.members[""].prompt_stats[3]
        prompts.members[""].prompt_sampler.update_weight(example.row)
    expected = {row: 0.2 / 4 + 0.8 * value / sum(priorities) for row, value in enumerate(priorities)}
    assert chi_square_ratio(counts, expected) < 1
    assert chi_square_ratio(counts, dict.fromkeys(range(4), 0.25)) > 10


def test_the_weight_of_a_sample_is_its_inverse_probability() -> None:
    """The weight is the probability under uniform sampling over the actual probability."""
    prompts = source_with_success({0: 1.0, 1: 0.75, 2: 0.5, 3: 0.0}, priority="learnability", floor=0.2)
    expected = {
        0: 1 / 0.2, 1: 1 / (0.2 + 3.2 * 0.1875 / 0.4375), 2: 1 / (0.2 + 3.2 * 0.25 / 0.4375), 3: 1 / 0.2,
    }  # fmt: skip
    sampler, rng = prompts.members[""].prompt_sampler, random.Random(0)
    found = dict(sampler.next_row(rng) for _ in range(500))
    assert found == pytest.approx(expected)


def test_the_gate_weights_all_prompts_equally_whichever_are_preferred() -> None:
    """Success of a level is 0.5 if half of its prompts are always solved.

    The other half is never solved and sampled eight times as often.
    """
    examples = rows(*[1] * 200, 2)
    settings: dict[str, Any] = {"column": "level", "window": 2000, "gate": 1.0, "memory": 0.0, "prior": 0.0}
    prompts = source(examples, priority="failure", floor=0.2, **settings)
    examples = sample_and_observe(prompts, 4000, lambda example: float(example.row < 100))
    newest = [float(example.row < 100) for example in examples[-2000:]]
    assert sum(newest) / 2000 < 0.2
    assert prompts.metrics()["curriculum/success/1"] == pytest.approx(0.5, abs=0.06)


def test_recent_success_moves_from_the_prior_towards_the_newest_group() -> None:
    prompts = source(rows(1, 1), memory=0.75, prior=0.4)
    for success in (1.0, 0.0):
        prompts.observe(rows(1)[0], success)
    assert prompts.members[""].prompt_stats[0].recent_success == pytest.approx(0.75 * (0.75 * 0.4 + 0.25) + 0.0)


def test_a_prompt_in_flight_is_not_sampled_again() -> None:
    prompts = source(rows(*[1] * 8), priority="learnability")
    first = next_examples(prompts, 8)
    assert sorted(example.row for example in first) == list(range(8))
    assert next_examples(prompts, 1)[0].row in range(8)  # all rows are in flight
    prompts.observe(first[3], 0.5)
    assert next_examples(prompts, 1)[0].row == first[3].row


def test_levels_open_one_after_the_other_and_epochs_go_on() -> None:
    examples = rows(*[1, 2, 3] * 4)
    prompts = source(examples, column="level", gate=0.9, window=4)
    assert {example.row % 3 for example in sample_and_observe(prompts, 8, lambda example: 0.5)} == {0}
    assert prompts.metrics()["curriculum/level"] == 1.0
    sample_and_observe(prompts, 4, lambda example: 1.0)
    assert prompts.metrics()["curriculum/level"] == 2.0
    later = sample_and_observe(prompts, 40, lambda example: float(example.row % 3 == 0))
    assert {example.row % 3 for example in later} == {0, 1}
    found = prompts.metrics()
    assert (found["curriculum/success/1"], found["curriculum/success/2"]) == (1.0, 0.0)
    assert "curriculum/success/3" not in found
    every_epoch = Counter(example.row for example in later[-16:])
    assert set(every_epoch.values()) == {2} and len(every_epoch) == 8


def test_only_the_newest_level_is_sampled_and_easier_levels_come_back_as_replay() -> None:
    examples = rows(*[1, 2] * 5)
    prompts = source(examples, column="level", gate=0.5, window=5, open="newest", replay=0.25)
    sample_and_observe(prompts, 60, lambda example: float(example.row % 2 == 0))
    later = sample_and_observe(prompts, 4000, lambda example: float(example.row % 2 == 0))
    of_level = Counter(example.row % 2 for example in later)
    assert chi_square_ratio(of_level, {0: 0.25, 1: 0.75}) < 1
    replays = Counter(example.row for example in later if example.row % 2 == 0)
    assert chi_square_ratio(replays, dict.fromkeys(range(0, 10, 2), 0.2)) < 1
    assert prompts.metrics()["curriculum/solved"] == 5.0


def test_replay_notices_what_was_forgotten() -> None:
    prompts = source(rows(*range(20)), replay=0.5, window=10, solved=0.75)
    sample_and_observe(prompts, 100, lambda example: 0.75 if example.row < 4 else 0.7)
    found = prompts.metrics()
    assert found["curriculum/solved"] == 4.0 and found["curriculum/replay"] == 0.75
    sample_and_observe(prompts, 100, lambda example: 0.0)
    found = prompts.metrics()
    assert found["curriculum/solved"] == 4.0 and found["curriculum/replay"] == 0.0


def test_replays_do_not_count_for_the_gate() -> None:
    """Replays of the only solved row, half of all samples, must not open a level."""
    prompts = source(rows(*[1] * 9, 2), column="level", gate=0.3, window=9, replay=0.5)
    sample_and_observe(prompts, 500, lambda example: float(example.row == 0))
    assert prompts.metrics()["curriculum/level"] == 1.0


def mixture_source(**settings: Any) -> PromptSource:
    members = {name: rows(*range(7)) for name in ("easy", "middling", "hard")}
    return source(MixedExamples(members, {"easy": 2.0, "middling": 1.0, "hard": 1.0}), **settings)


SUCCESS = {"easy": 0.9, "middling": 0.5, "hard": 0.0}


def test_weights_of_sources_follow_their_success_above_a_floor() -> None:
    """Products of base shares 1/2, 1/4, 1/4 and priorities: 0.045, 0.0625, 0."""
    prompts = mixture_source(sources="learnability", floor=0.2, window=20)
    sample_and_observe(prompts, 200, lambda example: SUCCESS[example.source])
    expected = {
        "easy": 0.2 / 2 + 0.8 * 0.045 / 0.1075, "middling": 0.2 / 4 + 0.8 * 0.0625 / 0.1075, "hard": 0.2 / 4,
    }  # fmt: skip
    found = prompts.metrics()
    assert {name: found[f"curriculum/weight/{name}"] for name in SUCCESS} == pytest.approx(expected)
    assert {name: found[f"curriculum/success/{name}"] for name in SUCCESS} == pytest.approx(SUCCESS)
    counts = Counter(example.source for example in sample_and_observe(prompts, 1000, lambda e: SUCCESS[e.source]))
    for name, share in expected.items():
        assert abs(counts[name] - 1000 * share) < 2


def test_before_any_verdict_sources_have_their_base_weights() -> None:
    prompts = mixture_source(sources="failure")
    counts = Counter(example.source for example in next_examples(prompts, 400))
    assert counts == {"easy": 200, "middling": 100, "hard": 100}


def test_default_settings_sample_in_the_order_of_epochs() -> None:
    """The order of an epoch is a shuffle of all rows by seed and epoch."""
    expected: list[int] = []
    for epoch in range(4):
        order = list(range(30))
        random.Random(f"0/{epoch}").shuffle(order)
        expected += order
    prompts = source(rows(*range(30)))
    found = sample_and_observe(prompts, 120, lambda example: float(example.row % 2))
    assert [example.row for example in found] == expected
    assert set(prompts.metrics()) == {"prompts/too_long"}


RULES: dict[str, dict[str, Any]] = {
    "levels": {"column": "level", "gate": 0.4, "window": 8},
    "newest": {"column": "level", "gate": 0.4, "window": 8, "open": "newest", "replay": 0.3},
    "learnability": {"priority": "learnability"},
    "failure": {"priority": "failure", "replay": 0.2, "column": "level", "gate": 0.4, "window": 8},
    "sources": {"sources": "learnability", "priority": "learnability", "replay": 0.1, "window": 8},
}


class SimulatedSchedule:
    """Samples and verdicts in a random order, as in the overlapped schedule of `grpo_async.py`."""

    def __init__(self, settings: dict[str, Any], seed: int) -> None:
        examples: Any = rows(*[1, 2, 3] * 6)
        if "sources" in settings:
            examples = MixedExamples({"a": rows(*[1] * 5), "b": rows(*[2] * 9)}, {"a": 1.0, "b": 2.0})
        self.make_queue = lambda: PromptQueue(source(examples, lambda example: example.row != 4, **settings))
        self.queue, self.rng = self.make_queue(), random.Random(seed)
        self.groups_in_flight: list[tuple[int, Example]] = []
        self.sampled_rows: list[tuple[str, int]] = []

    def next_event(self) -> None:
        """Samples a prompt, or observes the success of a group in flight."""
        if len(self.groups_in_flight) < 6 and self.rng.random() < 0.6:
            self.groups_in_flight.append(self.queue.next_prompt())
            self.sampled_rows.append((self.groups_in_flight[-1][1].source, self.groups_in_flight[-1][1].row))
        elif self.groups_in_flight:
            _, example = self.groups_in_flight.pop(self.rng.randrange(len(self.groups_in_flight)))
            self.queue.observe(example, self.rng.choice((0.0, 0.5, 1.0)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("turns", [0, 7, 60, 400])
def test_a_restored_state_samples_the_same_prompts(rule: str, turns: int) -> None:
    """The same verdicts in the same order lead to the same prompts and metrics."""
    uninterrupted = SimulatedSchedule(RULES[rule], seed=turns)
    for _ in range(turns):
        uninterrupted.next_event()
    restored = SimulatedSchedule(RULES[rule], seed=turns)
    restored.queue.load_state_dict(uninterrupted.queue.state_dict())
    restored.rng.setstate(uninterrupted.rng.getstate())
    restored.groups_in_flight = list(uninterrupted.groups_in_flight)
    restored.sampled_rows = list(uninterrupted.sampled_rows)
    for _ in range(300):
        uninterrupted.next_event()
        restored.next_event()
    assert restored.sampled_rows == uninterrupted.sampled_rows
    assert restored.queue.source.metrics() == uninterrupted.queue.source.metrics()
    assert restored.queue.state_dict() == uninterrupted.queue.state_dict()


@pytest.mark.parametrize("rule", RULES)
def test_prompts_in_flight_at_a_kill_are_sampled_first_after_a_resume(rule: str) -> None:
    schedule = SimulatedSchedule(RULES[rule], seed=1)
    for _ in range(100):
        schedule.next_event()
    outstanding = [example for _, example in schedule.groups_in_flight]
    queue = schedule.make_queue()
    queue.load_state_dict(schedule.queue.state_dict(outstanding=outstanding))
    assert [example for _, example in queue.next_prompts(len(outstanding))] == outstanding
    members = queue.source.members
    assert sum(member.num_sampled for member in members.values()) == len(schedule.sampled_rows)
    groups_in_flight = {
        (name, row): member.prompt_stats[index].groups_in_flight
        for name, member in members.items()
        for row, index in member.row_indices.items()
        if index in member.prompt_stats and member.prompt_stats[index].groups_in_flight
    }
    assert groups_in_flight == Counter((example.source, example.row) for example in outstanding)


def test_a_level_of_prompts_that_are_all_too_long_is_passed() -> None:
    examples = rows(1, 1, 2, 2, 3, 3)
    for settings in ({}, {"open": "newest"}, {"priority": "learnability"}):
        middle = source(examples, lambda example: example.row // 2 != 1, column="level", gate=0.0, window=1, **settings)
        found = {example.row for example in sample_and_observe(middle, 50, lambda example: 1.0)}
        assert found >= {4, 5} and not found & {2, 3}
        first = source(examples, lambda example: example.row > 3, column="level", **settings)
        assert {example.row for example in next_examples(first, 4)} == {4, 5}
        with pytest.raises(ConfigError, match=r"all 6 prompts are longer than env\.max_prompt_tokens"):
            next_examples(source(examples, lambda example: False, column="level", **settings), 1)


def test_generated_tasks_have_columns() -> None:
    for dataset, options, column, values in (
        ("arithmetic", {"max_operand": 12}, "operand", set(range(13))),
        ("countdown", {"num_rows": 60}, "numbers", {3, 4}),
        ("reasoning_gym", {"name": "chain_sum", "num_rows": 60}, "num_terms", {2, 3, 4, 5, 6}),
    ):
        env = EnvConfig(dataset=dataset, options=options, curriculum=CurriculumConfig(column=column))
        examples = make_task(env).examples("train")
        assert {example.row_data[column] for example in examples} == values
        assert all(set(example.row_data) == {column} for example in examples)
        prompts = source(examples, column=column, gate=0.0, window=1)
        sampled_examples = sample_and_observe(prompts, 3 * len(values), lambda example: 1.0)
        assert sampled_examples[0].row_data[column] == min(values)
    plain = make_task(EnvConfig(dataset="arithmetic")).examples("train")
    assert not any(example.row_data for example in plain)


def test_a_column_of_some_members_of_a_mixture(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}?", "answer": "{n}", "grade": {n % 3}}}\n' for n in range(9)))
    mine = {"dataset": "jsonl", "data_files": str(file)}
    examples_by_column = {}
    for column in ({"mine": "grade"}, "grade"):
        curriculum = CurriculumConfig(column=column)
        env = EnvConfig(dataset="mixture", mixture={"arithmetic": 1, "mine": mine}, curriculum=curriculum)
        examples_by_column[str(column)] = (make_task(env).examples("train"), curriculum)
    examples, curriculum = examples_by_column["{'mine': 'grade'}"]
    prompts = PromptSource(examples, 0, lambda example: True, curriculum=curriculum)
    own_examples = [example for example in next_examples(prompts, 40) if example.source == "mine"]
    assert {example.row % 3 for example in own_examples} == {0}
    assert prompts.metrics()["curriculum/level/mine"] == 1.0
    examples, curriculum = examples_by_column["grade"]
    lacking = r"row \d+ of arithmetic has no such column \(columns: operand, sum\)\. .*\{MEMBER: column\}"
    with pytest.raises(ConfigError, match=lacking):
        PromptSource(examples, 0, lambda example: True, curriculum=curriculum)


def test_difficulty_and_levels_go_together() -> None:
    curriculum = CurriculumConfig(column="level", gate=0.5, window=3)
    prompts = PromptSource(rows(1, 1, 1, 2), 0, lambda example: True, DifficultyConfig(high=0.9), curriculum=curriculum)
    assert {e.row for e in sample_and_observe(prompts, 3, lambda e: float(e.row == 0))} == {0, 1, 2}
    assert prompts.metrics()["curriculum/level"] == 1.0
    assert {e.row for e in sample_and_observe(prompts, 2, lambda e: 0.0)} == {1, 2}
