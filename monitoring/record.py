"""A group as a line of the ledger, and back: one JSON object with all that the record holds.

    Group + Fate ──record_of──▶ dict ──Ledger──▶ rollouts/*.jsonl.zst ──read_records, group_of──▶ Group

Lists that repeat one value (versions, who wrote a token) are written as runs: [[value, count], ...]. Numbers that a
learner reads as float32 are written with the digits of float32, which gives them back to the bit. A column has one type
in all lines, as Arrow wants it: what is not there is -1, 0 or an empty list, never null.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from typing import Any, Literal

import numpy as np
from torch import Tensor

from envs.example import Completion, Example, Message
from envs.group import Group, SampledCompletion, Sampling, Times, Verdict

FateName = Literal["trained", "replaced", "stale", "evaluated"]
"""What became of a group: trained on; refused by dynamic sampling; too old when its turn came; of an evaluation."""


@dataclass
class Fate:
    """What became of a group after it was judged.

    iteration: in which it was consumed, or after which it was evaluated. evaluated: the name of its set.
    optimizer_steps: that trained on it. trained_at: the policy version that its age was counted to, where that was.
    tokens: what the learner said of its completions; None where it has not seen them.
    """

    name: FateName
    iteration: int
    evaluated: str = ""
    optimizer_steps: list[int] = field(default_factory=list)
    trained_at: int | None = None
    tokens: "TokenValues | None" = None


@dataclass(frozen=True)
class TokenValues:
    """What the learner knows of the completions of a group, at the first step that trained on it.

    advantage: [G] numbers, or lists of R. in_loss: [G], whether a token of it is. log_ratio: float32 [G, R], trainer
    less engine. entropy: float32 [G, R], of the trainer's distribution. Both are 0 for tokens outside the loss.
    """

    advantage: list[Any]
    in_loss: list[bool]
    log_ratio: np.ndarray
    entropy: np.ndarray


def token_values(
    advantage: Tensor, mask: Tensor, log_ratio: Tensor, entropy: Tensor, repeats: int
) -> Iterator[TokenValues]:
    """Of each group of a batch, in its order. advantage: [N, 1] or [N, R]. The others: [N, R]. repeats: G."""
    worth = advantage[:, 0].tolist() if advantage.shape[-1] == 1 else advantage.tolist()
    in_loss = mask.any(-1).tolist()
    ratios, entropies = log_ratio.numpy(), entropy.numpy()
    for first in range(0, len(worth), repeats):
        rows = slice(first, first + repeats)
        yield TokenValues(worth[rows], in_loss[rows], ratios[rows], entropies[rows])


def prompt_id(messages: Sequence[Message]) -> str:
    """16 hexadecimal digits that two prompts share where their messages are equal."""
    texts = [message[key].encode() for message in messages for key in ("role", "content")]
    framed = b"".join([len(text).to_bytes(4, "little") + text for text in texts])
    return hashlib.blake2b(framed, digest_size=8).hexdigest()


def record_of(group: Group, fate: Fate) -> dict[str, Any]:
    """The line of a group, for `orjson` with numpy arrays."""
    example, times, replaced = group.example, group.times, group.in_place_of
    completions = _rows(group.completions, fate.tokens, chosen=True, first=0)
    if group.left_out:
        completions += _rows(group.left_out, None, chosen=False, first=len(completions))
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
        "sampling": vars(group.sampling),
        "begun": times.begun,
        "drawn": times.drawn,
        "judged": times.judged,
        "engines": runs([one.engine for one in group.candidates]),
        "completions": completions,
    }


_UNSEEN: tuple[Any, bool, Any, Any] = (0.0, False, (), ())


def _rows(
    completions: Sequence[SampledCompletion], tokens: TokenValues | None, *, chosen: bool, first: int
) -> list[dict[str, Any]]:
    """Of each completion its object. chosen: the group kept it. first: the number of the first.

    One loop without calls, and one array for all log-probs: most of what a ledger costs is spent here.
    """
    log_probs = np.fromiter(chain.from_iterable([one.log_probs for one in completions]), np.float32)
    values: Iterable[tuple[Any, bool, Any, Any]] = repeat(_UNSEEN, len(completions))
    if tokens is not None:
        values = zip(tokens.advantage, tokens.in_loss, tokens.log_ratio, tokens.entropy, strict=True)
    rows: list[dict[str, Any]] = []
    start = 0
    for one, (advantage, in_loss, log_ratio, entropy) in zip(completions, values, strict=True):
        length, shown, verdict = len(one.token_ids), one.shown, one.verdict
        assert shown is not None and verdict is not None, "a group is judged before it is written"
        score, parts, outcome, seconds = verdict
        row = {
            "sample": first + len(rows),
            "tokens": one.token_ids,
            "log_probs": log_probs[start : start + length],
            "versions": runs(one.policy_versions),
            "sampled": [] if one.sampled is None else runs(one.sampled),
            "finish_reason": one.finish_reason,
            "text": one.text,
            "shown": shown.text,
            "control_tokens": shown.control_tokens,
            "score": score,
            "success": verdict.success,
            "parts": parts,
            "outcome": outcome,
            "judge_s": seconds,
            "advantage": advantage[:length] if isinstance(advantage, list) else advantage,
            "in_loss": in_loss,
            "chosen": chosen,
            "log_ratio": log_ratio[:length],
            "entropy": entropy[:length],
        }
        rows.append(row)
        start += length
    return rows


def runs(values: Sequence[Any]) -> list[list[Any]]:
    """[[value, count], ...]"""
    if values and values.count(values[0]) == len(values):
        return [[values[0], len(values)]]
    return [[value, sum(1 for _ in same)] for value, same in groupby(values)]


def unrolled(pairs: Sequence[Sequence[Any]]) -> list[Any]:
    """The values of `runs`."""
    return list(chain.from_iterable([value] * count for value, count in pairs))


def group_of(record: dict[str, Any]) -> Group:
    """The group that a line of the ledger was made of, without the one that it is in place of.

    `answer` is what JSON kept of it, `row_data` is empty.
    """
    engines = unrolled(record["engines"])
    completions = [
        (_sampled(one, engine), one["chosen"])
        for one, engine in zip(record["completions"], engines, strict=True)
    ]
    example = Example(tuple(record["messages"]), record["answer"], record["row"], record["source"])
    return Group(
        record["group_id"],
        example,
        tuple(record["prompt_tokens"]),
        record["prompt_text"],
        Sampling(**record["sampling"]),
        [one for one, chosen in completions if chosen],
        Times(record["begun"], record["drawn"], record["judged"]),
        [one for one, chosen in completions if not chosen],
    )


def _sampled(one: dict[str, Any], engine: str) -> SampledCompletion:
    made = SampledCompletion(
        one["tokens"],
        one["log_probs"],
        unrolled(one["versions"]),
        one["finish_reason"],
        unrolled(one["sampled"]) or None,
        one["text"],
        verdict=Verdict(one["score"], one["parts"], one["outcome"], one["judge_s"]),
        engine=engine,
    )
    truncated = made.finish_reason == "length"
    made.shown = Completion(one["shown"], made.num_drawn, truncated, one["control_tokens"])
    return made
