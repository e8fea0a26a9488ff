"""A group as a line of the ledger, and back: one JSON object with all that the record holds.

    Group + Fate ──record_of──▶ dict ──Ledger──▶ rollouts/*.jsonl.zst ──read_records──▶ dict ──group_of──▶ Group

A line holds its completions as the `SampledCompletion`s that they are, and what the learner knows of them as columns;
what is read has the columns in the completions. A column has one type in all lines, as Arrow wants it: what is not
there is -1, 0 or an empty list, never null.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from torch import Tensor

from envs.example import SYSTEM_ROLES, Completion, Example, Message
from envs.group import Group, SampledCompletion, Sampling, Times, Verdict
from torchgrpo.batches.rollout import Rollout


@dataclass
class Fate:
    """Fate of a group after it was judged.

    name: trained on; refused by dynamic sampling; too old when its turn came; of an evaluation.
    iteration: in which it was consumed, or after which it was evaluated. evaluated: the name of its set.
    optimizer_steps: that trained on it. trained_at: the policy version that its age was counted to, where that was.
    tokens: what the learner said of its completions; None where it has not seen them.
    """

    name: Literal["trained", "replaced", "stale", "evaluated"]
    iteration: int
    evaluated: str = ""
    optimizer_steps: list[int] = field(default_factory=list)
    trained_at: int | None = None
    tokens: "TokenValues | None" = None


@dataclass
class TokenValues:
    """The learner's values of a group's completions, at the first step that trained on it.

    advantage: that they were trained with, [G] numbers, or lists of one a token. in_loss: [G], whether a token of it
    is. log_ratio (trainer less engine), entropy (of the trainer's distribution): float32, of all tokens of the group,
    one completion after another; 0 outside the loss.
    """

    advantage: list[Any]
    in_loss: list[bool]
    log_ratio: np.ndarray
    entropy: np.ndarray


def token_values(
    rollout: Rollout, advantage: Tensor, log_ratio: Tensor, entropy: Tensor
) -> Iterator[TokenValues]:
    """The values of each group of a credited rollout. advantage: [N, 1] or [N, R]. The others: [N, R]."""
    groups, mask = rollout.groups, rollout.batch.mask
    assert mask is not None
    lengths = [len(one.token_ids) for group in groups for one in group.completions]
    if advantage.shape[-1] == 1:
        worth: list[Any] = advantage[:, 0].tolist()
    else:
        worth = [row[:length] for row, length in zip(advantage.tolist(), lengths, strict=True)]
    in_loss = mask.any(-1).tolist()
    written = rollout.batch.tokens.response_mask.numpy()
    ratios, entropies = log_ratio.numpy()[written], entropy.numpy()[written]
    row = token = 0
    for group in groups:
        rows = slice(row, row + len(group.completions))
        tokens = slice(token, token + sum(lengths[rows]))
        yield TokenValues(worth[rows], in_loss[rows], ratios[tokens], entropies[tokens])
        row, token = rows.stop, tokens.stop


def prompt_id(messages: Sequence[Message]) -> str:
    """16 hexadecimal digits that two prompts share where their messages are equal."""
    texts = [message[key].encode() for message in messages for key in ("role", "content")]
    texts += [json.dumps(message, sort_keys=True).encode() for message in messages if len(message) > 2]
    framed = b"".join([len(text).to_bytes(4, "little") + text for text in texts])
    return hashlib.blake2b(framed, digest_size=8).hexdigest()


def question(messages: Sequence[Message]) -> str:
    """Text of a prompt without its system prompt; a chat with its roles."""
    asked = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    if len(asked) == 1:
        return str(asked[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in asked)


def record_of(group: Group, fate: Fate) -> dict[str, Any]:
    example, times, replaced = group.example, group.times, group.in_place_of
    learned = {each.name: [] for each in fields(TokenValues)} if fate.tokens is None else vars(fate.tokens)
    return {
        "kind": "eval" if fate.name == "evaluated" else "train",
        "set": fate.evaluated,
        "iteration": fate.iteration,
        "optimizer_steps": fate.optimizer_steps,
        "fate": fate.name,
        "trained_at": -1 if fate.trained_at is None else fate.trained_at,
        "group_id": group.group_id,
        "in_place_of": -1 if replaced is None else replaced.group_id,
        "prompt_id": prompt_id(example.messages),
        "row": example.row,
        "source": example.source,
        "messages": example.messages,
        "answer": example.answer,
        "prompt_text": group.prompt_text,
        "prompt_tokens": group.prompt,
        "teacher_prompt_tokens": group.teacher_prompt,
        "sampling": group.sampling,
        "begun": times.begun,
        "drawn": times.drawn,
        "judged": times.judged,
        "group_size": len(group.completions),
        "completions": group.candidates,
        **learned,
    }


def group_of(record: dict[str, Any]) -> Group:
    """The group that a line of the ledger was made of, without the one that it is in place of.

    `answer` is what JSON kept of it, `row_data` is empty.
    """
    completions = [_sampled(one) for one in record["completions"]]
    size = record["group_size"]
    example = Example(tuple(record["messages"]), record["answer"], record["row"], record["source"])
    return Group(
        record["group_id"],
        example,
        tuple(record["prompt_tokens"]),
        record["prompt_text"],
        Sampling(**record["sampling"]),
        completions[:size],
        Times(record["begun"], record["drawn"], record["judged"]),
        completions[size:],
        teacher_prompt=tuple(record.get("teacher_prompt_tokens", ())),
    )


def _sampled(one: dict[str, Any]) -> SampledCompletion:
    values = {each.name: one[each.name] for each in fields(SampledCompletion)}
    verdict = {each.name: one["verdict"][each.name] for each in fields(Verdict) if each.init}
    return SampledCompletion(**values | {"shown": Completion(**one["shown"]), "verdict": Verdict(**verdict)})
