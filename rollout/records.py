"""Temporary: the group beside its TensorDict, until rollouts make groups themselves."""

from collections.abc import Callable

import torch
from tensordict import TensorDictBase

from envs.group import FINISH_REASONS, OUTCOMES, Group, SampledCompletion, Sampling, Times, Verdict
from envs.token_env import TokenEnv

_UNKNOWN = Times(0.0, 0.0, 0.0)


class Records:
    """Groups by id, from judging until a batch takes them."""

    def __init__(self, env: TokenEnv) -> None:
        self.env = env
        self._groups: dict[int, Group] = {}

    def add(self, scored: TensorDictBase, chosen: TensorDictBase, candidates: int, max_tokens: int) -> None:
        """scored: all candidates; chosen: those that are trained on, which `row` [N, 1] finds among them."""
        taken = set(chosen["row"][:, 0].tolist())
        for start in range(0, scored.batch_size[0], candidates):
            rows = scored[start : start + candidates]
            group_id = int(rows["group_id"][0, 0])
            completions = _completions(rows)
            sampling = Sampling(float(rows["temperature"][0, 0]), max_tokens=max_tokens)
            self._groups[group_id] = Group(
                group_id,
                self.env.judged_examples[group_id],
                tuple(rows["tokens", "prompt"][0][rows["tokens", "prompt_mask"][0]].tolist()),
                "",
                sampling,
                [one for place, one in enumerate(completions, start) if place in taken],
                _UNKNOWN,
                [one for place, one in enumerate(completions, start) if place not in taken],
            )

    def replace(self, refused: TensorDictBase, group: TensorDictBase) -> None:
        by, old = (int(one["group_id"][0, 0]) for one in (group, refused))
        self._groups[by].in_place_of = self._groups.pop(old)

    def take(self, batch: TensorDictBase) -> list[Group]:
        return [self._groups.pop(group_id) for group_id in _ids(batch)]

    def keep(self, wants: Callable[[Group], bool]) -> Callable[[TensorDictBase], torch.Tensor]:
        return lambda batch: torch.tensor([wants(self._groups[group_id]) for group_id in _ids(batch)])


def _ids(batch: TensorDictBase) -> list[int]:
    return list(dict.fromkeys(batch["group_id"][:, 0].tolist()))


def _completions(rows: TensorDictBase) -> list[SampledCompletion]:
    made = []
    for row in rows.unbind(0):
        length = int(row["tokens", "response_mask"].sum())
        sampled = row["tokens", "loss_mask"][:length]
        following = row["next"]
        parts = {name: float(part) for name, part in following["reward_parts"].items()}
        made.append(
            SampledCompletion(
                row["tokens", "response"][:length].tolist(),
                row["sample_log_prob"][:length].tolist(),
                row["policy_version"][:length].tolist(),
                FINISH_REASONS[int(row["finish_reason"])],
                None if sampled.all() else sampled.tolist(),
                verdict=Verdict(float(following["reward"]), parts, OUTCOMES[int(following["reward_status"])]),
            )
        )
    return made
