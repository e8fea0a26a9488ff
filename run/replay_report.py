"""What `run=replay` prints: recorded against replayed numbers, and two objectives side by side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from config.policy import PolicyConfig
from training.batch import Batch
from training.learner import StepReport

MOST = 8
"""Completions that are named."""


@dataclass(frozen=True)
class Comparison:
    """One optimizer step: its recorded row of metrics and the replayed one, without clocks."""

    step: int
    recorded: dict[str, Any]
    replayed: dict[str, float]

    @property
    def shared(self) -> list[str]:
        """Metrics that both have, less the version, which is taken over."""
        return [name for name in self.replayed if name in self.recorded and name != "policy_version"]

    @property
    def differing(self) -> list[str]:
        """Those whose bits differ."""
        return [name for name in self.shared if not same(self.recorded[name], self.replayed[name])]


@dataclass(frozen=True)
class Objectives:
    """A second objective on the same weights and completions, and what it gave."""

    recorded: PolicyConfig
    other: PolicyConfig
    metrics: dict[str, float]

    @property
    def changes(self) -> list[str]:
        """`policy.kl_coef: 0.1 -> 0.0`, one for each setting that differs."""
        new = vars(self.other)
        return [
            f"policy.{key}: {old} -> {new[key]}"
            for key, old in vars(self.recorded).items()
            if old != new[key]
        ]


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def first_difference(compared: Sequence[Comparison]) -> str:
    """Where numbers part, in words."""
    if not all(each.recorded for each in compared):
        return "metrics.jsonl has no row of some of these steps: nothing to compare them with"
    for each in compared:
        if each.differing:
            name = each.differing[0]
            more = f" and {len(each.differing) - 1} more" if len(each.differing) > 1 else ""
            return (
                f"numbers part at step {each.step}: {name} was {each.recorded[name]!r} and is "
                f"{each.replayed[name]!r}{more}"
            )
    steps = f"all {len(compared)} steps" if len(compared) > 1 else "the step"
    return f"bit-identical: {len(compared[-1].shared)} metrics of {steps}"


def differing_completions(
    step: int, records: Sequence[dict[str, Any]], batch: Batch, report: StepReport
) -> list[str]:
    """A line for each completion of a step whose advantage, mask or log-ratio is not the recorded one."""
    assert batch.mask is not None
    of_id = {record["group_id"]: record for record in records}
    found = []
    row = 0
    for group_id in batch.group_ids:
        record = of_id[group_id]
        if step not in record["optimizer_steps"]:
            found.append(f"group {group_id} was not in this step")
        for one in (one for one in record["completions"] if one["chosen"]):
            here = (report.advantage[row], bool(batch.mask[row].any()), report.log_ratio[row])
            first = record["optimizer_steps"][:1] == [step]
            told = ", ".join(_differences(one, *here, compare_tokens=first))
            found += [f"group {group_id}, completion {one['sample']}: {told}"] if told else []
            row += 1
    return found


def _differences(
    one: dict[str, Any], advantage: Tensor, in_loss: bool, log_ratio: Tensor, compare_tokens: bool
) -> Iterator[str]:
    """Say how a completion's advantage and loss differ from the recorded ones.

    compare_tokens: the ledger holds what each token had in the first step that trained on its completion.
    """
    recorded, length = one["advantage"], len(one["token_ids"])
    values = advantage.tolist()
    replayed = values[0] if len(values) == 1 else values[:length]
    if recorded != replayed and (compare_tokens or not isinstance(recorded, list)):
        yield "another advantage" if isinstance(recorded, list) else f"advantage {recorded} -> {replayed}"
    if one["in_loss"] != in_loss:
        yield f"in the loss: {one['in_loss']} -> {in_loss}"
    if compare_tokens:
        kept = np.asarray(one["log_ratio"], dtype=np.float32)
        gap = np.abs(log_ratio[:length].numpy() - kept)
        if gap.size and gap.max() > 0:
            yield f"log-ratios differ by {gap.max():.2g} at most, first at token {int((gap > 0).argmax())}"


def report(
    head: str, last: Comparison, parting: str, completions: Sequence[str], other: Objectives | None
) -> str:
    """The whole text, at 80 columns."""
    lines = [head, ""]
    if other is None:
        lines.append(_row("metric", "recorded", "replayed", "difference"))
        for name in last.shared:
            lines.append(_numbers(name, last.recorded[name], last.replayed[name]))
    else:
        lines += [f"  {change}" for change in other.changes] or ["  the same objective"]
        lines += ["", _row("metric", "recorded", "other", "difference")]
        for name in [name for name in last.replayed if name in other.metrics and name != "policy_version"]:
            lines.append(_numbers(name, last.replayed[name], other.metrics[name]))
        lines += [f"{name:<32}{value:>47.9g}" for name, value in only(other.metrics, last.replayed)]
    lines += ["", parting]
    lines += [f"  {line}" for line in completions[:MOST]]
    if len(completions) > MOST:
        lines.append(f"  and {len(completions) - MOST} more completions")
    return "\n".join(lines)


def only(metrics: dict[str, float], others: dict[str, float]) -> list[tuple[str, float]]:
    """Those that the others lack."""
    return [(name, value) for name, value in metrics.items() if name not in others]


def _numbers(name: str, before: float, now: float) -> str:
    gap = "" if same(before, now) else f"{now - before:+.3g}"
    return _row(name, f"{before:.9g}", f"{now:.9g}", gap)


def _row(name: str, first: str, second: str, third: str) -> str:
    return f"{name:<32}{first:>17}{second:>17}{third:>13}".rstrip()
