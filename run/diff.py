"""`run=diff a=RUN b=RUN`: two runs side by side: settings, curves, evaluations problem by problem, prompts.

settings that differ ─▶ the first step whose metrics part ─▶ paired tests ─▶ prompts that one solves and not the other
"""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.saved_settings import chosen_run, saved_config
from evaluation.statistics import paired_test
from monitoring.ledger_storage import ledger_files, read_records
from monitoring.metrics import without_clocks
from run.recorded import recorded_rows
from run.resume import changes, under
from run.rollouts import WIDTH, indented, question, success

OF_THE_FOLDER = ("run", "run_dir", "train.resume", "logging", "rollouts", "step", "a", "b")
"""Settings that say nothing of what a run computes."""
SHOWN, EXAMPLES, LAST = 12, 3, 20
"""Settings that are named, prompts of each kind that are shown, rows of the mean at the end."""
CHARACTERS = 400
"""Of a text that is kept: three lines of it are shown."""
TRAINING = "training"


@dataclass(frozen=True)
class Seen:
    """A prompt the last time that a run was asked it. success: mean over its completions. best, worst: two of them."""

    success: float
    asked: str
    best: str
    worst: str


def diff(a: str | None, b: str | None) -> str:
    """What is to be printed of two runs.

    Raises:
        ConfigError: one of the folders is not named, or is not that of a run.
    """
    if a is None or b is None:
        raise ConfigError("run=diff needs a=RUN b=RUN, the folders of two runs")
    one, other = (folder_of(name, folder) for name, folder in (("a", a), ("b", b)))
    parts = [f"a: {one}\nb: {other}", settings(one, other), curves(one, other)]
    for folder, name in ((one, "a"), (other, "b")):
        if not ledger_files(folder):
            parts.append(f"{name} has no rollouts/: prompts cannot be compared")
            return "\n\n".join(parts)
    return "\n\n".join([*parts, *prompts(last_seen(one), last_seen(other))])


def folder_of(name: str, folder: str) -> Path:
    """The folder of a run that `a=` or `b=` names."""
    try:
        return chosen_run(folder)
    except ConfigError as error:
        raise ConfigError(str(error).replace("run_dir=", f"{name}=", 1)) from error


def settings(one: Path, other: Path) -> str:
    """Those that differ."""
    both = changes(asdict(saved_config(one)), asdict(saved_config(other)))
    found = [str(change) for change in both if not under(change.key, OF_THE_FOLDER)]
    if not found:
        return "settings: the same"
    lines = [
        line for text in found[:SHOWN] for line in textwrap.wrap(text, WIDTH - 2, subsequent_indent="  ")
    ]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n".join(["settings (a -> b)", *(f"  {line}" for line in lines + more)])


def curves(one: Path, other: Path) -> str:
    """Where the metrics of optimizer steps part, and the reward at both ends."""
    rows = recorded_rows(one), recorded_rows(other)
    shared = sorted(rows[0].keys() & rows[1].keys())
    lines = [f"curves: {len(rows[0])} and {len(rows[1])} optimizer steps"]
    if shared:
        lines += [f"  {line}" for line in parting(*rows, shared)]
        lines.append(f"  {'reward/mean':<30}{'a':>12}{'b':>12}")
        for label, steps in (("first step", shared[:1]), (f"mean of steps {_range(shared)}", shared[-LAST:])):
            means = [sum(of_run[step]["reward/mean"] for step in steps) / len(steps) for of_run in rows]
            lines.append(f"  {label:<30}{means[0]:>12.4f}{means[1]:>12.4f}")
    return "\n".join(lines)


def _range(steps: list[int]) -> str:
    return f"{steps[-LAST:][0]} to {steps[-1]}"


def parting(
    one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]], steps: list[int]
) -> Iterator[str]:
    """The first step with a metric that both have and that differs, clocks aside."""
    before = None
    for step in steps:
        ours, theirs = without_clocks(one[step]), without_clocks(other[step])
        both = [name for name in ours if name in theirs]
        apart = [name for name in both if ours[name] != theirs[name]]
        if apart:
            yield (
                f"identical to step {before}" if before is not None else "they differ from the first step on"
            )
            yield f"step {step} differs in {len(apart)} of {len(both)} metrics"
            for name in sorted(apart, key=lambda name: name != "reward/mean")[:4]:
                yield f"  {name:<28}{ours[name]:>14.7g}{theirs[name]:>14.7g}"
            return
        before = step
    yield f"identical to step {before}, the last that both have"


def last_seen(run_dir: Path) -> dict[str, dict[str, Seen]]:
    """By set (`training` for none) and prompt id, every prompt the last time that it was asked."""
    found: dict[str, dict[str, Seen]] = {}
    newest: dict[str, int] = {}
    for record in read_records(run_dir):
        name = record["set"] or TRAINING
        if name != TRAINING and newest.get(name) != record["iteration"]:
            newest[name], found[name] = record["iteration"], {}  # of an evaluation the last, whole
        by_reward = sorted(record["completions"], key=lambda one: float(one["verdict"]["score"]))
        worst, best = (by_reward[place]["text"][:CHARACTERS] for place in (0, -1))
        seen = Seen(success(record), question(record)[:CHARACTERS], best, worst)
        found.setdefault(name, {})[record["prompt_id"]] = seen
    return found


def prompts(one: dict[str, dict[str, Seen]], other: dict[str, dict[str, Seen]]) -> Iterator[str]:
    """A paragraph for each set, and for training: a paired test of the prompts that both were asked, and examples."""
    for name in sorted(one.keys() & other.keys(), key=lambda name: (name == TRAINING, name)):
        shared = [prompt for prompt in one[name] if prompt in other[name]]
        if not shared:
            yield f"{name}: no prompt that both were asked"
            continue
        found = paired_test(*([of_run[name][prompt].success for prompt in shared] for of_run in (one, other)))
        last = "the last time each was seen" if name == TRAINING else "the last evaluation of each"
        lines = [f"{name}: {len(shared)} prompts, {last}", f"  b against a: {found.words}"]
        for label, winner, loser in (("a", one, other), ("b", other, one)):
            only = [key for key in shared if _solved(winner[name][key]) and not _solved(loser[name][key])]
            only.sort(key=lambda key: loser[name][key].success - winner[name][key].success)
            lines.append(f"  {len(only)} solved by {label} alone (at least half of the completions)")
            for key in only[:EXAMPLES]:
                lines += _example(key, one[name][key], other[name][key])
        yield "\n".join(lines)


def _solved(seen: Seen) -> bool:
    return seen.success >= 0.5


def _example(key: str, one: Seen, other: Seen) -> list[str]:
    """The question, the best completion of the run that solved it, the worst of the other."""
    lines = [f"    prompt {key}: a {one.success:.0%}, b {other.success:.0%}", *indented(one.asked, 6)[:3]]
    a_is_right = _solved(one)
    for label, seen, right in (("a", one, a_is_right), ("b", other, not a_is_right)):
        first, *rest = indented(seen.best if right else seen.worst, 9)[:3]
        lines += [f"      {label}: {first.strip()}", *rest]
    return lines
