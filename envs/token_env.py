"""Prompts in, rewards out, as a TorchRL environment over token TensorDicts.

One instance serves any number of groups at once, of any batch size, and a group can wait for its answer as
long as it likes: its tokens are in its TensorDict, and `in_flight` maps its group_id to what the reward needs.
(Examples as non-tensor data, one a row, cost 7% of an iteration of the quickstart.)

    reset ─▶ (tokens, prompt), group_id ─▶ engine ─▶ (tokens, response) ─▶ step ─▶ reward, done

Beside running engines the same comes in smaller portions and without tensors, which are made once a batch, so
that a group is judged while others are still being drawn:

    prompt ─▶ ids ─▶ engine ─▶ ids ─▶ submit ─▶ judged ····▶ tensors, step
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from config.errors import ConfigError
from envs.control_tokens import control_tokens
from envs.task import Completion, Example

OUTCOMES = ("scored", "invalid", "error")
STOP, LENGTH, ABORT = range(3)
FINISH_REASONS = ("stop", "length", "abort")
_REMEMBERED = 4096


class Verdict(Protocol):
    """What the reward service says of one completion."""

    @property
    def score(self) -> float: ...
    @property
    def parts(self) -> dict[str, float]: ...
    @property
    def outcome(self) -> str: ...


class Submitted(Protocol):
    """A batch that is being judged. missing: verdicts that are to come."""

    missing: int


class Rewards(Protocol):
    """See `envs.judging.service.RewardService`."""

    def submit(self, completions: Sequence[Completion], examples: Sequence[Example]) -> Any: ...
    def poll(self, ticket: Any, timeout: float = 0.0) -> Sequence[Verdict] | None: ...
    def wait(self, ticket: Any) -> Sequence[Verdict]: ...


class Drawn(Protocol):
    """An engine's completion; see `rollout.engines.sampler.Completion`."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def sampled(self) -> Sequence[bool] | None: ...
    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True)
class Prompted:
    """A group before there is a tensor of it."""

    group_id: int
    example: Example
    token_ids: list[int]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[int]]:
    """Token ids of each chat, ending where the assistant's answer begins. What messages spell stays text: control
    tokens are those of the template alone.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.name={tokenizer.name_or_path}: its tokenizer has no chat template, so messages cannot be "
            "turned into a prompt; take an instruct or chat model, or add chat_template.jinja to its folder"
        )
    chats = [list(example.messages) for example in examples]
    ids = list(
        tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)
    )
    control = control_tokens(tokenizer)
    for row, chat in enumerate(chats):
        if control.spelled_in(chat):
            ids[row] = control.encode(control.render(chat))
    return ids


def pad(rows: Sequence[Sequence[int | float]], dtype: torch.dtype, left: bool = False) -> torch.Tensor:
    """[len(rows), longest] of `dtype`, zeros where a row is shorter; at least one column."""
    width = max(1, max(len(row) for row in rows))
    filled = [
        [*[0] * (width - len(row)), *row] if left else [*row, *[0] * (width - len(row))] for row in rows
    ]
    return torch.tensor(filled, dtype=dtype)


def length_mask(lengths: Sequence[int], left: bool = False) -> torch.Tensor:
    """bool [len(lengths), longest], true on the first (or, with `left`, the last) `length` columns."""
    width = max(1, max(lengths))
    columns = torch.arange(width)
    counts = torch.tensor(lengths)[:, None]
    return columns >= width - counts if left else columns < counts


def _turns(token_ids: list[int], sampled: Sequence[bool] | None) -> list[list[int]]:
    """The ids of each of the model's turns: the runs between those that the environment wrote."""
    if sampled is None or all(sampled):
        return [token_ids]
    turns: list[list[int]] = [[]]
    for token, own, before in zip(token_ids, sampled, (True, *sampled), strict=False):
        if own and not before:
            turns.append([])
        if own:
            turns[-1].append(token)
    return turns


def _success_rate(verdicts: Sequence[Verdict]) -> float:
    """Mean accuracy of one group; completions that could not be judged do not count."""
    judged = [verdict for verdict in verdicts if verdict.outcome != "error"]
    accuracies = [verdict.parts.get("accuracy", float(verdict.score >= 1)) for verdict in judged]
    return sum(accuracies) / max(1, len(accuracies))


