"""What a batch says of its engines, and what they are asked about it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from envs.group import Group, SampledCompletion, Sampling
from run.engine_log_probs import Question, drawn_tokens, own_tokens, question_about
from tests.groups import make_completion, make_group
from training.batch import Batch, collate

VERSION = 7


def by(
    engine: str, versions: int | Sequence[int], tokens: int = 4, log_prob: float = -1.0
) -> SampledCompletion:
    one = make_completion(tokens, versions=versions, log_probs=log_prob)
    one.engine = engine
    return one


def batch_of(*groups: Group) -> Batch:
    batch = collate(groups)
    batch.mask = batch.tokens.loss_mask.clone()
    return batch


def asked(*groups: Group, enough: int = 4, count: int = 1, length: int = 1) -> Question | None:
    return question_about(batch_of(*groups), groups, VERSION, enough, count, length)


def test_tokens_of_the_present_weights_are_counted_by_engine() -> None:
    groups = [
        make_group(1, [by("a", VERSION, 3), by("b", [6, 6, 7, 7])]),
        make_group(2, [by("a", [6, 7, 7, 7]), by("c", 6)]),
    ]
    batch = batch_of(*groups)
    assert own_tokens(batch, groups, VERSION) == {"a": 6, "b": 2}
    batch.mask[0] = False
    assert own_tokens(batch, groups, VERSION) == {"a": 3, "b": 2}, "the learner says nothing of the others"
    log_ratio = torch.arange(16.0).reshape(4, 4)
    drawn = drawn_tokens(batch, groups, log_ratio, VERSION)
    assert {name: one.gaps.tolist() for name, one in drawn.items()} == {"b": [6, 7], "a": [9, 10, 11]}
    assert drawn_tokens(batch, groups, log_ratio, VERSION + 1) == {}


def test_rows_that_the_weights_before_drew_are_asked_about() -> None:
    """Whole, in the loss, and of no other version: the cheapest for each token."""
    long = make_group(1, [by("a", 6), by("a", [6, 6, 6, 7]), by("a", 5)], prompt=range(1, 31))
    short = make_group(2, [by("b", 5), by("b", 6, 4, -0.5), by("b", 6, 2)])
    question = asked(long, short)
    assert question is not None and question.sequences == [[5, 6, 1, 2, 3, 4]]
    (row,) = question.rows
    assert row.engine == [-0.5] * 4 and row.learner is None
    question = asked(long, short, enough=7)
    assert question is not None and question.places == [4, 5, 0]
    assert asked(long, short, enough=11) is None, "there are no more"
    assert asked(make_group(1, [by("a", VERSION)])) is None


def test_older_rows_are_asked_about_where_the_weights_before_drew_too_few() -> None:
    groups = [make_group(1, [by("a", 3), by("a", 5), by("a", 6, 2), by("a", 4), by("a", 5)])]
    for enough, places, age in ((2, [2], 1), (3, [1], 2), (8, [1, 4], 2)):
        question = asked(*groups, enough=enough)
        assert question is not None and (question.places, question.age) == (places, age)
        assert question.answer(dict, torch.zeros(5, 4)).age == age
    assert asked(*groups, enough=9) is None


def test_a_row_is_cut_where_it_has_given_its_share() -> None:
    group = make_group(1, [by("a", 6, 100) for _ in range(5)])
    for enough, count, length, lengths in ((24, 1, 24, [26]), (64, 3, 40, [40] * 3), (64, 3, 8, [24] * 3)):
        question = asked(group, enough=enough, count=count, length=length)
        assert question is not None and [len(one) for one in question.sequences] == lengths


def test_rows_that_reach_past_a_cache_block_come_first() -> None:
    groups = [make_group(1, [by("a", 6, 20)]), make_group(2, [by("a", 6, 20)], prompt=range(1, 31))]
    for length, place in ((22, 0), (23, 1), (60, 0)):
        question = asked(*groups, length=length)
        assert question is not None and question.places == [place]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_engines_score_no_other_distribution_than_the_whole_at_temperature_one(
    sampling: dict[str, float],
) -> None:
    group = make_group(1, [by("a", 6)])
    assert asked(group) is not None
    assert asked(replace(group, sampling=Sampling(**sampling))) is None
    assert asked(make_group(1, [by("a", 6, 4)], prompt=[1] * 1021)) is None, "nor 1,025 tokens at once"


def test_an_answer_stands_beside_what_the_learner_says() -> None:
    group = make_group(1, [by("a", 5), by("a", 6, 4, -0.5)])
    question = asked(group, enough=3)
    assert question is not None
    scores = {"a": [[-9.0, -0.4, -0.4, -0.4]]}
    answer = question.answer(lambda: scores, torch.tensor([[9.0] * 4, [0.1, 0.2, 0.3, 9.0]]))
    assert answer.scores == scores and answer.rows == question.rows
    assert answer.learner.tolist() == pytest.approx([-0.4, -0.3, -0.2])
