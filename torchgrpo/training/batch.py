"""The tensors of a batch, all of them declared: what a learner makes of groups, once, and works on.

    groups ──collate──▶ Batch ──credit──▶ + advantage, mask ... ──step──▶ loss

N completions, G of every group side by side; P the longest prompt, R the longest response. Prompts are padded on the
left, responses on the right, with zeros. Masks go by length, never by the value of a token.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import numpy as np
import torch
from tensordict import TensorClass, TensorDict, TensorDictBase
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

    @property
    def group_ids(self) -> list[int]:
        """One a group, in the order of the rows."""
        return list(dict.fromkeys(self.group_id[:, 0].tolist()))


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


def sampled_tokens(batch: Batch, groups: Sequence[Group], version: int) -> Mapping[str, Tensor]:
    """Masks [N, R] of the tokens in the loss that `version` sampled, by the engine's name."""
    assert batch.mask is not None
    own = batch.mask & (batch.policy_version == version)
    engines = [one.engine for group in groups for one in group.completions]
    return {
        name: own & torch.tensor([engine == name for engine in engines], device=own.device)[:, None]
        for name in sorted(set(engines))
    }
