"""From prompts to scored groups: the environment and an engine as TensorDict modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from envs.token_env import FINISH_REASONS, Prompted, TokenEnv, length_mask, pad
from rollout.engines.sampler import Completion, Engine, Request, Response, Sampling, answers, generate
from rollout.records import Records
from rollout.selection import choose_balanced, in_place_of, same_parts, totals

Keep = Callable[[TensorDictBase], torch.Tensor]
"""From whole groups to [P] bool: which of them are worth training on."""
Tell = Callable[[str, int, int], None]
"""Told of a stage, how much of it is done, and of how much (0: not counted)."""


class EnginePolicy(TensorDictModuleBase):
    """An engine as a TensorDict module: reads the prompts, writes the responses.

    Args:
        repeats: completions that are generated for a prompt.
        seed: with the group id it fixes every draw of a group.
        timeout: seconds in which at least one group must finish.
    """

    def __init__(self, engine: Engine, sampling: Sampling, repeats: int, seed: int, timeout: float) -> None:
        super().__init__()
        self.in_keys: list[Any] = [("tokens", "prompt"), ("tokens", "prompt_mask"), "group_id"]
        self.out_keys: list[Any] = [("tokens", name) for name in ("response", "response_mask", "loss_mask")]
        self.out_keys += ["sample_log_prob", "policy_version", "finish_reason", "temperature"]
        self.engine = engine
        self.sampling = sampling
        self.repeats = repeats
        self.seed = seed
        self.timeout = timeout

    def requests(self, groups: TensorDictBase) -> list[Request]:
        """One request for each group of `groups` [num_groups * repeats]; their temperature is noted there."""
        groups["temperature"] = torch.full((groups.batch_size[0], 1), self.sampling.temperature)
        firsts = groups["tokens", "prompt"][:: self.repeats].tolist()
        lengths = groups["tokens", "prompt_mask"][:: self.repeats].sum(-1).tolist()
        ids = groups["group_id"][:: self.repeats, 0].tolist()
        return [
            self.request(group_id, row[len(row) - length :])
            for row, length, group_id in zip(firsts, lengths, ids, strict=True)
        ]

    def request(self, group_id: int, prompt: Sequence[int]) -> Request:
        seed = (self.seed << 40) + group_id
        return Request(group_id, tuple(prompt), self.repeats, self.sampling, seed)

    def set_temperature(self, temperature: float) -> None:
        """Of the requests made from now on."""
        self.sampling = replace(self.sampling, temperature=temperature)

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
    loss_mask = mask.clone()
    for row, completion in enumerate(completions):
        if completion.sampled is not None:
            loss_mask[row, : len(completion.sampled)] = torch.tensor(completion.sampled)
    reasons = [[FINISH_REASONS.index(completion.finish_reason)] for completion in completions]
    tokens = TensorDict(
        response=pad([completion.token_ids for completion in completions], torch.int64),
        response_mask=mask,
        loss_mask=loss_mask,
        batch_size=[len(completions)],
    )
    return TensorDict(
        tokens=tokens,
        sample_log_prob=pad([completion.log_probs for completion in completions], torch.float32),
        policy_version=pad([completion.policy_versions for completion in completions], torch.int64),
        finish_reason=torch.tensor(reasons),
        batch_size=[len(completions)],
    )


@dataclass
class StreamedGroup:
    """A group on its own way to a batch. scored: its tensors, where somebody had to see them before."""

    prompted: Prompted
    request: Request
    response: Response | None = None
    scored: TensorDictBase | None = None


class Rollouts:
    """Scored groups on demand.

    Args:
        env: prompts and rewards.
        policy: the engine (or pool of engines) as a TensorDict module.
        repeats: completions of a group; if `policy.repeats` is more, a balanced choice of those.
        attempts: replacements for a group that is not kept.
        tell: told how far a collection is, in groups.
    """

    def __init__(
        self,
        env: TokenEnv,
        policy: EnginePolicy,
        repeats: int | None = None,
        attempts: int = 10,
        tell: Tell = lambda stage, done, total: None,
    ) -> None:
        self.env = env
        self.records = Records(env)
        self.policy = policy
        self.repeats = policy.repeats if repeats is None else repeats
        self.attempts = attempts
        self.tell = tell

    def collect(self, num_groups: int, keep: Keep | None = None) -> TensorDictBase:
        """`num_groups` new groups, [num_groups * repeats] completions, group-major.

        keep: dynamic sampling. A group that it refuses is replaced by one of a new prompt, again and again up
        to `attempts` times; then it stays, and `keep` tells it from the others.
        """
        groups = latest = self._generate(num_groups)
        places: list[TensorDictBase] = []
        refused = list(range(num_groups))
        for _ in range(0 if keep is None else self.attempts):
            assert keep is not None
            kept = keep(latest).tolist()
            refused = [place for place, good in zip(refused, kept, strict=True) if not good]
            if not refused:
                break
            places = places or list(groups.split(self.repeats))
            latest = self._generate(len(refused))
            for place, group in zip(refused, latest.split(self.repeats), strict=True):
                self.records.replace(places[place], group)
                places[place] = in_place_of(places[place], group)
        return collate(places) if places else groups

    def begin(self, num_groups: int) -> list[StreamedGroup]:
        """New groups with what the engine is asked for them; no tensors yet."""
        prompted = self.env.prompt(num_groups)
        return [StreamedGroup(one, self.policy.request(one.group_id, one.token_ids)) for one in prompted]

    def assemble(self, groups: Sequence[StreamedGroup]) -> TensorDictBase:
        """What `collect` gives, of answered groups: scored, chosen, with the totals of what was generated."""
        if any(group.scored is not None for group in groups):
            return collate(
                [self.assemble([group]) if group.scored is None else group.scored for group in groups]
            )
        prompts = self.env.tensors([group.prompted for group in groups])
        temperatures = torch.tensor([[group.request.sampling.temperature] for group in groups])
        prompts["temperature"] = temperatures.repeat_interleave(self.policy.repeats, dim=0)
        responses = [group.response for group in groups if group.response is not None]
        return self._judge(self.policy.fill(prompts, responses))

    def _generate(self, num_groups: int) -> TensorDictBase:
        """New groups; each is judged as soon as it is answered, while longer answers are still being drawn."""
        groups = {group.request.request_id: group for group in self.begin(num_groups)}
        requests = [group.request for group in groups.values()]
        answered = 0
        for responses in answers(self.policy.engine, requests, self.policy.timeout):
            for response in responses:
                groups[response.request_id].response = response
            self.env.submit([(groups[one.request_id].prompted, one.completions) for one in responses])
            answered += len(responses)
            self.tell("collect", answered, num_groups)
        self.tell("score", 0, 0)
        return self.assemble(list(groups.values()))

    def _judge(self, completed: TensorDictBase) -> TensorDictBase:
        candidates = self.policy.repeats
        scored = self.env.step(completed)
        sums = totals(scored, candidates)
        scored["row"] = torch.arange(scored.batch_size[0])[:, None]
        groups = choose_balanced(scored, candidates, self.repeats, self.policy.seed)
        self.records.add(scored, groups, candidates, self.policy.sampling.max_tokens)
        groups = groups.exclude("row")
        groups["generated"] = sums.repeat_interleave(self.repeats, dim=0)
        return groups


def collate(groups: Sequence[TensorDictBase]) -> TensorDictBase:
    """Several groups as one batch: prompts padded on the left, responses on the right, to the widest."""
    prompt_width = max(group["tokens", "prompt"].shape[1] for group in groups)
    width = max(group["tokens", "response"].shape[1] for group in groups)
    for scores in ("next", "generated"):
        same_parts([group[scores] for group in groups])
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
