"""From prompts to scored groups: the environment and an engine as TensorDict modules."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from envs.token_env import FINISH_REASONS, TokenEnv, length_mask, pad
from rollout.engine import Completion, Engine, Request, Response, Sampling, generate


class EnginePolicy(TensorDictModuleBase):
    """An engine as a TensorDict module: reads the prompts, writes the responses.

    Args:
        seed: with the group id it fixes every draw of a group.
        timeout: seconds in which at least one group must finish.
    """

    def __init__(self, engine: Engine, sampling: Sampling, repeats: int, seed: int, timeout: float) -> None:
        super().__init__()
        self.in_keys: list[Any] = [("tokens", "prompt"), ("tokens", "prompt_mask"), "group_id"]
        self.out_keys: list[Any] = [("tokens", name) for name in ("response", "response_mask", "loss_mask")]
        self.out_keys += ["sample_log_prob", "policy_version", "finish_reason"]
        self.engine = engine
        self.sampling = sampling
        self.repeats = repeats
        self.seed = seed
        self.timeout = timeout

    def requests(self, groups: TensorDictBase) -> list[Request]:
        """One request for each group of `groups` [num_groups * repeats]."""
        firsts = groups["tokens", "prompt"][:: self.repeats].tolist()
        lengths = groups["tokens", "prompt_mask"][:: self.repeats].sum(-1).tolist()
        ids = groups["group_id"][:: self.repeats, 0].tolist()
        return [
            Request(
                request_id=group_id,
                prompt=tuple(row[len(row) - length :]),
                n=self.repeats,
                sampling=self.sampling,
                seed=(self.seed << 40) + group_id,
            )
            for row, length, group_id in zip(firsts, lengths, ids, strict=True)
        ]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        responses = generate(self.engine, self.requests(tensordict), self.timeout)
        return self.fill(tensordict, responses)

    def fill(self, groups: TensorDictBase, responses: Sequence[Response]) -> TensorDictBase:
        """Write the completions of `responses`, which are in the order of `groups`."""
        completions = [completion for response in responses for completion in response.completions]
        return groups.update(_as_tensors(completions))


def _as_tensors(completions: Sequence[Completion]) -> TensorDict:
    """Right-padded tensors [N, R] of what the engine returned."""
    mask = length_mask([len(completion.token_ids) for completion in completions])
    reasons = [[FINISH_REASONS.index(completion.finish_reason)] for completion in completions]
    tokens = TensorDict(
        response=pad([completion.token_ids for completion in completions], torch.int64),
        response_mask=mask,
        loss_mask=mask.clone(),
        batch_size=[len(completions)],
    )
    return TensorDict(
        tokens=tokens,
        sample_log_prob=pad([completion.log_probs for completion in completions], torch.float32),
        policy_version=pad([completion.policy_versions for completion in completions], torch.int64),
        finish_reason=torch.tensor(reasons),
        batch_size=[len(completions)],
    )


class Rollouts:
    """Scored groups on demand.

    Args:
        env: prompts and rewards.
        policy: the engine (or pool of engines) as a TensorDict module.
    """

    def __init__(self, env: TokenEnv, policy: EnginePolicy) -> None:
        self.env = env
        self.policy = policy

    def collect(self, num_groups: int) -> TensorDictBase:
        """All of `num_groups` new groups, [num_groups * repeats] completions, group-major."""
        groups = self.policy(self.env.groups(num_groups))
        return self.env.step(groups)


def collate(groups: Sequence[TensorDictBase]) -> TensorDictBase:
    """Several groups as one batch: prompts padded on the left, responses on the right, to the widest."""
    prompt_width = max(group["tokens", "prompt"].shape[1] for group in groups)
    width = max(group["tokens", "response"].shape[1] for group in groups)
    return torch.cat([_widen(group, prompt_width, width) for group in groups])


_RESPONSE_KEYS: tuple[str | tuple[str, str], ...] = (
    ("tokens", "response"),
    ("tokens", "response_mask"),
    ("tokens", "loss_mask"),
    "sample_log_prob",
    "policy_version",
)


def _widen(group: TensorDictBase, prompt_width: int, width: int) -> TensorDictBase:
    widened = group.clone(recurse=False)
    for name in ("prompt", "prompt_mask"):
        prompt = widened["tokens", name]
        widened["tokens", name] = torch.nn.functional.pad(prompt, (prompt_width - prompt.shape[1], 0))
    for key in _RESPONSE_KEYS:
        widened[key] = torch.nn.functional.pad(widened[key], (0, width - widened[key].shape[1]))
    return widened
