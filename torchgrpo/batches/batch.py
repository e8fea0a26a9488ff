"""Tensors of a batch, all of them declared.

    groups ──collate──▶ Batch ──credit──▶ + advantage, mask ... ──step──▶ loss

N completions, G of every group side by side; P the longest prompt, R the longest response. Prompts are padded on the
left, responses on the right, with zeros. Masks go by length, never by the value of a token.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch
from tensordict import TensorClass, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from envs.group import FINISH_REASONS, OUTCOMES, Group, SampledCompletion, Verdict


class Tokens(TensorClass):
    """The ids of prompts and responses."""

    prompt: Tensor
    """int64 [N, P]: the same in all rows of a group."""
    prompt_mask: Tensor
    """bool [N, P]: true on the prompt, false on its padding."""
    response: Tensor
    """int64 [N, R]: every token after the prompt, the end-of-sequence token included."""
    response_mask: Tensor
    """bool [N, R]: true on the response, false on its padding."""
    loss_mask: Tensor
    """bool [N, R]: true on the tokens that the model drew; false on padding and on what the environment wrote."""

    def below(self, rows: int) -> "Tokens":
        """The same ids, those that a model of `rows` embeddings lacks replaced by the last."""
        fewer: Tokens = self.copy()
        fewer.prompt, fewer.response = (ids.clamp(max=rows - 1) for ids in (self.prompt, self.response))
        return fewer


_OF_RESPONSES = ("response", "response_mask", "loss_mask")


class Scores(TensorClass):
    """What the rewards said of each completion. TorchRL's environments put it under `next`."""

    reward: Tensor
    """float32 [N, 1]: the verdict's score."""
    reward_status: Tensor
    """int64 [N, 1]: the verdict's outcome, its index in `envs.group.OUTCOMES`."""


class Batch(TensorClass):
    """Whole groups, group-major. `collate` fills the fields without a default; each of the others says who adds it."""

    tokens: Tokens
    next: Scores
    group_id: Tensor
    """int64 [N, 1]: unique to the group."""
    sample_log_prob: Tensor
    """float32 [N, R]: of each token, by the engine, in the distribution that it sampled from."""
    policy_version: Tensor
    """int64 [N, R]: of the weights that drew the token."""
    finish_reason: Tensor
    """int64 [N, 1]: its index in `envs.group.FINISH_REASONS`."""
    temperature: Tensor
    """float32 [N, 1]: that the completion was sampled at."""
    age: Tensor | None = None
    """int64 [N, R], of `Learner.credit` where it is given a version: the trainer's version less the token's."""
    ref_log_prob: Tensor | None = None
    """float32 [N, R], of `Learner.credit` or `Learner.step` where there is a reference or a teacher: its log-probs."""
    old_log_prob: Tensor | None = None
    """float32 [N, R], of `Learner.credit` where several updates are made of a batch and `policy.old_log_prob=trainer`:
    the trainer's log-probs before the first."""
    advantage: Tensor | None = None
    """float32 [N, 1] (or [N, R]), of `training/credit.py`: the reward's, against the rest of the group."""
    mask: Tensor | None = None
    """bool [N, R], of `training/credit.py`: the tokens in the loss."""
    weight: Tensor | None = None
    """float32 [N, R], of `Learner.step` where `policy.weighs_whole_batches`: see `training/token_weights.py`."""
    penalty: Tensor | None = None
    """float32 [N, R], of the same, where tokens are penalised."""
    teacher_tokens: Tokens | None = None
    """The same responses behind the prompts that the teacher sees, where `policy.teacher_prompt` shows it another."""
    length_reward: Tensor | None = None
    """float64 [N, 1], of `training/credit.py` under `policy.overlong_cache`: what the length added to the reward."""

    @classmethod
    def of(cls, tensordict: TensorDictBase) -> "Batch":
        """The declared fields of a TensorDict [N]; what else it holds stays behind.

        Of `teacher_tokens` it needs to hold the prompts alone.
        """
        held = {field.name: tensordict[field.name] for field in fields(cls) if field.name in tensordict}
        held["tokens"] = declared(Tokens, held["tokens"])
        held["next"] = declared(Scores, held["next"])
        if "teacher_tokens" in held:
            behind = tensordict["tokens"].select(*_OF_RESPONSES).update(held["teacher_tokens"])
            held["teacher_tokens"] = declared(Tokens, behind)
        return cls(**held, batch_size=tensordict.batch_size)

    @property
    def reference_tokens(self) -> Tokens:
        """The ids that the reference scores."""
        return self.tokens if self.teacher_tokens is None else self.teacher_tokens

    def for_reference(self) -> "Batch":
        """The batch with the prompts that the reference sees, by which it is shared out."""
        seen: Batch = self.copy()
        seen.tokens, seen.teacher_tokens = self.reference_tokens, None
        return seen

    def to_torchrl(self) -> TensorDictBase:
        """The rows under the keys of TorchRL's LLM losses and transforms, [N], each as long as its tokens.

        `tokens.{prompt,response,full}`, `masks.{all_attention_mask,all_assistant_mask}`, `log_probs.{response,full}`, 0
        in the prompt; `next.{reward,done,terminated}`, `next.ref_log_probs.full` and `advantage` where they are there.
        The assistant mask holds the tokens in the loss, before `credit` those that the model sampled.
        """
        return lazy_stack([_row_to_torchrl(row) for row in self.unbind(0)])

    @classmethod
    def from_torchrl(cls, rows: TensorDictBase) -> "Batch":
        """The batch of rows [N] under TorchRL's keys; see `to_torchrl`.

        They need `group_id`, `tokens.{prompt,response}`, `log_probs.response` and `next.reward`. Left out,
        `masks.all_assistant_mask` is all of the response, `policy_version` 0, `finish_reason` stop, `temperature` 1.

        Raises:
            KeyError: a row lacks one of the keys that it needs.
        """
        each = rows.unbind(0)
        batch = prompt_tensors(
            [int(row["group_id"]) for row in each], [row["tokens", "prompt"].tolist() for row in each], 1
        )
        temperatures = [float(row.get("temperature", torch.ones(1))) for row in each]
        batch.update(completion_tensors([_completion_from_torchrl(row) for row in each], temperatures))
        scored = OUTCOMES.index("scored")
        status = [int(row["next"].get("reward_status", torch.tensor(scored))) for row in each]
        rewards = torch.stack([row["next", "reward"].reshape(1) for row in each]).float()
        scores = {"reward": rewards, "reward_status": torch.tensor(status)[:, None]}
        batch["next"] = TensorDict(scores, [len(each)])
        made, response = cls.of(batch), batch["tokens", "response_mask"]
        if all("advantage" in row for row in each):
            made.advantage = torch.stack([row["advantage"][-1] for row in each])
        if all(("next", "ref_log_probs", "full") in row.keys(True) for row in each):
            full = [row["next", "ref_log_probs", "full"].tolist() for row in each]
            behind = [values[len(row["tokens", "prompt"]) :] for values, row in zip(full, each, strict=True)]
            made.ref_log_prob = _placed("f", behind, response)
        return made

    def trimmed(self) -> "Batch":
        """The batch without the response columns that are padding in every row."""
        longest = max(1, int(self.tokens.response_mask.sum(1).max()))
        narrow: Batch = self.copy()
        for ids in (narrow.tokens, narrow.teacher_tokens):
            for name in _OF_RESPONSES if ids is not None else ():
                setattr(ids, name, getattr(ids, name)[:, :longest])
        narrow.sample_log_prob = self.sample_log_prob[:, :longest]
        narrow.policy_version = self.policy_version[:, :longest]
        return narrow


