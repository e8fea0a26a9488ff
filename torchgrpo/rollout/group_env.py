"""TorchRL environment for grpo.py: reset encodes prompts, the engine samples, step scores groups.

    reset ─▶ tokens.prompt, group_id ─▶ EnginePolicy ─▶ tokens.response, sample_log_prob ... ─▶ step ─▶ reward, done
                                             └── scoring of a group starts after its last token ─▶┘
                                                 not kept: a new prompt in its slot, and one more step

An action is a whole completion, replies between its turns included. An episode is therefore one step, plus one step
for every group that dynamic sampling replaces. The tensors are those of `batches/batch.py`; their width is that of the
longest row, -1 in the specs. Any TensorDict module that writes these tensors can be the policy, and any transform or
collector of TorchRL can wrap the environment.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import step_mdp

from envs.example import Example
from envs.group import FINISH_REASONS, OUTCOMES, Group, SampledCompletion
from envs.prompts import PromptQueue
from torchgrpo.batches.batch import Batch, completion_tensors, prompt_tensors, verdict_tensors
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.group_rollout import GroupRollout, KeepGroup

OnProgress = Callable[[str, int, int], None]
"""Callback of progress: the stage, the units done, and the total number of units (0 if unknown)."""


@dataclass(eq=False)
class _GroupSlot:
    """Slot of the batch: the current prompt, its sampled completions, and the scored group.

    replaced_group: the group that dynamic sampling replaced by this one; it may itself have replaced another.
    scoring_task: scores the completions that `EnginePolicy` sampled.
    """

    group_id: int
    example: Example
    prompt: tuple[int, ...]
    teacher_prompt: tuple[int, ...]
    started_at: float
    replaced_group: Group | None = None
    completions: list[SampledCompletion] | None = None
    scoring_task: asyncio.Task[Group] | None = None
    group: Group | None = None


class GroupEnv(EnvBase):
    """Environment whose reset encodes `num_groups` prompts and whose step scores their completions.

    The batch size is [N] with N = num_groups * group_rollout.candidates, group-major. A step reports the success rate
    of each prompt to `prompts`. A group that `keep_group` rejects gets a new prompt, as the next observation, up to
    `attempts` times; its rows are not done until then. Every reset takes new prompts for all groups, so TorchRL's
    collectors, which reset after the last step, are one reset ahead.
    """

    def __init__(
        self,
        loop: EngineLoop,
        group_rollout: GroupRollout,
        prompts: PromptQueue,
        num_groups: int,
        keep_group: KeepGroup = lambda group: True,
        attempts: int = 10,
    ) -> None:
        rows = num_groups * group_rollout.candidates
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([rows]))
        self.loop = loop
        self.group_rollout = group_rollout
        self.prompts = prompts
        self.num_groups = num_groups
        self.keep_group = keep_group
        self.attempts = attempts
        self.slots: list[_GroupSlot] = []
        self.groups: list[Group] = []
        """Groups of the last step, in row order."""
        self._attempts_left = 0
        self._make_specs(rows, len(group_rollout.encoder.tokenizer))

    def _make_specs(self, rows: int, vocabulary: int) -> None:
        def spec(**fields: Any) -> Composite:
            return Composite(fields, shape=[rows])

        def below(end: int, width: int = -1) -> Bounded:
            return Bounded(0, end - 1, (rows, width), dtype=torch.int64)

        def mask(width: int = -1) -> Binary:
            return Binary(shape=(rows, width), dtype=torch.bool)

        number = Unbounded((rows, 1))

        def prompts() -> Composite:
            return spec(prompt=below(vocabulary), prompt_mask=mask())

        teacher_spec = {} if self.group_rollout.teacher is None else {"teacher_tokens": prompts()}
        self.observation_spec = spec(tokens=prompts(), group_id=number.to(torch.int64), **teacher_spec)
        self.action_spec = spec(
            tokens=spec(response=below(vocabulary), response_mask=mask(), loss_mask=mask()),
            sample_log_prob=Unbounded((rows, -1)),
            policy_version=Unbounded((rows, -1), dtype=torch.int64),
            finish_reason=below(len(FINISH_REASONS), 1),
            temperature=number,
        )
        self.reward_spec = spec(reward=number, reward_status=below(len(OUTCOMES), 1), chosen=mask(1))
        self.done_spec = spec(done=mask(1), terminated=mask(1))

    def make_rollout(self, tensordict: TensorDictBase) -> Rollout:
        """Makes the rollout of the last step's tensors [N].

        The rollout has the step's groups and the rows of chosen candidates. A completion with several token sequences
        is one action of the environment, and several rows of the batch, which is then built from the groups.
        """
        if any(one.sequence_starts for group in self.groups for one in group.completions):
            return Rollout.from_groups(self.groups)
        if self.group_rollout.candidates == self.group_rollout.repeats:
            return Rollout(self.groups, Batch.from_tensors(tensordict))
        return Rollout(self.groups, Batch.from_tensors(tensordict[tensordict["next", "chosen"][:, 0]]).trim_padding())

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if tensordict is not None and not tensordict.get("_reset", torch.ones(1, dtype=torch.bool)).all():
            raise ValueError(
                "reset of some rows only: dynamic sampling continues with the other rows, for which TorchRL's "
                "collectors do not wait; collect with torchgrpo.rollout.group_env.collect_rollout, or omit keep_group"
            )
        self.slots = [self._make_slot(*prompt) for prompt in self.prompts.next_prompts(self.num_groups)]
        self._attempts_left = self.attempts
        return self._with_done(self._observation(), [False] * self.num_groups)

    def _make_slot(self, group_id: int, example: Example) -> _GroupSlot:
        group_rollout, started_at = self.group_rollout, time.time()
        prompt = group_rollout.encoder.encode(example)
        return _GroupSlot(group_id, example, prompt, group_rollout.teacher_prompt(example), started_at)

    def _observation(self) -> TensorDictBase:
        return prompt_tensors(
            [slot.group_id for slot in self.slots],
            [slot.prompt for slot in self.slots],
            self.group_rollout.candidates,
            [slot.teacher_prompt for slot in self.slots if slot.teacher_prompt],
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        slots = self.slots
        unscored = [number for number, slot in enumerate(slots) if slot.group is None]
        groups = self.loop.run_all([self._score_slot(number, tensordict) for number in unscored])
        self.group_rollout.lowest_scores.record_and_lower(groups)
        for number, group in zip(unscored, groups, strict=True):
            self.prompts.observe(group.example, group.success_rate)
            group.replaces, slots[number].group = slots[number].replaced_group, group
        self.groups = [slot.group for slot in slots if slot.group is not None]
        completions = [one for slot in slots for one in slot.completions or []]
        chosen = {id(one) for group in self.groups for one in group.completions}
        scores = verdict_tensors([one.verdict for one in completions if one.verdict is not None])
        scores["chosen"] = torch.tensor([id(one) in chosen for one in completions])[:, None]
        if self._attempts_left:
            self._replace_rejected_groups(unscored)
        done = [slot.group is not None for slot in slots]
        observation = tensordict.select(*self.observation_spec.keys(True, True))
        scores.update(observation if all(done) else self._observation())
        return self._with_done(scores, done)

    def _replace_rejected_groups(self, numbers: list[int]) -> None:
        """Gives new prompts to those of these slots whose group `keep_group` rejects."""
        rejected = [number for number in numbers if not self.keep_group(self.groups[number])]
        self._attempts_left -= 1
        for number, prompt in zip(rejected, self.prompts.next_prompts(len(rejected)), strict=True):
            self.slots[number] = self._make_slot(*prompt)
            self.slots[number].replaced_group = self.groups[number]

    def _with_done(self, tensordict: TensorDictBase, done: list[bool]) -> TensorDictBase:
        rows = torch.tensor(done).repeat_interleave(self.group_rollout.candidates)[:, None]
        for key in self.done_keys:
            tensordict[key] = rows.clone()
        return tensordict

    async def _score_slot(self, number: int, tensordict: TensorDictBase) -> Group:
        """Returns the scored group of a slot.

        If another policy wrote the tensors, the slot's rows are scored here.
        """
        slot, group_rollout = self.slots[number], self.group_rollout
        if slot.scoring_task is not None:
            return await slot.scoring_task
        first = number * group_rollout.candidates
        slot.completions = [_sampled_completion(tensordict[first + row]) for row in range(group_rollout.candidates)]
        request = self.make_requests(tensordict, [number])[0]
        return await group_rollout.score_group(request, slot.example, slot.completions, slot.started_at)

    def make_requests(self, tensordict: TensorDictBase, numbers: list[int]) -> list[Request]:
        """Makes the requests of these slots; all rows of a group have one prompt."""
        candidates = self.group_rollout.candidates
        tokens, mask = (tensordict["tokens", "prompt"][::candidates], tensordict["tokens", "prompt_mask"][::candidates])
        ids = tensordict["group_id"][::candidates, 0].tolist()
        return [
            self.group_rollout.make_request(tuple(tokens[number][mask[number]].tolist()), ids[number])
            for number in numbers
        ]

    def _set_seed(self, seed: int | None) -> None:
        """Ignores the seed: the prompt source fixes the order of prompts, `GroupRollout.seed` all sampling."""


class EnginePolicy(TensorDictModuleBase):
    """Policy that samples completions from the engine and starts their scoring group by group.

    The environment scores the completions that the engine sampled: their tensors must not be changed before the step.
    """

    def __init__(self, env: GroupEnv, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        super().__init__()
        self.env = env
        self.on_progress = on_progress
        self.in_keys: list[Any] = [("tokens", "prompt"), ("tokens", "prompt_mask"), "group_id"]
        self.out_keys: list[Any] = [("tokens", name) for name in ("response", "response_mask", "loss_mask")]
        self.out_keys += ["sample_log_prob", "policy_version", "finish_reason", "temperature"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Samples completions for an observation [N] of the environment and writes their tensors into it."""
        env, group_rollout = self.env, self.env.group_rollout
        unsampled = [number for number, slot in enumerate(env.slots) if slot.group is None]
        sampled = 0

        async def sample(slot: _GroupSlot, request: Request) -> None:
            nonlocal sampled
            slot.completions = await group_rollout.generate(request, slot.example)
            scoring = group_rollout.score_group(request, slot.example, slot.completions, slot.started_at)
            slot.scoring_task = asyncio.create_task(scoring)
            sampled += 1
            self.on_progress("collect", sampled, len(unsampled))
            if sampled == len(unsampled):
                self.on_progress("score", 0, 0)

        requests = env.make_requests(tensordict, unsampled)
        env.loop.run_all([sample(env.slots[n], request) for n, request in zip(unsampled, requests, strict=True)])
        completions = [one for slot in env.slots for one in slot.completions or []]
        temperatures = [group_rollout.sampling.temperature] * len(completions)
        return tensordict.update(completion_tensors(completions, temperatures))


def collect_rollout(env: GroupEnv, policy: EnginePolicy) -> Rollout:
    """Collects one rollout; every group that is not kept takes one more step."""
    step = env.rollout(1, policy)[:, 0]
    while not step["next", "done"].all():
        step = env.step(policy(step_mdp(step)))
    return env.make_rollout(step)


def _sampled_completion(row: TensorDictBase) -> SampledCompletion:
    """Rebuilds a sampled completion from its tensors, the inverse of `completion_tensors`."""
    mask: Tensor = row["tokens", "response_mask"]

    def masked_values(values: Tensor) -> list[Any]:
        return values[mask].tolist()

    return SampledCompletion(
        masked_values(row["tokens", "response"]),
        masked_values(row["sample_log_prob"]),
        masked_values(row["policy_version"]),
        FINISH_REASONS[int(row["finish_reason"])],
        masked_values(row["tokens", "loss_mask"]),
    )
