"""Prompts, engine and rewards as a TorchRL environment and policy: `env.rollout` gives a batch of grpo.py, bit for bit.

    reset ─▶ tokens.prompt, group_id ─▶ policy ─▶ tokens.response, sample_log_prob ... ─▶ step ─▶ reward, done
    Generation.encoder                  Generation.generate                               Generation.judged

An action is a whole completion, the answers between its turns included, so an episode is one step. The tensors are
those of `Batch`, and as wide as the longest row: -1 in the specs. Any TensorDict module that writes
them can be the policy, and any collector of TorchRL can drive it. This is a file of `run`, because it knows the room
that makes groups and the room that makes tensors of them.
"""

import time
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from envs.example import Example
from envs.group import FINISH_REASONS, OUTCOMES, Group, SampledCompletion
from envs.prompts import PromptQueue
from torchgrpo.rollout.collect import together
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.sampler import Request
from torchgrpo.rollout.generate import Generation
from torchgrpo.training.batch import Batch, completion_tensors, prompt_tensors, verdict_tensors


class GroupEnv(EnvBase):
    """Environment whose reset draws and encodes `num_groups` prompts, and whose step judges their completions.

    The batch size is [N] with N = num_groups * generation.repeats, group-major. Every reset takes new prompts from
    `prompts`, which every step tells how often they were solved. TorchRL's collectors reset after the last step, so
    they are one reset ahead.

    groups: the records of the last step, which `training/credit.py` reads beside the batch.

    Raises:
        ValueError: `generation` makes more candidates than a group keeps; a step cannot leave rows out.
    """

    def __init__(
        self, loop: EngineLoop, generation: Generation, prompts: PromptQueue, num_groups: int
    ) -> None:
        if generation.candidates != generation.repeats:
            raise ValueError(
                f"candidates={generation.candidates}, repeats={generation.repeats}: a step judges every row and leaves "
                "none out; env.oversample is for grpo.py and grpo_async.py"
            )
        rows = num_groups * generation.repeats
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([rows]))
        self.loop = loop
        self.generation = generation
        self.prompts = prompts
        self.num_groups = num_groups
        self.groups: list[Group] = []
        self._begun: dict[int, tuple[Example, float]] = {}
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
        self.reward_spec = spec(reward=number, reward_status=below(len(OUTCOMES), 1))
        self.done_spec = spec(done=mask(1), terminated=mask(1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        begun = self.prompts.begin(self.num_groups)
        self._begun = {group_id: (example, time.time()) for group_id, example in begun}
        generation, examples = self.generation, [example for _, example in begun]
        prompts = [generation.encoder.encode(example) for example in examples]
        of_teacher = [ids for example in examples if (ids := generation.teacher_prompt(example))]
        reset = prompt_tensors([group_id for group_id, _ in begun], prompts, generation.repeats, of_teacher)
        return self._marked(reset, done=False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.groups = self.loop.run(
            together([self._judged(group) for group in tensordict.split(self.generation.repeats)])
        )
        self.generation.lowest.settle(self.groups)
        for group in self.groups:
            self.prompts.observe(group.example, group.success_rate)
        judged = verdict_tensors([verdict for group in self.groups for verdict in group.verdicts])
        judged.update(tensordict.select(*self.observation_spec.keys(True, True)))
        return self._marked(judged, done=True)

    def _marked(self, tensordict: TensorDictBase, done: bool) -> TensorDictBase:
        for key in self.done_keys:
            tensordict[key] = torch.full((*self.batch_size, 1), done)
        return tensordict

    async def _judged(self, rows: TensorDictBase) -> Group:
        """The record of a group [repeats]."""
        request = _request(self.generation, rows)
        example, begun = self._begun[request.request_id]
        completions = [_completion(row) for row in rows.unbind(0)]
        return await self.generation.judged(request, example, completions, begun)

    def _set_seed(self, seed: int | None) -> None:
        """The order of prompts is their source's, and every draw is fixed by `Generation.seed`."""


class EnginePolicy(TensorDictModuleBase):
    """Policy that asks the engine of `generation` for every group, and writes the completions."""

    def __init__(self, loop: EngineLoop, generation: Generation) -> None:
        super().__init__()
        self.loop = loop
        self.generation = generation
        self.in_keys: list[Any] = [("tokens", "prompt"), ("tokens", "prompt_mask"), "group_id"]
        self.out_keys: list[Any] = [("tokens", name) for name in ("response", "response_mask", "loss_mask")]
        self.out_keys += ["sample_log_prob", "policy_version", "finish_reason", "temperature"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """tensordict: [N], what a reset of `GroupEnv` gives."""
        groups = tensordict.split(self.generation.repeats)
        requests = [_request(self.generation, group) for group in groups]
        drawn = self.loop.run(together([self.generation.generate(request) for request in requests]))
        temperatures = [self.generation.sampling.temperature] * tensordict.batch_size[0]
        completions = [one for of_group in drawn for one in of_group]
        return tensordict.update(completion_tensors(completions, temperatures))


def batch_of(rollout: TensorDictBase) -> Batch:
    """The batch [N] of what `GroupEnv.rollout(1, policy)` or a collector gives, [N, 1]."""
    return Batch.of(rollout[:, 0])


def _request(generation: Generation, rows: TensorDictBase) -> Request:
    """What an engine is asked for a group [repeats], whose rows all have one prompt."""
    tokens, mask = rows["tokens", "prompt"][0], rows["tokens", "prompt_mask"][0]
    return generation.request(tuple(tokens[mask].tolist()), int(rows["group_id"][0]))


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
