"""Conversion between groups and lines of the ledger.

    Group + GroupFate ──group_to_record──▶ dict ──Ledger──▶ rollouts/*.jsonl.zst
    rollouts/*.jsonl.zst ──read_records──▶ dict ──group_from_record──▶ Group

A line is one JSON object. It has the fields of each `SampledCompletion`, and the learner's values as columns
beside the completions; `read_records` moves these values into the completions. A field has the same type in all
lines, as Arrow requires: a missing value is -1, 0 or an empty list, never null.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Literal

import numpy as np
from torch import Tensor

from envs.example import SYSTEM_ROLES, Example, Message
from envs.group import Group, GroupTimes, Sampling
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.completion_record import completion_to_record, parse_completion
from torchgrpo.monitoring.rows_by_completion import completions_in_loss, first_rows


@dataclass
class GroupFate:
    """Use of a scored group, as the ledger records it.

    name: "trained"; "replaced" by dynamic sampling; "stale", too old for training; "evaluated", of an
    evaluation. iteration: iteration that consumed the group, or iteration before the evaluation. eval_set: name
    of the evaluation set, empty for training. optimizer_steps: steps that trained on the group. trained_at:
    policy version from which the ages of the tokens are counted; None in lockstep. token_values: the learner's
    values of the completions; None if no step trained on the group.
    """

    name: Literal["trained", "replaced", "stale", "evaluated"]
    iteration: int
    eval_set: str = ""
    optimizer_steps: list[int] = field(default_factory=list)
    trained_at: int | None = None
    token_values: "TokenValues | None" = None


@dataclass
class TokenValues:
    """Values of the learner for a group, from the first optimizer step with it.

    advantage: [G], a number for each completion, or a list of one number per token. in_loss: [G], whether the
    loss has a token of the completion. log_ratio: trainer log-prob minus engine log-prob. entropy: entropy of
    the trainer's distribution. Both are float32 for all tokens of the group, completion by completion; 0
    outside the loss.
    """

    advantage: list[Any]
    in_loss: list[bool]
    log_ratio: np.ndarray
    entropy: np.ndarray


def token_values(rollout: Rollout, advantage: Tensor, log_ratio: Tensor, entropy: Tensor) -> Iterator[TokenValues]:
    """Yields the values of each group of a rollout that has advantages.

    The tokens of a completion with several sequences follow each other, as in its record.

    advantage: [N, 1] or [N, R]. log_ratio, entropy: [N, R].
    """
    groups, mask = rollout.groups, rollout.batch.mask
    assert mask is not None
    completions = [one for group in groups for one in group.completions]
    lengths = [len(one.token_ids) for one in completions]
    if advantage.shape[-1] == 1:
        advantages: list[Any] = advantage[first_rows(completions), 0].tolist()
    else:
        response = rollout.batch.tokens.response_mask.cpu()
        flat = iter(advantage.expand(response.shape)[response].tolist())
        advantages = [list(islice(flat, length)) for length in lengths]
    in_loss = completions_in_loss(completions, mask)
    response_mask = rollout.batch.tokens.response_mask.numpy()
    ratios, entropies = log_ratio.numpy()[response_mask], entropy.numpy()[response_mask]
    row = token = 0
    for group in groups:
        rows = slice(row, row + len(group.completions))
        tokens = slice(token, token + sum(lengths[rows]))
        yield TokenValues(advantages[rows], in_loss[rows], ratios[tokens], entropies[tokens])
        row, token = rows.stop, tokens.stop


def prompt_id(messages: Sequence[Message], problem_id: str = "") -> str:
    """Returns a hash of a prompt as 16 hexadecimal digits.

    problem_id: of the example.
    """
    texts = [message[key].encode() for message in messages for key in ("role", "content")]
    texts += [json.dumps(message, sort_keys=True).encode() for message in messages if len(message) > 2]
    texts += [problem_id.encode()] if problem_id else []
    length_prefixed = b"".join([len(text).to_bytes(4, "little") + text for text in texts])
    return hashlib.blake2b(length_prefixed, digest_size=8).hexdigest()


def format_question(messages: Sequence[Message]) -> str:
    """Returns the text of a prompt without system messages; several messages have their roles."""
    messages = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def group_to_record(group: Group, fate: GroupFate) -> dict[str, Any]:
    """Returns the line of the ledger for a group."""
    example, times, replaced = group.example, group.times, group.replaces
    if fate.token_values is None:
        learner_values: dict[str, Any] = {entry.name: [] for entry in fields(TokenValues)}
    else:
        learner_values = vars(fate.token_values)
    return {
        "kind": "eval" if fate.name == "evaluated" else "train",
        "set": fate.eval_set,
        "iteration": fate.iteration,
        "optimizer_steps": fate.optimizer_steps,
        "fate": fate.name,
        "trained_at": -1 if fate.trained_at is None else fate.trained_at,
        "group_id": group.group_id,
        "replaces": -1 if replaced is None else replaced.group_id,
        "prompt_id": prompt_id(example.messages, example.problem_id),
        "row": example.row,
        "source": example.source,
        "messages": example.messages,
        "answer": example.answer,
        "prompt_text": group.prompt_text,
        "prompt_tokens": group.prompt,
        "teacher_prompt_tokens": group.teacher_prompt,
        "sampling": group.sampling,
        "started_at": times.started_at,
        "sampled_at": times.sampled_at,
        "scored_at": times.scored_at,
        "group_size": len(group.completions),
        "completions": [completion_to_record(one) for one in group.candidates],
        **learner_values,
    }


def group_from_record(record: dict[str, Any]) -> Group:
    """Returns the group of a line of the ledger, without the group that it replaces.

    `answer` is the value that JSON preserved; `row_data` is empty.
    """
    completions = [parse_completion(values) for values in record["completions"]]
    size = record["group_size"]
    example = Example(tuple(record["messages"]), record["answer"], record["row"], record["source"])
    return Group(
        record["group_id"],
        example,
        tuple(record["prompt_tokens"]),
        record["prompt_text"],
        Sampling(**record["sampling"]),
        completions[:size],
        GroupTimes(record["started_at"], record["sampled_at"], record["scored_at"]),
        completions[size:],
        teacher_prompt=tuple(record.get("teacher_prompt_tokens", ())),
    )
