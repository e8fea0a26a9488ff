"""Tensor classes of a training batch, built from groups and converted to and from TorchRL.

    groups ──collate──▶ Batch ──assign_credit──▶ + advantage, mask ... ──step──▶ loss

A batch has N token sequences; those of a completion are adjacent, and so are the G completions of a group. P is the
length of the longest prompt, R that of the longest response. Prompts are padded on the left, responses on the right,
with zeros. Masks follow from lengths, never from the value of a token.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch
from tensordict import TensorClass, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from config.schema.errors import ConfigError
from envs.group import FINISH_REASONS, OUTCOMES, Group, SampledCompletion, TokenSequence, Verdict
from torchgrpo.batches.episodes import EpisodeRows


class Tokens(TensorClass):
    """Token ids and masks of prompts and responses."""

    prompt: Tensor
    """int64 [N, P]: prompt ids, equal in all rows of a group unless its completions have several sequences."""
    prompt_mask: Tensor
    """bool [N, P]: true on prompt tokens, false on padding."""
    response: Tensor
    """int64 [N, R]: ids of all tokens after the prompt, the end-of-sequence token included."""
    response_mask: Tensor
    """bool [N, R]: true on response tokens, false on padding."""
    loss_mask: Tensor
    """bool [N, R]: true on tokens that the model sampled, false on padding and on tokens of the environment."""

    def episode_rows(self, episode: Tensor | None) -> EpisodeRows | None:
        """Returns the rows of each completion by `Batch.episode`."""
        return None if episode is None else EpisodeRows.from_masks(episode, self.prompt_mask, self.response_mask)

    def clamp_to_vocabulary(self, rows: int) -> "Tokens":
        """Replaces ids that an embedding of `rows` rows lacks by its last id."""
        clamped: Tokens = self.copy()
        clamped.prompt, clamped.response = (ids.clamp(max=rows - 1) for ids in (self.prompt, self.response))
        return clamped


_RESPONSE_FIELDS = ("response", "response_mask", "loss_mask")


class CompletionRewards(TensorClass):
    """Reward and reward outcome of each completion, under TorchRL's key `next`."""

    reward: Tensor
    """float32 [N, 1]: score of the verdict."""
    reward_status: Tensor
    """int64 [N, 1]: index of the verdict's outcome in `envs.group.OUTCOMES`."""


