"""Groups as tensors: where plain records become what the learner reads."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from envs.group import FINISH_REASONS, OUTCOMES, Group

STOP = FINISH_REASONS.index("stop")


def success(scored: TensorDictBase) -> torch.Tensor:
    """[N] float64: the reward's `accuracy` part (0 to 1), or 1 for a reward of at least 1 where it has none."""
    accuracy = scored["next", "reward_parts"].get("accuracy", None)
    right = scored["next", "reward"] >= 1 if accuracy is None else accuracy
    return right[:, 0].double()


def judged(scored: TensorDictBase) -> torch.Tensor:
    """[N] bool: false where judging failed, so that the reward says nothing about the completion."""
    return scored["next", "reward_status"][:, 0] != OUTCOMES.index("error")


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, left: bool = False) -> torch.Tensor:
    """[len(rows), longest] of `dtype`, zeros where a row is shorter; at least one column."""
    width = max(1, max(len(row) for row in rows))
    filled = [
        [*[0] * (width - len(row)), *row] if left else [*row, *[0] * (width - len(row))] for row in rows
    ]
    return torch.tensor(filled, dtype=dtype)


def collate(groups: Sequence[Group], members: Sequence[str] = ()) -> TensorDict:
    """All completions of the groups, [N], group-major: prompts padded on the left, responses on the right.

    `("generated", ...)` [N, 1]: totals over everything that was generated in the place of a row's group. members: of a
    mixture, the values of `Example.source`; those totals for each of them, [N, members].
    """
    rows = [(group, one) for group in groups for one in group.completions]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    size = [len(rows)]

    def column(values: Sequence[float], dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    prompts, responses = [group.prompt for group, _ in rows], [one.token_ids for _, one in rows]
    tokens = TensorDict(
        prompt=pad(prompts, torch.int64, left=True),
        prompt_mask=pad([[1] * len(prompt) for prompt in prompts], torch.bool, left=True),
        response=pad(responses, torch.int64),
        response_mask=pad([[1] * len(response) for response in responses], torch.bool),
        loss_mask=pad([one.sampled or [True] * len(one.token_ids) for _, one in rows], torch.bool),
        batch_size=size,
    )
    done = torch.ones(*size, 1, dtype=torch.bool)
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    following = TensorDict(
        reward=column([verdict.score for verdict in verdicts], torch.float32),
        reward_parts=TensorDict(
            {name: column([v.parts.get(name, 0.0) for v in verdicts], torch.float32) for name in names}, size
        ),
        reward_status=column([OUTCOMES.index(verdict.outcome) for verdict in verdicts]),
        done=done,
        terminated=done.clone(),
        batch_size=size,
    )
    return TensorDict(
        tokens=tokens,
        next=following,
        group_id=column([group.group_id for group, _ in rows]),
        temperature=column([group.sampling.temperature for group, _ in rows], torch.float32),
        sample_log_prob=pad([one.log_probs for _, one in rows], torch.float32),
        policy_version=pad([one.policy_versions for _, one in rows], torch.int64),
        finish_reason=column([FINISH_REASONS.index(one.finish_reason) for _, one in rows]),
        generated=_generated(groups, members).repeat_interleave(len(groups[0].completions), dim=0),
        batch_size=size,
    )


def _generated(groups: Sequence[Group], members: Sequence[str]) -> TensorDict:
    """[P] of [1] float64."""
    chains = [_chain(group) for group in groups]
    names = sorted({name for chain in chains for each in chain for name in _sums(each)[1]})
    sums = [[_sums(each) for each in chain] for chain in chains]

    def column(values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    made = {
        name: column([[sum(one[0][name] for one in of_chain)] for of_chain in sums]) for name in sums[0][0][0]
    }
    parts = {
        name: column([[sum(one[1].get(name, 0.0) for one in of_chain)] for of_chain in sums])
        for name in names
    }
    length = made.pop("length")
    generated = TensorDict({**made, "reward_parts": TensorDict(parts, [len(groups)])}, [len(groups)])
    if members:
        member = column([[name == group.example.source for name in members] for group in groups])
        of_prompt = {name: made[name] for name in ("completions", "judged", "reward")} | {"length": length}
        generated["members"] = TensorDict(
            {name: total * member for name, total in of_prompt.items()}, [len(groups)]
        )
    return generated


def _chain(group: Group) -> list[Group]:
    return [group] if group.in_place_of is None else [*_chain(group.in_place_of), group]


def _sums(group: Group) -> tuple[dict[str, float], dict[str, float]]:
    """Sums over a group's candidates, and those of the parts of its rewards."""
    verdicts = [one.verdict for one in group.candidates if one.verdict is not None]
    valid = [verdict for verdict in verdicts if verdict.judged]
    scores = [verdict.score for verdict in valid]
    parts: dict[str, float] = {}
    for verdict in valid:
        for name, part in verdict.parts.items():
            parts[name] = parts.get(name, 0.0) + part
    return {
        "groups": 1,
        "completions": len(verdicts),
        "judged": len(valid),
        "invalid": sum(verdict.outcome == "invalid" for verdict in verdicts),
        "reward": sum(scores),
        "reward_squared": sum(score * score for score in scores),
        "zero_variance": float(len(set(scores)) <= 1),
        "length": sum(len(one.token_ids) for one in group.candidates),
    }, parts
