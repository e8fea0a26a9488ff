"""`run=rollouts`: the groups of a run's ledger, chosen by `rollouts.*`, printed or as a table of completions.

read_records ─▶ matching ─▶ best, worst, flipped ─▶ shown, at 80 columns | run.rollout_table
"""

import heapq
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from config.cli.saved_settings import chosen_run
from config.run_folder.folders import remove_if_unused
from config.schema.errors import ConfigError, RunOutcome
from config.schema.rollouts import RolloutsConfig
from torchgrpo.monitoring.ledger_line import question
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.reports.columns import mean_advantage
from torchgrpo.run.job import Job
from torchgrpo.run.ledger_iterations import has_ledger
from torchgrpo.run.rollout_table import write_table


def run(job: Job[Any]) -> RunOutcome:
    remove_if_unused(job.run_dir)
    print(rollouts(chosen_run(job.config.run_dir), job.config.rollouts), flush=True)
    return "finished"


Record = dict[str, Any]
WIDTH, LINES = 80, 12
"""Columns, and lines of one text that are printed."""


def rollouts(run_dir: Path, wanted: RolloutsConfig) -> str:
    """What is to be printed.

    Raises:
        ConfigError: the run has no ledger, or nothing in it is what is wanted.
    """
    has_ledger(run_dir)
    kind = None if wanted.set is None else "train" if wanted.set == "train" else "eval"

    def matches() -> Iterator[Record]:
        return matching(read_records(run_dir, kind), wanted)

    found = flipped(matches) if wanted.flipped else matches()
    if wanted.best or wanted.worst:
        found = iter(extremes(found, wanted.best or 0, wanted.worst or 0))
    first = next(found, None)
    if first is None:
        default = vars(RolloutsConfig())
        asked = [f"rollouts.{key}={value}" for key, value in vars(wanted).items() if value != default[key]]
        told = f" ({', '.join(asked)})" if asked else ""
        raise ConfigError(f"{run_dir}: no group of the ledger is what rollouts.* asks for{told}")
    found = chain([first], found)
    if wanted.to is not None:
        rows = write_table(found, Path(wanted.to))
        return f"{rows} completions in {wanted.to}"
    limit = wanted.limit
    printed = [shown(record) for record in islice(found, limit or None)]
    if next(found, None) is not None:
        more = (
            f"... and more than these {limit}: rollouts.limit=0 prints all, rollouts.to=FILE.csv writes them"
        )
        printed.append(more)
    return "\n\n".join(printed)


def matching(records: Iterable[Record], wanted: RolloutsConfig) -> Iterator[Record]:
    """Groups that are wanted, each with those of its completions that are."""
    for record in records:
        if (
            (wanted.set is None or wanted.set == (record["set"] or "train"))
            and (wanted.step is None or wanted.step in record["optimizer_steps"])
            and (wanted.iteration is None or wanted.iteration == record["iteration"])
            and (wanted.row is None or wanted.row == record["row"])
            and (wanted.prompt is None or record["prompt_id"].startswith(wanted.prompt))
        ):
            completions = [one for one in record["completions"] if _of_completion(one, record, wanted)]
            if completions:
                yield record | {"completions": completions}


def _of_completion(one: Record, record: Record, wanted: RolloutsConfig) -> bool:
    outcome, solved = one["verdict"]["outcome"], one["verdict"]["success"] >= 1
    is_now = {outcome} if outcome == "error" else {outcome, "right" if solved else "wrong"}
    text = wanted.contains
    return (wanted.outcome is None or wanted.outcome in is_now) and (
        text is None or text in one["text"] or text in record["prompt_text"]
    )


def mean_of(record: Record, what: Literal["success", "score"]) -> float:
    """Mean over the completions that could be judged; NaN where none could."""
    verdicts = [one["verdict"] for one in record["completions"]]
    judged = [verdict[what] for verdict in verdicts if verdict["outcome"] != "error"]
    return float(sum(judged) / len(judged)) if judged else math.nan


def extremes(records: Iterable[Record], best: int, worst: int) -> list[Record]:
    """The groups of the highest mean rewards, then those of the lowest; of equal ones the earlier.

    Groups of which nothing could be judged are neither.
    """
    highest: list[tuple[float, int, Record]] = []
    lowest: list[tuple[float, int, Record]] = []
    for number, record in enumerate(records):
        reward = mean_of(record, "score")
        if math.isnan(reward):
            continue
        for heap, size, sign in ((highest, best, 1), (lowest, worst, -1)):
            heapq.heappush(heap, (sign * reward, -number, record))
            if len(heap) > size:
                heapq.heappop(heap)
    return [record for heap in (highest, lowest) for _, _, record in sorted(heap, reverse=True)]


def flipped(matches: Callable[[], Iterator[Record]]) -> Iterator[Record]:
    """The first and the last group of every prompt that was solved in one of them and not in the other."""
    ends: dict[tuple[str, str], list[tuple[int, bool]]] = {}
    for number, record in enumerate(matches()):
        rate = mean_of(record, "success")
        if not math.isnan(rate):
            seen = ends.setdefault((record["set"], record["prompt_id"]), [])
            seen[1:] = [(number, rate >= 0.5)]
    changed = [seen for seen in ends.values() if len(seen) == 2 and seen[0][1] != seen[1][1]]
    wanted = {number for seen in changed for number, _ in seen}
    kept = {number: record for number, record in enumerate(matches()) if number in wanted}
    for seen in changed:
        yield from (kept[number] for number, _ in seen)


def shown(record: Record) -> str:
    """A group for a person: where it comes from, what was asked, every completion with what became of it."""
    place = f"{record['set']} after" if record["kind"] == "eval" else "training,"
    steps = ", ".join(map(str, record["optimizer_steps"]))
    fate = f", step {steps}" if steps else "" if record["kind"] == "eval" else f", {record['fate']}"
    head = (
        f"{place} iteration {record['iteration']}{fate}: row {record['row']}, "
        f"prompt {record['prompt_id']}, group {record['group_id']}"
    )
    lines = textwrap.wrap(head, WIDTH)
    lines += indented(question(record["messages"]), 2)
    lines += indented(f"answer: {record['answer']}", 2)
    for one in record["completions"]:
        verdict = one["verdict"]
        parts = ", ".join(f"{name} {value:.3g}" for name, value in verdict["parts"].items())
        words = [f"#{one['sample']} reward {verdict['score']:.3g}{f' ({parts})' if parts else ''}"]
        if steps and one["chosen"]:
            each = isinstance(one["advantage"], list)
            words.append(f"{'mean ' if each else ''}advantage {mean_advantage(one['advantage']):+.3g}")
        words += [f"{len(one['token_ids'])} tokens", one["finish_reason"]]
        words += [verdict["outcome"]] if verdict["outcome"] != "scored" else []
        words += [] if one["chosen"] else ["left out"]
        lines += textwrap.wrap(", ".join(words), WIDTH, initial_indent="  ", subsequent_indent="     ")
        lines += indented(one["text"], 5)
    return "\n".join(lines)


def indented(text: str, width: int) -> list[str]:
    """The lines of a text, folded at 80 columns; of a long one the first."""
    lines = [
        part for line in text.splitlines() or [""] for part in textwrap.wrap(line, WIDTH - width) or [""]
    ]
    cut = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    return [" " * width + line for line in lines[:LINES] + cut]