def _row_to_torchrl(row: Batch) -> TensorDict:
    """One row of `Batch.to_torchrl`."""
    tokens, response = row.tokens, row.tokens.response_mask
    prompt, written = tokens.prompt[tokens.prompt_mask], tokens.response[response]
    in_prompt = torch.zeros(prompt.shape)

    def full(values: Tensor) -> Tensor:
        """Values [R] of the response behind zeros for the prompt."""
        return torch.cat([in_prompt.to(values.dtype), values[response]])

    ids = torch.cat([prompt, written])
    made = {
        "tokens": {"prompt": prompt, "response": written, "full": ids},
        "masks": {
            "all_attention_mask": torch.ones_like(ids, dtype=torch.bool),
            "all_assistant_mask": full(tokens.loss_mask if row.mask is None else row.mask),
        },
        "log_probs": {"response": row.sample_log_prob[response], "full": full(row.sample_log_prob)},
        "policy_version": row.policy_version[response],
        "next": {
            "reward": row.next.reward[None],
            "reward_status": row.next.reward_status,
            "done": torch.ones(1, dtype=torch.bool),
            "terminated": torch.ones(1, dtype=torch.bool),
        },
        **{name: getattr(row, name) for name in ("group_id", "finish_reason", "temperature")},
    }
    if row.ref_log_prob is not None:
        made["next"]["ref_log_probs"] = {"full": full(row.ref_log_prob)}
    if row.advantage is not None:  # one number stands for all tokens of the row
        made["advantage"] = (row.advantage if len(row.advantage) == 1 else full(row.advantage))[:, None]
    return TensorDict(made)


def _completion_from_torchrl(row: TensorDictBase) -> SampledCompletion:
    response = row["tokens", "response"]
    assistant = row.get(("masks", "all_assistant_mask"), None)
    sampled = (
        torch.ones_like(response, dtype=torch.bool) if assistant is None else assistant[-len(response) :]
    )
    return SampledCompletion(
        response.tolist(),
        row["log_probs", "response"].tolist(),
        row.get("policy_version", torch.zeros_like(response)).tolist(),
        FINISH_REASONS[int(row.get("finish_reason", torch.zeros(1)))],
        sampled.tolist(),
    )


