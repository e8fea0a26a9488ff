"""Which prompts a curriculum draws: frequencies beside probabilities, gates, replay, sources, and its state."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig, EnvConfig
from config.schema.errors import ConfigError
from envs.example import Example, Mixed
from envs.prompts import PromptQueue, PromptSource
from envs.task import make_task
from tests.envs.test_curriculum_worth import far_off, rows
from tests.generating import draw_from


def source(
    examples: Sequence[Example], keep: Callable[[Example], bool] = lambda example: True, **settings: Any
) -> PromptSource:
    return PromptSource(examples, 0, keep, curriculum=CurriculumConfig(**settings))


def drawn_and_judged(prompts: PromptSource, count: int, success: Callable[[Example], float]) -> list[Example]:
    """One after the other, each judged before the next is drawn."""
    examples = []
    for _ in range(count):
        examples += draw_from(prompts, 1)
        prompts.observe(examples[-1], success(examples[-1]))
    return examples


def seen(successes: dict[int, float], **settings: Any) -> PromptSource:
    """Rows 0 to 3, of which some have a success; their windows and weights as after even draws."""
    prompts = source(rows(1, 1, 1, 1), memory=0.0, **settings)
    for row, success in successes.items():
        prompts.observe(rows(1, 1, 1, 1)[row], success)
    return prompts


@pytest.mark.parametrize(
    ("rule", "worth"), [("learnability", [0.0, 0.1875, 0.25, 0.16]), ("failure", [0.0, 0.25, 0.5, 0.8])]
)
def test_prompts_are_drawn_by_their_own_success_above_a_floor(rule: str, worth: list[float]) -> None:
    """Rows 0 to 2 have 1, 0.75 and 0.5; row 3 was never asked and has the prior, 0.2."""
    successes = {0: 1.0, 1: 0.75, 2: 0.5}
    counts: Counter[int] = Counter()
    prompts = seen(successes, priority=rule, floor=0.2, prior=0.2)
    for _ in range(5_000):
        (example,) = draw_from(prompts, 1)
        counts[example.row] += 1
        known = prompts.members[""].asked[example.row]
        known.flying = 0  # as if it had not been asked
        if example.row == 3:
            del prompts.members[""].asked[3]
        prompts.members[""].chooser.changed(example.row)
    expected = {row: 0.2 / 4 + 0.8 * value / sum(worth) for row, value in enumerate(worth)}
    assert far_off(counts, expected) < 1
    assert far_off(counts, dict.fromkeys(range(4), 0.25)) > 10


def test_the_weight_of_a_draw_is_one_over_its_chance() -> None:
    """Of four rows: 4 x (0.2 / 4 + 0.8 x 0.25 / 0.4375) = 2.0286 for row 2, whose success is 0.5."""
    prompts = seen({0: 1.0, 1: 0.75, 2: 0.5, 3: 0.0}, priority="learnability", floor=0.2)
    expected = {
        0: 1 / 0.2, 1: 1 / (0.2 + 3.2 * 0.1875 / 0.4375), 2: 1 / (0.2 + 3.2 * 0.25 / 0.4375), 3: 1 / 0.2,
    }  # fmt: skip
    chooser, chance = prompts.members[""].chooser, random.Random(0)
    found = dict(chooser.next(chance) for _ in range(500))
    assert found == pytest.approx(expected)


def test_the_gate_sees_all_prompts_alike_whichever_are_preferred() -> None:
    """Half of the prompts are always solved and half never: the success of the level is 0.5, though the unsolved ones
    are drawn eight times as often."""
    examples = rows(*[1] * 200, 2)
    settings: dict[str, Any] = {"column": "level", "window": 2000, "gate": 1.0, "memory": 0.0, "prior": 0.0}
    prompts = source(examples, priority="failure", floor=0.2, **settings)
    asked = drawn_and_judged(prompts, 4000, lambda example: float(example.row < 100))
    newest = [float(example.row < 100) for example in asked[-2000:]]
    assert sum(newest) / 2000 < 0.2
    assert prompts.metrics()["curriculum/success/1"] == pytest.approx(0.5, abs=0.06)


def test_recent_success_moves_from_the_prior_towards_the_newest_group() -> None:
    prompts = source(rows(1, 1), memory=0.75, prior=0.4)
    for success in (1.0, 0.0):
        prompts.observe(rows(1)[0], success)
    assert prompts.members[""].asked[0].recent == pytest.approx(0.75 * (0.75 * 0.4 + 0.25) + 0.0)


def test_a_prompt_that_is_being_answered_is_not_drawn_again() -> None:
    prompts = source(rows(*[1] * 8), priority="learnability")
    first = draw_from(prompts, 8)
    assert sorted(example.row for example in first) == list(range(8))
    assert draw_from(prompts, 1)[0].row in range(8)  # there is no other
    prompts.observe(first[3], 0.5)
    assert draw_from(prompts, 1)[0].row == first[3].row


def test_levels_open_one_after_the_other_and_epochs_go_on() -> None:
    examples = rows(*[1, 2, 3] * 4)
    prompts = source(examples, column="level", gate=0.9, window=4)
    assert {example.row % 3 for example in drawn_and_judged(prompts, 8, lambda example: 0.5)} == {0}
    assert prompts.metrics()["curriculum/level"] == 1.0
    drawn_and_judged(prompts, 4, lambda example: 1.0)
    assert prompts.metrics()["curriculum/level"] == 2.0
    later = drawn_and_judged(prompts, 40, lambda example: float(example.row % 3 == 0))
    assert {example.row % 3 for example in later} == {0, 1}
    found = prompts.metrics()
    assert (found["curriculum/success/1"], found["curriculum/success/2"]) == (1.0, 0.0)
    assert "curriculum/success/3" not in found
    every_epoch = Counter(example.row for example in later[-16:])
    assert set(every_epoch.values()) == {2} and len(every_epoch) == 8


def test_only_the_newest_level_is_drawn_and_easier_ones_come_back_as_replay() -> None:
    examples = rows(*[1, 2] * 5)
    prompts = source(examples, column="level", gate=0.5, window=5, open="newest", replay=0.25)
    drawn_and_judged(prompts, 60, lambda example: float(example.row % 2 == 0))
    later = drawn_and_judged(prompts, 4000, lambda example: float(example.row % 2 == 0))
    of_level = Counter(example.row % 2 for example in later)
    assert far_off(of_level, {0: 0.25, 1: 0.75}) < 1
    again = Counter(example.row for example in later if example.row % 2 == 0)
    assert far_off(again, dict.fromkeys(range(0, 10, 2), 0.2)) < 1
    assert prompts.metrics()["curriculum/solved"] == 5.0


def test_replay_notices_what_was_forgotten() -> None:
    prompts = source(rows(*range(20)), replay=0.5, window=10, solved=0.75)
    drawn_and_judged(prompts, 100, lambda example: 0.75 if example.row < 4 else 0.7)
    found = prompts.metrics()
    assert found["curriculum/solved"] == 4.0 and found["curriculum/replay"] == 0.75
    drawn_and_judged(prompts, 100, lambda example: 0.0)
    found = prompts.metrics()
    assert found["curriculum/solved"] == 4.0 and found["curriculum/replay"] == 0.0


def test_replays_do_not_count_for_the_gate() -> None:
    """Row 0 alone is ever solved. Half of the draws ask it again, which must not make its level look mastered."""
    prompts = source(rows(*[1] * 9, 2), column="level", gate=0.3, window=9, replay=0.5)
    drawn_and_judged(prompts, 500, lambda example: float(example.row == 0))
    assert prompts.metrics()["curriculum/level"] == 1.0


def mixed(**settings: Any) -> PromptSource:
    members = {name: rows(*range(7)) for name in ("easy", "middling", "hard")}
    return source(Mixed(members, {"easy": 2.0, "middling": 1.0, "hard": 1.0}), **settings)


SUCCESS = {"easy": 0.9, "middling": 0.5, "hard": 0.0}


def test_weights_of_sources_follow_their_success_above_a_floor() -> None:
    """Base 1/2, 1/4, 1/4; worth 0.09, 0.25, 0: favoured 0.045 : 0.0625 : 0."""
    prompts = mixed(sources="learnability", floor=0.2, window=20)
    drawn_and_judged(prompts, 200, lambda example: SUCCESS[example.source])
    expected = {
        "easy": 0.2 / 2 + 0.8 * 0.045 / 0.1075, "middling": 0.2 / 4 + 0.8 * 0.0625 / 0.1075, "hard": 0.2 / 4,
    }  # fmt: skip
    found = prompts.metrics()
    assert {name: found[f"curriculum/weight/{name}"] for name in SUCCESS} == pytest.approx(expected)
    assert {name: found[f"curriculum/success/{name}"] for name in SUCCESS} == pytest.approx(SUCCESS)
    counts = Counter(
        example.source for example in drawn_and_judged(prompts, 1000, lambda e: SUCCESS[e.source])
    )
    for name, share in expected.items():
        assert abs(counts[name] - 1000 * share) < 2


def test_before_anything_is_judged_sources_have_their_own_weights() -> None:
    prompts = mixed(sources="failure")
    counts = Counter(example.source for example in draw_from(prompts, 400))
    assert counts == {"easy": 200, "middling": 100, "hard": 100}


def test_nothing_set_is_the_plain_order_of_epochs() -> None:
    """The order as it always was, written out: a shuffle of all rows by seed and epoch."""
    expected: list[int] = []
    for epoch in range(4):
        order = list(range(30))
        random.Random(f"0/{epoch}").shuffle(order)
        expected += order
    prompts = source(rows(*range(30)))
    found = drawn_and_judged(prompts, 120, lambda example: float(example.row % 2))
    assert [example.row for example in found] == expected
    assert set(prompts.metrics()) == {"prompts/left_out"}


RULES: dict[str, dict[str, Any]] = {
    "levels": {"column": "level", "gate": 0.4, "window": 8},
    "newest": {"column": "level", "gate": 0.4, "window": 8, "open": "newest", "replay": 0.3},
    "learnability": {"priority": "learnability"},
    "failure": {"priority": "failure", "replay": 0.2, "column": "level", "gate": 0.4, "window": 8},
    "sources": {"sources": "learnability", "priority": "learnability", "replay": 0.1, "window": 8},
}


class Replayable:
    """Draws and verdicts in an order of their own, as `grpo_async.py` has them: late, and one overtakes another."""

    def __init__(self, settings: dict[str, Any], seed: int) -> None:
        examples: Any = rows(*[1, 2, 3] * 6)
        if "sources" in settings:
            examples = Mixed({"a": rows(*[1] * 5), "b": rows(*[2] * 9)}, {"a": 1.0, "b": 2.0})
        self.make = lambda: PromptQueue(source(examples, lambda example: example.row != 4, **settings))
        self.queue, self.chance = self.make(), random.Random(seed)
        self.flying: list[tuple[int, Example]] = []
        self.began: list[tuple[str, int]] = []

    def turn(self) -> None:
        if len(self.flying) < 6 and self.chance.random() < 0.6:
            self.flying.append(self.queue.begin_one())
            self.began.append((self.flying[-1][1].source, self.flying[-1][1].row))
        elif self.flying:
            _, example = self.flying.pop(self.chance.randrange(len(self.flying)))
            self.queue.observe(example, self.chance.choice((0.0, 0.5, 1.0)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("turns", [0, 7, 60, 400])
def test_a_restored_state_draws_what_the_first_one_does(rule: str, turns: int) -> None:
    """The same verdicts in the same order: the same prompts, and the same metrics."""
    whole = Replayable(RULES[rule], seed=turns)
    for _ in range(turns):
        whole.turn()
    restored = Replayable(RULES[rule], seed=turns)
    restored.queue.load_state_dict(whole.queue.state_dict())
    restored.chance.setstate(whole.chance.getstate())
    restored.flying, restored.began = list(whole.flying), list(whole.began)
    for _ in range(300):
        whole.turn()
        restored.turn()
    assert restored.began == whole.began
    assert restored.queue.source.metrics() == whole.queue.source.metrics()
    assert restored.queue.state_dict() == whole.queue.state_dict()


@pytest.mark.parametrize("rule", RULES)
def test_what_was_in_flight_at_a_kill_is_drawn_first_and_nothing_is_lost(rule: str) -> None:
    whole = Replayable(RULES[rule], seed=1)
    for _ in range(100):
        whole.turn()
    out = [example for _, example in whole.flying]
    queue = whole.make()
    queue.load_state_dict(whole.queue.state_dict(outstanding=out))
    assert [example for _, example in queue.begin(len(out))] == out
    members = queue.source.members
    assert sum(member.drawn for member in members.values()) == len(whole.began)
    flying = {
        (name, row): member.asked[place].flying
        for name, member in members.items()
        for row, place in member.places.items()
        if place in member.asked and member.asked[place].flying
    }
    assert flying == Counter((example.source, example.row) for example in out)


def test_a_level_of_prompts_that_are_all_too_long_is_passed() -> None:
    examples = rows(1, 1, 2, 2, 3, 3)
    for settings in ({}, {"open": "newest"}, {"priority": "learnability"}):
        middle = source(
            examples, lambda example: example.row // 2 != 1, column="level", gate=0.0, window=1, **settings
        )
        found = {example.row for example in drawn_and_judged(middle, 50, lambda example: 1.0)}
        assert found >= {4, 5} and not found & {2, 3}
        first = source(examples, lambda example: example.row > 3, column="level", **settings)
        assert {example.row for example in draw_from(first, 4)} == {4, 5}
        with pytest.raises(ConfigError, match=r"all 6 prompts are longer than env\.max_prompt_tokens"):
            draw_from(source(examples, lambda example: False, column="level", **settings), 1)


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
        drawn = drawn_and_judged(prompts, 3 * len(values), lambda example: 1.0)
        assert drawn[0].row_data[column] == min(values)
    plain = make_task(EnvConfig(dataset="arithmetic")).examples("train")
    assert not any(example.row_data for example in plain)


def test_a_column_of_some_members_of_a_mixture(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}?", "answer": "{n}", "grade": {n % 3}}}\n' for n in range(9)))
    mine = {"dataset": "jsonl", "data_files": str(file)}
    made = {}
    for column in ({"mine": "grade"}, "grade"):
        curriculum = CurriculumConfig(column=column)
        env = EnvConfig(dataset="mixture", mixture={"arithmetic": 1, "mine": mine}, curriculum=curriculum)
        made[str(column)] = (make_task(env).examples("train"), curriculum)
    examples, curriculum = made["{'mine': 'grade'}"]
    prompts = PromptSource(examples, 0, lambda example: True, curriculum=curriculum)
    asked = [example for example in draw_from(prompts, 40) if example.source == "mine"]
    assert {example.row % 3 for example in asked} == {0}
    assert prompts.metrics()["curriculum/level/mine"] == 1.0
    examples, curriculum = made["grade"]
    lacking = r"row \d+ of arithmetic has no such column; it has operand, sum\. .*\{MEMBER: column\}"
    with pytest.raises(ConfigError, match=lacking):
        PromptSource(examples, 0, lambda example: True, curriculum=curriculum)


def test_difficulty_and_levels_go_together() -> None:
    curriculum = CurriculumConfig(column="level", gate=0.5, window=3)
    prompts = PromptSource(
        rows(1, 1, 1, 2), 0, lambda example: True, DifficultyConfig(high=0.9), curriculum=curriculum
    )
    assert {e.row for e in drawn_and_judged(prompts, 3, lambda e: float(e.row == 0))} == {0, 1, 2}
    assert prompts.metrics()["curriculum/level"] == 1.0
    assert {e.row for e in drawn_and_judged(prompts, 2, lambda e: 0.0)} == {1, 2}
