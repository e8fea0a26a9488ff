"""Balanced choice, replaced groups and the totals they leave behind."""

from collections.abc import Callable, Sequence

import pytest
import torch
from envs.verdicts import judged, success
from rollout.collector import EnginePolicy, Rollouts, collate
from tensordict import TensorDict, TensorDictBase

from envs.group import Sampling
from rollout.engines.transformers_engine import TransformersEngine
from rollout.selection import choose_balanced, totals
from tests.tiny import EOS, LengthReward, LetterTokenizer, numbered_examples, tiny_llama

INVALID, ERROR = 1, 2


def scored(
    rewards: list[list[float]],
    errors: Sequence[tuple[int, int]] = (),
    invalid: Sequence[tuple[int, int]] = (),
) -> TensorDict:
    """[P * C] completions; `errors`: (group, candidate) that could not be judged, `invalid`: that broke the judge."""
    groups, candidates = len(rewards), len(rewards[0])
    status = torch.zeros(groups, candidates, dtype=torch.int64)
    for place in errors:
        status[place] = ERROR
    for place in invalid:
        status[place] = INVALID
    rows = [groups * candidates]
    following = TensorDict(
        reward=torch.tensor(rewards).view(-1, 1),
        reward_status=status.view(-1, 1),
        reward_parts=TensorDict(accuracy=torch.tensor(rewards).view(-1, 1), batch_size=rows),
        batch_size=rows,
    )
    ids = torch.arange(groups).repeat_interleave(candidates)[:, None]
    return TensorDict(next=following, group_id=ids, row=torch.arange(rows[0])[:, None], batch_size=rows)


def rewards_of(groups: TensorDictBase, repeats: int) -> list[list[float]]:
    return groups["next", "reward"].view(-1, repeats).tolist()


@pytest.mark.parametrize(
    ("candidates", "right_kept"),
    [
        ([1, 1, 1, 1, 0, 0, 0, 0], 2),
        ([1, 0, 0, 0, 0, 0, 0, 0], 1),
        ([1, 1, 1, 1, 1, 1, 1, 0], 3),
        ([1, 1, 1, 1, 1, 1, 1, 1], 4),
        ([0, 0, 0, 0, 0, 0, 0, 0], 0),
    ],
)
def test_right_and_wrong_as_evenly_as_there_are(candidates: list[float], right_kept: int) -> None:
    chosen = choose_balanced(scored([candidates]), 8, 4, seed=0)
    assert chosen.batch_size == torch.Size([4])
    assert int(chosen["next", "reward"].sum()) == right_kept
    rows = chosen["row"][:, 0].tolist()
    assert rows == sorted(set(rows))


def test_what_errored_is_taken_last() -> None:
    errors = [(0, i) for i in range(6)]
    assert judged(choose_balanced(scored([[1.0] * 8], errors[:4]), 8, 4, seed=0)).all()
    some = choose_balanced(scored([[1.0] * 8], errors), 8, 4, seed=0)
    assert judged(some).sum() == 2


def test_the_choice_depends_on_seed_and_group_and_on_nothing_else() -> None:
    many = scored([[1, 0] * 8] * 20)
    first, again, other = (choose_balanced(many, 16, 4, seed) for seed in (0, 0, 1))
    assert torch.equal(first["row"], again["row"])
    assert not torch.equal(first["row"], other["row"])
    alone = choose_balanced(many[5 * 16 : 6 * 16], 16, 4, seed=0)
    assert torch.equal(alone["row"], first["row"][5 * 4 : 6 * 4])
    counts = torch.bincount((first["row"][:, 0] % 16), minlength=16)
    assert counts.min() >= 1  # no candidate's number is favoured


def test_totals_count_what_was_judged() -> None:
    sums = totals(scored([[1, 1, 0, 5], [2, 2, 2, 7]], errors=[(0, 3), (1, 3)], invalid=[(0, 2)]), 4)
    assert sums["groups"][:, 0].tolist() == [1, 1]
    assert sums["completions"][:, 0].tolist() == [4, 4]
    assert sums["invalid"][:, 0].tolist() == [1, 0]
    assert sums["judged"][:, 0].tolist() == [3, 3]
    assert sums["reward"][:, 0].tolist() == [2, 6]
    assert sums["reward_squared"][:, 0].tolist() == [2, 12]
    assert sums["zero_variance"][:, 0].tolist() == [0, 1]
    assert sums["reward_parts", "accuracy"][:, 0].tolist() == [2, 6]


def test_totals_tell_what_was_invalid_from_what_failed() -> None:
    batch = scored([[1, 0, 0], [0, 0, 0]], errors=[(0, 2)])
    batch["next", "reward_status"][3:5] = INVALID
    sums = totals(batch, 3)
    assert sums["invalid"][:, 0].tolist() == [0, 2]
    assert sums["judged"][:, 0].tolist() == [2, 3]


def test_without_an_accuracy_part_a_reward_of_one_is_success() -> None:
    batch = scored([[1.0, 0.9, 2.0, -1.0]])
    batch["next", "reward_parts"] = TensorDict(batch_size=[4])
    assert success(batch).tolist() == [1, 0, 1, 0]


REPEATS = 4


def rollouts(candidates: int = REPEATS, attempts: int = 10) -> Rollouts:
    from envs.token_env import TokenEnv

    examples = iter(numbered_examples(2000))
    env = TokenEnv(
        lambda n: [next(examples) for _ in range(n)], LetterTokenizer(), LengthReward(), candidates
    )
    engine = TransformersEngine(tiny_llama(), [EOS])
    policy = EnginePolicy(engine, Sampling(max_tokens=5), candidates, seed=0, timeout=60)
    return Rollouts(env, policy, REPEATS, attempts)


def refusing(*rounds: list[bool]) -> Callable[[TensorDictBase], torch.Tensor]:
    answers = iter(rounds)
    return lambda groups: torch.tensor(next(answers))


def test_refused_groups_are_replaced_in_their_places() -> None:
    batch = rollouts().collect(3, keep=refusing([True, False, False], [False, True], [True]))
    assert batch["group_id"][::REPEATS, 0].tolist() == [0, 5, 4]
    assert batch["generated", "groups"][::REPEATS, 0].tolist() == [1, 3, 2]
    assert batch["generated", "completions"][::REPEATS, 0].tolist() == [4, 12, 8]
    mask = batch["tokens", "response_mask"]
    assert (batch["tokens", "response"][~mask] == 0).all()
    assert batch["tokens", "prompt_mask"][:, -1].all()


def test_after_the_cap_the_last_group_stays() -> None:
    batch = rollouts(attempts=2).collect(1, keep=refusing([False], [False]))
    assert batch["group_id"][0, 0] == 2
    assert batch["generated", "groups"][0, 0] == 3


def test_a_batch_that_is_kept_is_the_one_without_dynamic_sampling() -> None:
    plain = rollouts().collect(3)
    kept = rollouts().collect(3, keep=refusing([True] * 3))
    assert (plain == kept).all()


def test_oversampling_generates_more_and_keeps_a_group() -> None:
    batch = rollouts(candidates=10).collect(2)
    assert batch.batch_size == torch.Size([2 * REPEATS])
    assert batch["generated", "completions"][::REPEATS, 0].tolist() == [10, 10]


def test_collate_knows_parts_that_only_some_groups_have() -> None:
    source = rollouts()
    first, second = source.collect(1), source.collect(1)
    second["next", "reward_parts", "format"] = torch.ones(REPEATS, 1)
    batch = collate([first, second])
    assert batch["next", "reward_parts", "format"][:, 0].tolist() == [0.0] * REPEATS + [1.0] * REPEATS
