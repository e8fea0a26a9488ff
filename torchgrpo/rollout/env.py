"""Prompts, engine and rewards as a TorchRL environment and policy: the rollouts of grpo.py.

    reset ─▶ tokens.prompt, group_id ─▶ EnginePolicy ─▶ tokens.response, sample_log_prob ... ─▶ step ─▶ reward, done
                                             └── a group's judging starts with its last token ──▶┘
                                                 not kept: a new prompt in its place, and one more step

An action is a whole completion, the answers between its turns included, so an episode is one step, or one more for
every group that dynamic sampling replaces. The tensors are those of `batches/batch.py`, as wide as the longest row: -1
in the specs. Any TensorDict module that writes them can be the policy, any transform or collector of TorchRL goes
around the environment.
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
from torchgrpo.rollout.generate import Generation, KeepGroup

OnProgress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much (0: not counted)."""


@dataclass(eq=False)
class _Slot:
    """One group of the batch: the prompt at hand, what was sampled for it, and the group that came of it.

    judging: of completions that `EnginePolicy` sampled. refused: groups that were replaced, the newest first.
    """

    group_id: int
    example: Example
    prompt: tuple[int, ...]
    teacher_prompt: tuple[int, ...]
    begun: float
    refused: Group | None = None
    completions: list[SampledCompletion] | None = None
    judging: asyncio.Task[Group] | None = None
    group: Group | None = None