class Batch(TensorClass):
    """Tensors of whole groups, one row per token sequence, in the order of the groups.

    `collate` fills the fields without a default. The docstring of each other field names the function that adds it.
    """

    tokens: Tokens
    next: CompletionRewards
    group_id: Tensor
    """int64 [N, 1]: unique id of the group."""
    sample_log_prob: Tensor
    """float32 [N, R]: log-prob of each token under the distribution that the engine sampled from."""
    policy_version: Tensor
    """int64 [N, R]: policy version of the weights that sampled the token."""
    finish_reason: Tensor
    """int64 [N, 1]: index of the finish reason in `envs.group.FINISH_REASONS`."""
    temperature: Tensor
    """float32 [N, 1]: sampling temperature of the completion."""
    episode: Tensor | None = None
    """int64 [N, 1]: number of the completion that the sequence belongs to; None if each row is a completion."""
    age: Tensor | None = None
    """int64 [N, R]: policy version of the trainer less that of the token. Added by `Rollout.from_groups`."""
    ref_log_prob: Tensor | None = None
    """float32 [N, R]: log-probs of the reference model or teacher. Added by the learner."""
    old_log_prob: Tensor | None = None
    """float32 [N, R]: log-probs of the trainer before the first update on the batch.

    Added by `Learner.credit` for several updates per batch with `policy.old_log_prob=trainer`.
    """
    advantage: Tensor | None = None
    """float32 [N, 1] (or [N, R]): advantage of the reward in its group. Added by `assign_credit`."""
    mask: Tensor | None = None
    """bool [N, R]: tokens in the loss. Added by `assign_credit`."""
    weight: Tensor | None = None
    """float32 [N, R]: factor of the policy term (`training/token_weights.py`).

    Added by `Learner.step` where `policy.has_batchwide_weights`.
    """
    penalty: Tensor | None = None
    """float32 [N, R]: penalty on the log-ratio, where tokens are penalised. Added together with `weight`."""
    teacher_tokens: Tokens | None = None
    """Token ids with the prompts of the teacher, where `policy.teacher_prompt` sets different prompts."""
    length_reward: Tensor | None = None
    """float64 [N, 1]: change of the reward by the length, under `policy.overlong_cache`. Added by `assign_credit`."""

    @classmethod
    def from_tensors(cls, tensordict: TensorDictBase) -> "Batch":
        """Builds a batch from the declared fields of a TensorDict [N].

        Other entries are dropped. `teacher_tokens` needs only the fields of prompts.
        """
        tensors = {field.name: tensordict[field.name] for field in fields(cls) if field.name in tensordict}
        tensors["tokens"] = select_declared_fields(Tokens, tensors["tokens"])
        tensors["next"] = select_declared_fields(CompletionRewards, tensors["next"])
        if "teacher_tokens" in tensors:
            teacher_tokens = tensordict["tokens"].select(*_RESPONSE_FIELDS).update(tensors["teacher_tokens"])
            tensors["teacher_tokens"] = select_declared_fields(Tokens, teacher_tokens)
        return cls(**tensors, batch_size=tensordict.batch_size)

    @property
    def episode_rows(self) -> EpisodeRows | None:
        """Rows of each completion; None if each row is a completion."""
        return self.tokens.episode_rows(self.episode)

    @property
    def num_completions(self) -> int:
        """Number of completions."""
        rows = self.episode_rows
        return len(self) if rows is None else rows.count

    @property
    def reference_tokens(self) -> Tokens:
        """Token ids that the reference model scores."""
        return self.tokens if self.teacher_tokens is None else self.teacher_tokens

    def for_reference(self) -> "Batch":
        """Returns the batch with the prompts of the reference model as its tokens."""
        reference_batch: Batch = self.copy()
        reference_batch.tokens, reference_batch.teacher_tokens = self.reference_tokens, None
        return reference_batch

    def to_torchrl(self) -> TensorDictBase:
        """Returns the rows under the keys of TorchRL's LLM losses and transforms.

        The result is a lazy stack [N]; each row is as long as its tokens. Keys:
        `tokens.{prompt,response,full}`, `masks.{all_attention_mask,all_assistant_mask}`,
        `log_probs.{response,full}` (0 in the prompt), `next.{reward,done,terminated}`, and
        `next.ref_log_probs.full` and `advantage` where the batch has them. The assistant mask marks the tokens
        in the loss; before `assign_credit` it marks the sampled tokens.
        """
        return lazy_stack([_row_to_torchrl(row) for row in self.unbind(0)])

    @classmethod
    def from_torchrl(cls, rows: TensorDictBase) -> "Batch":
        """Builds a batch from rows [N] under TorchRL's keys (see `to_torchrl`).

        Required keys: `group_id`, `tokens.{prompt,response}`, `log_probs.response` and `next.reward`. Defaults
        of missing keys: `masks.all_assistant_mask` all of the response, `policy_version` 0, `finish_reason`
        stop, `temperature` 1.

        Raises:
            KeyError: a row lacks a required key.
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
        converted, response = cls.from_tensors(batch), batch["tokens", "response_mask"]
        if all("episode" in row for row in each):
            converted.episode = torch.stack([row["episode"] for row in each])
        if all("advantage" in row for row in each):
            converted.advantage = torch.stack([row["advantage"][-1] for row in each])
        if all(("next", "ref_log_probs", "full") in row.keys(True) for row in each):
            full = [row["next", "ref_log_probs", "full"].tolist() for row in each]
            of_responses = [values[len(row["tokens", "prompt"]) :] for values, row in zip(full, each, strict=True)]
            converted.ref_log_prob = _pad_rows("f", of_responses, response)
        return converted

    def trim_padding(self) -> "Batch":
        """Returns the batch without response columns that are padding in all rows."""
        longest = max(1, int(self.tokens.response_mask.sum(1).max()))
        narrow: Batch = self.copy()
        for ids in (narrow.tokens, narrow.teacher_tokens):
            for name in _RESPONSE_FIELDS if ids is not None else ():
                setattr(ids, name, getattr(ids, name)[:, :longest])
        narrow.sample_log_prob = self.sample_log_prob[:, :longest]
        narrow.policy_version = self.policy_version[:, :longest]
        return narrow


def _row_to_torchrl(row: Batch) -> TensorDict:
    """Converts one row for `Batch.to_torchrl`."""
    tokens, response = row.tokens, row.tokens.response_mask
    prompt, response_ids = tokens.prompt[tokens.prompt_mask], tokens.response[response]
    in_prompt = torch.zeros(prompt.shape)

    def full(values: Tensor) -> Tensor:
        """Prepends zeros for the prompt to values [R] of the response."""
        return torch.cat([in_prompt.to(values.dtype), values[response]])

    ids = torch.cat([prompt, response_ids])
    entries = {
        "tokens": {"prompt": prompt, "response": response_ids, "full": ids},
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
    if row.episode is not None:
        entries["episode"] = row.episode
    if row.ref_log_prob is not None:
        entries["next"]["ref_log_probs"] = {"full": full(row.ref_log_prob)}
    if row.advantage is not None:  # one number for all tokens of the row
        entries["advantage"] = (row.advantage if len(row.advantage) == 1 else full(row.advantage))[:, None]
    return TensorDict(entries)


def _completion_from_torchrl(row: TensorDictBase) -> SampledCompletion:
    """Converts one row under TorchRL's keys to a sampled completion."""
    response = row["tokens", "response"]
    assistant = row.get(("masks", "all_assistant_mask"), None)
    sampled = torch.ones_like(response, dtype=torch.bool) if assistant is None else assistant[-len(response) :]
    return SampledCompletion(
        response.tolist(),
        row["log_probs", "response"].tolist(),
        row.get("policy_version", torch.zeros_like(response)).tolist(),
        FINISH_REASONS[int(row.get("finish_reason", torch.zeros(1)))],
        sampled.tolist(),
    )


