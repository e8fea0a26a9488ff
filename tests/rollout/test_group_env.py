"""Tests of the environment's groups: their order, observations and replacements."""

from collections.abc import Callable

import pytest

from envs.group import Group, Sampling
from tests.group_collection import GroupCollector, ListPromptSource, make_group_collector
from tests.tiny_models import EOS, LengthReward, numbered_examples, tiny_llama
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

REPEATS = 4


def make_collector(
    candidates: int = REPEATS, attempts: int = 10, keep_group: Callable[[Group], bool] = lambda group: True
) -> GroupCollector:
    return make_group_collector(
        TransformersEngine(tiny_llama(), [EOS]),
        LengthReward(),
        numbered_examples(2000),
        REPEATS,
        Sampling(max_tokens=5),
        candidates=candidates,
        attempts=attempts,
        keep_group=keep_group,
    )


def scripted_keep_group(*rounds: list[bool]) -> Callable[[Group], bool]:
    """Returns a `keep_group` with scripted answers, round by round."""
    answers = iter([answer for of_round in rounds for answer in of_round])
    return lambda group: next(answers)


def replaced_ids(group: Group) -> list[int]:
    """Returns the ids of a group and of the groups that it replaces, latest first."""
    return [group.group_id, *([] if group.replaces is None else replaced_ids(group.replaces))]


def test_groups_are_complete_and_in_sampling_order() -> None:
    groups = make_collector().collect(3)
    assert [group.group_id for group in groups] == [0, 1, 2]
    assert [group.example.row for group in groups] == [0, 1, 2]
    for group in groups:
        assert group.prompt == tuple(5 + ord(letter) % 30 for letter in group.example.messages[0]["content"])
        assert group.prompt_text and len(group.completions) == REPEATS and group.unselected_candidates == []
        assert group.times.started_at <= group.times.sampled_at <= group.times.scored_at
        for one in group.completions:
            assert one.sampled_mask == [] and one.reward_input is not None and one.verdict is not None
            assert one.reward_input.text == one.text and one.verdict.score == len(one.text)
            assert len(one.token_ids) == len(one.log_probs) == len(one.policy_versions) == one.num_sampled_tokens


def test_every_group_is_observed_once_and_in_order() -> None:
    collecting_ = make_collector()
    groups = collecting_.collect(3)
    source = collecting_.prompts.source
    assert isinstance(source, ListPromptSource)
    assert [example.row for example, _ in source.observations] == [0, 1, 2]
    reached = [sum(verdict.score >= 1 for verdict in group.verdicts) / REPEATS for group in groups]
    assert [success for _, success in source.observations] == pytest.approx(reached)


def test_tokens_do_not_depend_on_the_groups_beside_them() -> None:
    """Tokens do not depend on an earlier collection either: ids and seed fix all sampling."""
    together = make_collector().collect(4)
    other = make_collector()
    apart = [*other.collect(1), *other.collect(3)]
    samples = [[[one.token_ids for one in group.completions] for group in groups] for groups in (together, apart)]
    assert samples[0] == samples[1]
    assert len({tuple(one.token_ids) for group in together for one in group.completions}) > 4


def test_rejected_groups_are_replaced_in_their_slots() -> None:
    groups = make_collector(keep_group=scripted_keep_group([True, False, False], [False, True], [True])).collect(3)
    assert [replaced_ids(group) for group in groups] == [[0], [5, 3, 1], [4, 2]]


def test_the_last_group_stays_after_all_attempts() -> None:
    (group,) = make_collector(attempts=2, keep_group=scripted_keep_group([False], [False])).collect(1)
    assert replaced_ids(group) == [2, 1, 0]


def test_kept_groups_equal_those_without_dynamic_sampling() -> None:
    plain = make_collector().collect(3)
    kept = make_collector(keep_group=scripted_keep_group([True] * 3)).collect(3)
    assert [group.completions for group in plain] == [group.completions for group in kept]


def test_oversampling_generates_more_and_keeps_a_group() -> None:
    for group in make_collector(candidates=10).collect(2):
        assert (len(group.completions), len(group.unselected_candidates)) == (REPEATS, 6)


def test_progress_is_reported() -> None:
    stages: list[tuple[str, int, int]] = []
    collecting_ = make_collector()
    collecting_.on_progress = lambda *stage: stages.append(stage)
    collecting_.collect(3)
    assert stages == [("collect", 1, 3), ("collect", 2, 3), ("collect", 3, 3), ("score", 0, 0)]