class TokenEnv(EnvBase):
    """Groups of `repeats` completions a prompt.

    Args:
        draw: the next n examples, in training order.
        tokenizer: turns messages into ids and sampled ids into the text that is judged.
        rewards: judges whole batches; it owns deadlines and worker processes.
        repeats: completions per prompt, G.
        observe: told the success rate of every judged group, 0 to 1.
        ends: tokens that may end a turn of the model, the tokenizer's end token apart.
        members: of a mixture, the values of `Example.source`; `member` then says of each row which one it is.
    """

    def __init__(
        self,
        draw: Callable[[int], list[Example]],
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards,
        repeats: int,
        observe: Callable[[Example, float], None] | None = None,
        ends: Collection[int] = (),
        members: Sequence[str] = (),
    ) -> None:
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([]), allow_done_after_reset=True)
        self._batch_locked = False
        self.draw = draw
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.repeats = repeats
        self.observe = observe
        self.control = control_tokens(tokenizer)
        self.ends = frozenset((tokenizer.eos_token_id, *ends))
        self.members = tuple(members)
        self.next_group_id = 0
        self.in_flight: dict[int, Example] = {}
        self.judged_examples: dict[int, Example] = {}
        self._tickets: dict[int, Submitted] = {}
        self._verdicts: dict[int, Sequence[Verdict]] = {}
        self.observation_spec = Composite(
            tokens=Composite(
                prompt=Unbounded((-1,), dtype=torch.int64), prompt_mask=Binary(shape=(-1,), dtype=torch.bool)
            ),
            group_id=Unbounded((1,), dtype=torch.int64),
        )
        self.action_spec = Composite(tokens=Composite(response=Unbounded((-1,), dtype=torch.int64)))
        self.reward_spec = Unbounded((1,))

    def groups(self, num_groups: int) -> TensorDictBase:
        """`num_groups` fresh prompts, each repeated: a reset TensorDict of [num_groups * repeats]."""
        return self.reset(TensorDict(batch_size=[num_groups * self.repeats]))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        rows = tensordict.batch_size[0] if tensordict is not None and tensordict.batch_size else self.repeats
        return self.tensors(self.prompt(rows // self.repeats))

    def prompt(self, num_groups: int) -> list[Prompted]:
        """Draw and encode `num_groups` fresh prompts."""
        examples = self.draw(num_groups)
        prompts = encode_prompts(self.tokenizer, examples)
        first = self.next_group_id
        self.next_group_id += num_groups
        self.in_flight |= dict(enumerate(examples, first))
        pairs = zip(examples, prompts, strict=True)
        return [Prompted(first + index, example, ids) for index, (example, ids) in enumerate(pairs)]

    def tensors(self, groups: Sequence[Prompted]) -> TensorDictBase:
        """What a reset gives, [len(groups) * repeats], for prompts that were drawn before.

        Of a mixture also `member` bool [N, members], true in the column of the one that the prompt comes from.
        """
        prompts = [group.token_ids for group in groups]
        tokens = TensorDict(
            prompt=pad(prompts, torch.int64, left=True),
            prompt_mask=length_mask([len(prompt) for prompt in prompts], left=True),
            batch_size=[len(groups)],
        )
        ids = torch.tensor([[group.group_id] for group in groups])
        prompted = TensorDict(tokens=tokens, group_id=ids, batch_size=[len(groups)])
        if self.members:
            sources = [group.example.source for group in groups]
            prompted["member"] = torch.tensor([[name == each for each in self.members] for name in sources])
        repeated = prompted.repeat_interleave(self.repeats, dim=0)
        repeated["done"] = torch.zeros(*repeated.batch_size, 1, dtype=torch.bool)
        repeated["terminated"] = torch.zeros(*repeated.batch_size, 1, dtype=torch.bool)
        return repeated

    def submit(self, answered: Sequence[tuple[Prompted, Sequence[Drawn]]]) -> None:
        """Begin to judge groups, so that a later `step` need not wait for their verdicts."""
        drawn = [(one.token_ids, one.sampled) for _, completions in answered for one in completions]
        truncated = [one.finish_reason == "length" for _, completions in answered for one in completions]
        judgeable = self._judgeable(drawn, truncated)
        start = 0
        for group, completions in answered:
            end = start + len(completions)
            examples = [group.example] * len(completions)
            self._tickets[group.group_id] = self.rewards.submit(judgeable[start:end], examples)
            start = end

    def judged(self, timeout: float) -> list[int]:
        """Ids of the submitted groups whose verdicts have come; waits for one at most `timeout` seconds."""
        if not self._tickets:
            return []
        self.rewards.poll(next(iter(self._tickets.values())), timeout)  # polling one advances all
        done = [group_id for group_id, ticket in self._tickets.items() if not ticket.missing]
        for group_id in done:
            verdicts = self.rewards.poll(self._tickets.pop(group_id))
            assert verdicts is not None
            self._verdicts[group_id] = verdicts
        return done

    def forget(self, group_id: int) -> None:
        """A group that no `step` will see."""
        for known in (self.in_flight, self._tickets, self._verdicts):
            known.pop(group_id, None)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        groups = tensordict["group_id"][:, 0].tolist()
        firsts = groups[:: self.repeats]
        if not all(group_id in self._verdicts or group_id in self._tickets for group_id in firsts):
            self._submit_rows(tensordict, groups)
        verdicts = [verdict for group_id in firsts for verdict in self._verdicts_of(group_id)]
        rows = tensordict.batch_size
        names = sorted({name for verdict in verdicts for name in verdict.parts})
        parts = TensorDict(
            {name: torch.tensor([[v.parts.get(name, 0.0)] for v in verdicts]) for name in names},
            batch_size=rows,
        )
        for start in range(0, len(groups), self.repeats):
            example = self._judged(groups[start])
            if self.observe is not None:
                self.observe(example, _success_rate(verdicts[start : start + self.repeats]))
        done = torch.ones(*rows, 1, dtype=torch.bool)
        return TensorDict(
            reward=torch.tensor([[verdict.score] for verdict in verdicts], dtype=torch.float32),
            reward_parts=parts,
            reward_status=torch.tensor([[OUTCOMES.index(verdict.outcome)] for verdict in verdicts]),
            done=done,
            terminated=done.clone(),
            batch_size=rows,
        )

    def _judged(self, group_id: int) -> Example:
        """The example of a group, which is remembered for a while, for samples that are printed."""
        example = self.judged_examples[group_id] = self.in_flight.pop(group_id)
        while len(self.judged_examples) > _REMEMBERED:
            del self.judged_examples[next(iter(self.judged_examples))]
        return example

    def _submit_rows(self, tensordict: TensorDictBase, groups: Sequence[int]) -> None:
        """For whoever steps the environment without `submit`."""
        truncated = (tensordict["finish_reason"][:, 0] == LENGTH).tolist()
        completions = self._judgeable(self._responses(tensordict), truncated)
        for start in range(0, len(groups), self.repeats):
            examples = [self.in_flight[groups[start]]] * self.repeats
            ticket = self.rewards.submit(completions[start : start + self.repeats], examples)
            self._tickets[groups[start]] = ticket

    def _verdicts_of(self, group_id: int) -> Sequence[Verdict]:
        if group_id in self._verdicts:
            return self._verdicts.pop(group_id)
        return self.rewards.wait(self._tickets.pop(group_id))

    def prompt_texts(self, tensordict: TensorDictBase) -> list[str]:
        """The prompts as the model reads them, chat template included."""
        rows = zip(tensordict["tokens", "prompt"], tensordict["tokens", "prompt_mask"], strict=True)
        return self.tokenizer.batch_decode([row[mask].tolist() for row, mask in rows])

    def texts(self, tensordict: TensorDictBase) -> list[str]:
        """The responses decoded, every turn and what the environment said between them. Control tokens are shown in
        those alone that hold some where they do not belong."""
        responses = self._responses(tensordict)
        texts = self.tokenizer.batch_decode([ids for ids, _ in responses], skip_special_tokens=True)
        for row, (ids, sampled) in enumerate(responses):
            if self._holds_control_tokens(_turns(ids, sampled)):
                (texts[row],) = self.tokenizer.batch_decode([ids])
        return texts

    def _responses(self, tensordict: TensorDictBase) -> list[tuple[list[int], list[bool]]]:
        """The ids of each response, and which of them the model drew."""
        tokens = tensordict["tokens"]
        lengths = tokens["response_mask"].sum(-1).tolist()
        rows = zip(tokens["response"].tolist(), tokens["loss_mask"].tolist(), lengths, strict=True)
        return [(ids[:length], sampled[:length]) for ids, sampled, length in rows]

    def _judgeable(
        self, responses: Sequence[tuple[list[int], Sequence[bool] | None]], truncated: Sequence[bool]
    ) -> list[Completion]:
        """What is judged: the text of the last turn, the tokens that the model drew in all of them."""
        turns = [_turns(ids, sampled) for ids, sampled in responses]
        texts = self.tokenizer.batch_decode([of_one[-1] for of_one in turns], skip_special_tokens=True)
        return [
            Completion(text, sum(map(len, of_one)), cut, self._holds_control_tokens(of_one))
            for text, of_one, cut in zip(texts, turns, truncated, strict=True)
        ]

    def _holds_control_tokens(self, turns: Sequence[list[int]]) -> bool:
        return any(self.control.inside(turn, self.ends) for turn in turns)

    def _set_seed(self, seed: int | None) -> None:
        """Nothing random here: prompt order is the source's, sampling the engine's."""