def environment_token_mask(tokens: Tokens, mask: Tensor, episodes: EpisodeRows | None = None) -> Tensor:
    """Returns the mask [N, R] of environment tokens in completions that are in the loss.

    Tokens in a prompt are not among them, even if the environment wrote them.

    mask: bool [N, R], the tokens in the loss. episodes: rows of each completion; None: each row is a completion.
    """
    in_loss = mask.any(dim=1, keepdim=True)
    if episodes is not None:
        in_loss = episodes.sum(in_loss.long()) > 0
    return tokens.response_mask & ~tokens.loss_mask & in_loss


def select_declared_fields(
    cls: type[Tokens] | type[CompletionRewards], tensordict: TensorDictBase
) -> Tokens | CompletionRewards:
    """Builds `cls` from its declared fields in a TensorDict [N], without other entries."""
    return cls(**{field.name: tensordict[field.name] for field in fields(cls)}, batch_size=tensordict.batch_size)


def collate(groups: Sequence[Group]) -> Batch:
    """Builds the batch of scored groups: a row for each token sequence of each completion.

    Raises:
        ConfigError: the teacher's prompt of a sequence is not known.
    """
    completions = [one for group in groups for one in group.completions]
    rows = [(group, one) for group in groups for each in group.completions for one in each.sequences(group.prompt)]
    counts = torch.tensor([one.num_sequences for one in completions])
    collated = prompt_tensors(
        [group.group_id for group in groups],
        [group.prompt for group in groups],
        torch.tensor([group.num_sequences for group in groups]),
        [group.teacher_prompt for group in groups if group.teacher_prompt],
    )
    if any(one.sequence_starts for one in completions):
        collated["tokens"] = _pad_prompts([one.prompt for _, one in rows])
        if "teacher_tokens" in collated:
            collated["teacher_tokens"] = _pad_prompts([_teacher_prompt(group, one.prompt) for group, one in rows])
    temperatures = [group.sampling.temperature for group, _ in rows]
    collated.update(completion_tensors([one for _, one in rows], temperatures))
    verdicts = verdict_tensors([one.verdict for one in completions if one.verdict is not None])
    collated["next"] = verdicts.repeat_interleave(counts, dim=0)
    if len(rows) > len(completions):
        collated["episode"] = torch.arange(len(completions)).repeat_interleave(counts)[:, None]
    return Batch.from_tensors(collated)