class GroupEnv(EnvBase):
    """Environment whose reset encodes `num_groups` prompts, and whose step judges their completions.

    The batch size is [N] with N = num_groups * generation.candidates, group-major. A step tells `prompts` how often
    each prompt was solved. Groups that `keep_group` refuses get a new prompt, as the next observation, up to `attempts`
    times; their rows are not done before. Every reset takes new prompts for all groups, so TorchRL's collectors, which
    reset after the last step, are one reset ahead.
    """

    def __init__(
        self,
        loop: EngineLoop,
        generation: Generation,
        prompts: PromptQueue,
        num_groups: int,
        keep_group: KeepGroup = lambda group: True,
        attempts: int = 10,
    ) -> None:
        rows = num_groups * generation.candidates
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([rows]))
        self.loop = loop
        self.generation = generation
        self.prompts = prompts
        self.num_groups = num_groups
        self.keep_group = keep_group
        self.attempts = attempts
        self.slots: list[_Slot] = []
        self.groups: list[Group] = []
        """Groups of the last step, in the order of their rows."""
        self._attempts_left = 0
        self._make_specs(rows, len(generation.encoder.tokenizer))

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

        of_teacher = {} if self.generation.teacher is None else {"teacher_tokens": prompts()}
        self.observation_spec = spec(tokens=prompts(), group_id=number.to(torch.int64), **of_teacher)
        self.action_spec = spec(
            tokens=spec(response=below(vocabulary), response_mask=mask(), loss_mask=mask()),
            sample_log_prob=Unbounded((rows, -1)),
            policy_version=Unbounded((rows, -1), dtype=torch.int64),
            finish_reason=below(len(FINISH_REASONS), 1),
            temperature=number,
        )
        self.reward_spec = spec(reward=number, reward_status=below(len(OUTCOMES), 1), chosen=mask(1))
        self.done_spec = spec(done=mask(1), terminated=mask(1))

    def rollout_of(self, tensordict: TensorDictBase) -> Rollout:
        """The rollout of what the last step gave, [N]: its groups, and the rows that were chosen of the candidates."""
        if self.generation.candidates == self.generation.repeats:
            return Rollout(self.groups, Batch.of(tensordict))
        return Rollout(self.groups, Batch.of(tensordict[tensordict["next", "chosen"][:, 0]]).trimmed())

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if tensordict is not None and not tensordict.get("_reset", torch.ones(1, dtype=torch.bool)).all():
            raise ValueError(
                "a part of the rows is to be reset: dynamic sampling goes on with the others, which no collector of "
                "TorchRL waits for; collect with torchgrpo.rollout.env.collect, or leave keep_group out"
            )
        self.slots = [self._slot(*each) for each in self.prompts.begin(self.num_groups)]
        self._attempts_left = self.attempts
        return self._with_done(self._observed(), [False] * self.num_groups)

    def _slot(self, group_id: int, example: Example) -> _Slot:
        generation, begun = self.generation, time.time()
        prompt = generation.encoder.encode(example)
        return _Slot(group_id, example, prompt, generation.teacher_prompt(example), begun)

    def _observed(self) -> TensorDictBase:
        return prompt_tensors(
            [slot.group_id for slot in self.slots],
            [slot.prompt for slot in self.slots],
            self.generation.candidates,
            [slot.teacher_prompt for slot in self.slots if slot.teacher_prompt],
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        slots = self.slots
        unjudged = [number for number, slot in enumerate(slots) if slot.group is None]
        groups = self.loop.run_all([self._judged(number, tensordict) for number in unjudged])
        self.generation.lowest.settle(groups)
        for number, group in zip(unjudged, groups, strict=True):
            self.prompts.observe(group.example, group.success_rate)
            group.in_place_of, slots[number].group = slots[number].refused, group
        self.groups = [slot.group for slot in slots if slot.group is not None]
        completions = [one for slot in slots for one in slot.completions or []]
        chosen = {id(one) for group in self.groups for one in group.completions}
        scores = verdict_tensors([one.verdict for one in completions if one.verdict is not None])
        scores["chosen"] = torch.tensor([id(one) in chosen for one in completions])[:, None]
        if self._attempts_left:
            self._replace_refused(unjudged)
        done = [slot.group is not None for slot in slots]
        observed = tensordict.select(*self.observation_spec.keys(True, True))
        scores.update(observed if all(done) else self._observed())
        return self._with_done(scores, done)

    def _replace_refused(self, numbers: list[int]) -> None:
        """Give slots of these numbers whose group is refused a new prompt, all of them together."""
        refused = [number for number in numbers if not self.keep_group(self.groups[number])]
        self._attempts_left -= 1
        for number, prompt in zip(refused, self.prompts.begin(len(refused)), strict=True):
            self.slots[number] = self._slot(*prompt)
            self.slots[number].refused = self.groups[number]

    def _with_done(self, tensordict: TensorDictBase, done: list[bool]) -> TensorDictBase:
        rows = torch.tensor(done).repeat_interleave(self.generation.candidates)[:, None]
        for key in self.done_keys:
            tensordict[key] = rows.clone()
        return tensordict

    async def _judged(self, number: int, tensordict: TensorDictBase) -> Group:
        """The group of a slot, judged from its rows of the tensors where another policy wrote them."""
        slot, generation = self.slots[number], self.generation
        if slot.judging is not None:
            return await slot.judging
        first = number * generation.candidates
        slot.completions = [_completion(tensordict[first + row]) for row in range(generation.candidates)]
        request = self.requests(tensordict, [number])[0]
        return await generation.judged(request, slot.example, slot.completions, slot.begun)

    def requests(self, tensordict: TensorDictBase, numbers: list[int]) -> list[Request]:
        """The requests of slots of these numbers; all rows of a group have one prompt."""
        every = self.generation.candidates
        tokens, mask = tensordict["tokens", "prompt"][::every], tensordict["tokens", "prompt_mask"][::every]
        ids = tensordict["group_id"][::every, 0].tolist()
        return [
            self.generation.request(tuple(tokens[number][mask[number]].tolist()), ids[number])
            for number in numbers
        ]

    def _set_seed(self, seed: int | None) -> None:
        """The order of prompts is their source's, and every draw is fixed by `Generation.seed`."""


class EnginePolicy(TensorDictModuleBase):
    """Policy that samples completions from the engine of `env`, whose judging it starts group by group.

    The environment judges what the engine sampled: of its tokens nothing may be changed before the step.
    """

    def __init__(self, env: GroupEnv, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        super().__init__()
        self.env = env
        self.on_progress = on_progress
        self.in_keys: list[Any] = [("tokens", "prompt"), ("tokens", "prompt_mask"), "group_id"]
        self.out_keys: list[Any] = [("tokens", name) for name in ("response", "response_mask", "loss_mask")]
        self.out_keys += ["sample_log_prob", "policy_version", "finish_reason", "temperature"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """tensordict: [N], an observation of the environment."""
        env, generation = self.env, self.env.generation
        unsampled = [number for number, slot in enumerate(env.slots) if slot.group is None]
        sampled = 0

        async def sample(slot: _Slot, request: Request) -> None:
            nonlocal sampled
            slot.completions = await generation.generate(request)
            judging = generation.judged(request, slot.example, slot.completions, slot.begun)
            slot.judging = asyncio.create_task(judging)
            sampled += 1
            self.on_progress("collect", sampled, len(unsampled))
            if sampled == len(unsampled):
                self.on_progress("score", 0, 0)

        requests = env.requests(tensordict, unsampled)
        env.loop.run_all(
            [sample(env.slots[n], request) for n, request in zip(unsampled, requests, strict=True)]
        )
        completions = [one for slot in env.slots for one in slot.completions or []]
        temperatures = [generation.sampling.temperature] * len(completions)
        return tensordict.update(completion_tensors(completions, temperatures))


def collect(env: GroupEnv, policy: EnginePolicy) -> Rollout:
    """One rollout of the environment; every group that is not kept takes one more step."""
    step = env.rollout(1, policy)[:, 0]
    while not step["next", "done"].all():
        step = env.step(policy(step_mdp(step)))
    return env.rollout_of(step)


def _completion(row: TensorDictBase) -> SampledCompletion:
    """The record that `completion_tensors` made tensors of."""
    mask: Tensor = row["tokens", "response_mask"]

    def inside(values: Tensor) -> list[Any]:
        return values[mask].tolist()

    return SampledCompletion(
        inside(row["tokens", "response"]),
        inside(row["sample_log_prob"]),
        inside(row["policy_version"]),
        FINISH_REASONS[int(row["finish_reason"])],
        inside(row["tokens", "loss_mask"]),
    )