def environment_tokens(tokens: Tokens, mask: Tensor) -> Tensor:
    """bool [N, R]: what the environment wrote into completions that are in the loss. mask: the tokens in the loss."""
    return tokens.response_mask & ~tokens.loss_mask & mask.any(dim=1, keepdim=True)


def declared(cls: type[Tokens] | type[Scores], nested: TensorDictBase) -> Tokens | Scores:
    """The declared fields of a TensorDict [N]; what else it holds stays behind."""
    return cls(**{field.name: nested[field.name] for field in fields(cls)}, batch_size=nested.batch_size)


def collate(groups: Sequence[Group]) -> Batch:
    """The tensors of judged groups, all of as many completions."""
    repeats = len(groups[0].completions)
    collated = prompt_tensors(
        [group.group_id for group in groups],
        [group.prompt for group in groups],
        repeats,
        [group.teacher_prompt for group in groups if group.teacher_prompt],
    )
    collated.update(
        completion_tensors(
            [one for group in groups for one in group.completions],
            [group.sampling.temperature for group in groups for _ in group.completions],
        )
    )
    collated["next"] = verdict_tensors([verdict for group in groups for verdict in group.verdicts])
    return Batch.of(collated)


def prompt_tensors(
    group_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    teacher_prompts: Sequence[Sequence[int]] = (),
) -> TensorDict:
    """The fields of a batch [N] that are there before anything is drawn.

    N: groups * `repeats`. teacher_prompts: none where the teacher sees the same prompts.
    """
    of_groups = TensorDict(
        {"tokens": _prompts(prompts), "group_id": torch.tensor(group_ids)[:, None]}, [len(prompts)]
    )
    if teacher_prompts:
        of_groups["teacher_tokens"] = _prompts(teacher_prompts)
    return of_groups.repeat_interleave(repeats, dim=0)


def _prompts(prompts: Sequence[Sequence[int]]) -> TensorDict:
    """The fields of `Tokens` that are a prompt's, one row for each."""
    mask = _length_mask(prompts).flip(-1)
    return TensorDict({"prompt": _placed("q", prompts, mask), "prompt_mask": mask}, [len(prompts)])


def completion_tensors(completions: Sequence[SampledCompletion], temperatures: Sequence[float]) -> TensorDict:
    """The fields of a batch [N] that are there once everything is drawn. temperatures: one a completion."""
    mask = _length_mask([one.token_ids for one in completions])

    def of_tokens(code: str, values: Callable[[SampledCompletion], Sequence[float]]) -> Tensor:
        return _placed(code, [values(one) for one in completions], mask)

    reasons = torch.tensor([FINISH_REASONS.index(one.finish_reason) for one in completions])
    tokens = {
        "response": of_tokens("q", lambda one: one.token_ids),
        "response_mask": mask,
        "loss_mask": _drawn(completions, mask),
    }
    drawn = {
        "tokens": TensorDict(tokens, [len(completions)]),
        "sample_log_prob": of_tokens("f", lambda one: one.log_probs),
        "policy_version": of_tokens("q", lambda one: one.policy_versions),
        "finish_reason": reasons[:, None],
        "temperature": torch.tensor(temperatures, dtype=torch.float32)[:, None],
    }
    return TensorDict(drawn, [len(completions)])


def verdict_tensors(verdicts: Sequence[Verdict]) -> TensorDict:
    """The fields of `Scores` [N]."""
    scores = {
        "reward": torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float32)[:, None],
        "reward_status": torch.tensor([OUTCOMES.index(verdict.outcome) for verdict in verdicts])[:, None],
    }
    return TensorDict(scores, [len(verdicts)])


def _length_mask(rows: Sequence[Sequence[int]]) -> Tensor:
    """bool [len(rows), longest]: true on the first columns of each row, as many as it has; at least one column."""
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(max(1, int(lengths.max()))) < lengths[:, None]


def _placed(code: str, rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """The rows where `mask` is true, zeros elsewhere. code: `array`'s, for it reads lists five times faster."""
    flat: array[float] = array(code)
    for row in rows:
        flat.fromlist(list(row))
    values = torch.from_numpy(np.asarray(flat))
    return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter_(mask, values)


def _drawn(completions: Sequence[SampledCompletion], response_mask: Tensor) -> Tensor:
    """bool [N, R]: the tokens that the model drew."""
    drawn = response_mask.clone()
    for row, one in enumerate(completions):
        if one.sampled:
            drawn[row, : len(one.sampled)] = torch.tensor(one.sampled)
    return drawn