def _teacher_prompt(group: Group, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the teacher's prompt of a sequence.

    It is the teacher's prompt of the group, with what the sequence's `prompt` adds to that of the group.
    """
    if prompt[: len(group.prompt)] != group.prompt:
        raise ConfigError(
            f"policy.teacher_prompt is set, but a completion of row {group.example.row} has a sequence that does not "
            "begin with the prompt, so its teacher's prompt is unknown; set policy.teacher_prompt=null, or use a chat "
            "template or environment that keeps the first messages"
        )
    return group.teacher_prompt + prompt[len(group.prompt) :]


def prompt_tensors(
    group_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    rows: int | Tensor,
    teacher_prompts: Sequence[Sequence[int]] = (),
) -> TensorDict:
    """Builds the fields of a batch that are known before sampling.

    rows: number of rows of every group, or int64 [groups]. teacher_prompts: empty if the teacher sees the same prompts.
    """
    group_tensors = TensorDict(
        {"tokens": _pad_prompts(prompts), "group_id": torch.tensor(group_ids)[:, None]}, [len(prompts)]
    )
    if teacher_prompts:
        group_tensors["teacher_tokens"] = _pad_prompts(teacher_prompts)
    return group_tensors.repeat_interleave(rows, dim=0)


def _pad_prompts(prompts: Sequence[Sequence[int]]) -> TensorDict:
    """Builds the prompt fields of `Tokens`, one row per prompt."""
    mask = _length_mask(prompts).flip(-1)
    return TensorDict({"prompt": _pad_rows("q", prompts, mask), "prompt_mask": mask}, [len(prompts)])


def completion_tensors(
    completions: Sequence[SampledCompletion | TokenSequence], temperatures: Sequence[float]
) -> TensorDict:
    """Builds the fields of a batch [N] that sampling adds. temperatures: one per completion."""
    mask = _length_mask([one.token_ids for one in completions])

    def token_tensor(code: str, values: Callable[[SampledCompletion | TokenSequence], Sequence[float]]) -> Tensor:
        return _pad_rows(code, [values(one) for one in completions], mask)

    reasons = torch.tensor([FINISH_REASONS.index(one.finish_reason) for one in completions])
    tokens = {
        "response": token_tensor("q", lambda one: one.token_ids),
        "response_mask": mask,
        "loss_mask": _sampled_mask(completions, mask),
    }
    tensors = {
        "tokens": TensorDict(tokens, [len(completions)]),
        "sample_log_prob": token_tensor("f", lambda one: one.log_probs),
        "policy_version": token_tensor("q", lambda one: one.policy_versions),
        "finish_reason": reasons[:, None],
        "temperature": torch.tensor(temperatures, dtype=torch.float32)[:, None],
    }
    return TensorDict(tensors, [len(completions)])


def verdict_tensors(verdicts: Sequence[Verdict]) -> TensorDict:
    """Builds the fields of `CompletionRewards` from N verdicts."""
    scores = {
        "reward": torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float32)[:, None],
        "reward_status": torch.tensor([OUTCOMES.index(verdict.outcome) for verdict in verdicts])[:, None],
    }
    return TensorDict(scores, [len(verdicts)])


def _length_mask(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns a mask [rows, longest] that is true below each row's length.

    The mask has at least one column.
    """
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(max(1, int(lengths.max()))) < lengths[:, None]


def _pad_rows(code: str, rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """Writes the values of ragged rows where `mask` is true, zeros elsewhere.

    code: type code of `array`, which converts lists faster than torch does.
    """
    flat: array[float] = array(code)
    for row in rows:
        flat.fromlist(list(row))
    values = torch.from_numpy(np.asarray(flat))
    return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter_(mask, values)


def _sampled_mask(completions: Sequence[SampledCompletion | TokenSequence], response_mask: Tensor) -> Tensor:
    """Returns the mask [N, R] of tokens that the model sampled."""
    sampled = response_mask.clone()
    for row, one in enumerate(completions):
        if one.sampled_mask:
            sampled[row, : len(one.sampled_mask)] = torch.tensor(one.sampled_mask)
    return sampled
