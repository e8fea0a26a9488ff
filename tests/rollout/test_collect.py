"""Groups of the environment: their order, what is observed of them, what is replaced."""

from collections.abc import Callable

import pytest

from envs.group import Group, Sampling
from tests.generating import Collecting, Listed, collector
from tests.tiny import EOS, LengthReward, numbered_examples, tiny_llama
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

REPEATS = 4


def collecting(
    candidates: int = REPEATS, attempts: int = 10, keep_group: Callable[[Group], bool] = lambda group: True
) -> Collecting:
    return collector(
        TransformersEngine(tiny_llama(), [EOS]),
        LengthReward(),
        numbered_examples(2000),
        REPEATS,
        Sampling(max_tokens=5),
        candidates=candidates,
        attempts=attempts,
        keep_group=keep_group,
    )


def refusing(*rounds: list[bool]) -> Callable[[Group], bool]:
    """Says of each group that it is asked about what is listed, round by round."""
    answers = iter([answer for of_round in rounds for answer in of_round])
    return lambda group: next(answers)


def chain(group: Group) -> list[int]:
    """Ids of a group and of those that it is in place of, the last one first."""
    return [group.group_id, *([] if group.in_place_of is None else chain(group.in_place_of))]


def test_groups_come_in_the_order_of_drawing_and_are_whole() -> None:
    groups = collecting().collect(3)
    assert [group.group_id for group in groups] == [0, 1, 2]
    assert [group.example.row for group in groups] == [0, 1, 2]
    for group in groups:
        assert group.prompt == tuple(5 + ord(letter) % 30 for letter in group.example.messages[0]["content"])
        assert group.prompt_text and len(group.completions) == REPEATS and group.left_out == []
        assert group.times.begun <= group.times.drawn <= group.times.judged
        for one in group.completions:
            assert one.sampled == [] and one.shown is not None and one.verdict is not None
            assert one.shown.text == one.text and one.verdict.score == len(one.text)
            assert len(one.token_ids) == len(one.log_probs) == len(one.policy_versions) == one.num_drawn


def test_every_group_is_observed_once_and_in_order() -> None:
    collecting_ = collecting()
    groups = collecting_.collect(3)
    source = collecting_.prompts.source
    assert isinstance(source, Listed)
    assert [example.row for example, _ in source.observed] == [0, 1, 2]
    reached = [sum(verdict.score >= 1 for verdict in group.verdicts) / REPEATS for group in groups]
    assert [success for _, success in source.observed] == pytest.approx(reached)


def test_tokens_do_not_depend_on_the_groups_beside_them() -> None:
    """Nor on an earlier collection: ids and seed fix all draws."""
    together = collecting().collect(4)
    other = collecting()
    apart = [*other.collect(1), *other.collect(3)]
    drawn = [
        [[one.token_ids for one in group.completions] for group in groups] for groups in (together, apart)
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(one.token_ids) for group in together for one in group.completions}) > 4


def test_refused_groups_are_replaced_in_their_places() -> None:
    groups = collecting(keep_group=refusing([True, False, False], [False, True], [True])).collect(3)
    assert [chain(group) for group in groups] == [[0], [5, 3, 1], [4, 2]]


def test_after_the_cap_the_last_group_stays() -> None:
    (group,) = collecting(attempts=2, keep_group=refusing([False], [False])).collect(1)
    assert chain(group) == [2, 1, 0]


def test_groups_that_are_wanted_are_those_without_dynamic_sampling() -> None:
    plain = collecting().collect(3)
    kept = collecting(keep_group=refusing([True] * 3)).collect(3)
    assert [group.completions for group in plain] == [group.completions for group in kept]


def test_oversampling_generates_more_and_keeps_a_group() -> None:
    for group in collecting(candidates=10).collect(2):
        assert (len(group.completions), len(group.left_out)) == (REPEATS, 6)


def test_it_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    collecting_ = collecting()
    collecting_.on_progress = lambda *stage: told.append(stage)
    collecting_.collect(3)
    assert told == [("collect", 1, 3), ("collect", 2, 3), ("collect", 3, 3), ("score", 0, 0)]
