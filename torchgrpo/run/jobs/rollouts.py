"""Job `run=rollouts`: filters groups of a run's ledger, and prints or tabulates these groups.

The settings `rollouts.*` choose the groups.

read_records ─▶ matching_groups ─▶ best, worst, flipped ─▶ format_group, at 80 columns | run.rollout_table
"""

import heapq
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from config.cli.saved_settings import chosen_run
from config.run_folder.folders import remove_unused_folder
from config.schema.errors import ConfigError, RunOutcome
from config.schema.rollouts import RolloutsConfig
from torchgrpo.monitoring.completion_record import parse_sequence_starts, parse_turns
from torchgrpo.monitoring.episode_text import format_turns
from torchgrpo.monitoring.ledger_record import format_question
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.reports.ledger_columns import mean_advantage
from torchgrpo.run.job import Job
from torchgrpo.run.ledger_iterations import require_ledger
from torchgrpo.run.rollout_table import write_completion_table


def run(job: Job[Any]) -> RunOutcome:
    remove_unused_folder(job.run_dir)
    print(format_rollouts(chosen_run(job.config.run_dir), job.config.rollouts), flush=True)
    return "finished"


Record = dict[str, Any]
WIDTH, LINES = 80, 12
"""Columns of the output, and the maximum of lines printed of one text."""


def format_rollouts(run_dir: Path, filters: RolloutsConfig) -> str:
    """Returns the matching groups as text, or writes them as a table.

    With a table a line about the file is returned.

    Raises:
        ConfigError: the run has no ledger, or no group of the ledger matches.
    """
    require_ledger(run_dir)
    kind = None if filters.set is None else "train" if filters.set == "train" else "eval"

    def matches() -> Iterator[Record]:
        return matching_groups(read_records(run_dir, kind), filters)

    found = flipped_groups(matches) if filters.flipped else matches()
    if filters.best or filters.worst:
        found = iter(extreme_groups(found, filters.best or 0, filters.worst or 0))
    first = next(found, None)
    if first is None:
        default = vars(RolloutsConfig())
        settings = [f"rollouts.{key}={value}" for key, value in vars(filters).items() if value != default[key]]
        suffix = f" ({', '.join(settings)})" if settings else ""
        raise ConfigError(f"{run_dir}: no group of the ledger matches rollouts.*{suffix}")
    found = chain([first], found)
    if filters.to is not None:
        rows = write_completion_table(found, Path(filters.to))
        return f"{rows} completions in {filters.to}"
    limit = filters.limit
    printed = [format_group(record) for record in islice(found, limit or None)]
    if next(found, None) is not None:
        more = (
            f"... and more than these {limit} groups: set rollouts.limit=0 to print all, or "
            "rollouts.to=FILE.csv to write them"
        )
        printed.append(more)
    return "\n\n".join(printed)


def matching_groups(records: Iterable[Record], filters: RolloutsConfig) -> Iterator[Record]:
    """Yields the groups that match, each with only its completions that match."""
    for record in records:
        if (
            (filters.set is None or filters.set == (record["set"] or "train"))
            and (filters.step is None or filters.step in record["optimizer_steps"])
            and (filters.iteration is None or filters.iteration == record["iteration"])
            and (filters.row is None or filters.row == record["row"])
            and (filters.prompt is None or record["prompt_id"].startswith(filters.prompt))
        ):
            completions = [completion for completion in record["completions"] if _is_match(completion, record, filters)]
            if completions:
                yield record | {"completions": completions}


def _is_match(completion: Record, record: Record, filters: RolloutsConfig) -> bool:
    outcome, solved = completion["verdict"]["outcome"], completion["verdict"]["success"] >= 1
    outcomes = {outcome} if outcome == "error" else {outcome, "right" if solved else "wrong"}
    text = filters.contains
    return (filters.outcome is None or filters.outcome in outcomes) and (
        text is None or text in completion["text"] or text in record["prompt_text"]
    )


def group_mean(record: Record, metric: Literal["success", "score"]) -> float:
    """Returns the mean success or score over scored completions; NaN without any."""
    verdicts = [completion["verdict"] for completion in record["completions"]]
    values = [verdict[metric] for verdict in verdicts if verdict["outcome"] != "error"]
    return float(sum(values) / len(values)) if values else math.nan


def extreme_groups(records: Iterable[Record], best: int, worst: int) -> list[Record]:
    """Returns the groups of the highest mean rewards, then those of the lowest.

    Of equal groups the earlier comes first. Groups without a scored completion are left out.
    """
    highest: list[tuple[float, int, Record]] = []
    lowest: list[tuple[float, int, Record]] = []
    for number, record in enumerate(records):
        reward = group_mean(record, "score")
        if math.isnan(reward):
            continue
        for heap, size, sign in ((highest, best, 1), (lowest, worst, -1)):
            heapq.heappush(heap, (sign * reward, -number, record))
            if len(heap) > size:
                heapq.heappop(heap)
    return [record for heap in (highest, lowest) for _, _, record in sorted(heap, reverse=True)]


def flipped_groups(matches: Callable[[], Iterator[Record]]) -> Iterator[Record]:
    """Yields the first and last groups of prompts that were solved in only one."""
    ends_of_prompt: dict[tuple[str, str], list[tuple[int, bool]]] = {}
    for number, record in enumerate(matches()):
        rate = group_mean(record, "success")
        if not math.isnan(rate):
            ends = ends_of_prompt.setdefault((record["set"], record["prompt_id"]), [])
            ends[1:] = [(number, rate >= 0.5)]
    changed = [ends for ends in ends_of_prompt.values() if len(ends) == 2 and ends[0][1] != ends[1][1]]
    chosen = {number for ends in changed for number, _ in ends}
    records = {number: record for number, record in enumerate(matches()) if number in chosen}
    for ends in changed:
        yield from (records[number] for number, _ in ends)


def format_group(record: Record) -> str:
    """Returns a group as text: step, prompt, and completions with rewards and advantages."""
    origin = f"{record['set']} after" if record["kind"] == "eval" else "training,"
    steps = ", ".join(map(str, record["optimizer_steps"]))
    fate = f", step {steps}" if steps else "" if record["kind"] == "eval" else f", {record['fate']}"
    head = (
        f"{origin} iteration {record['iteration']}{fate}: row {record['row']}, "
        f"prompt {record['prompt_id']}, group {record['group_id']}"
    )
    lines = textwrap.wrap(head, WIDTH)
    lines += indent_text(format_question(record["messages"]), 2)
    lines += indent_text(f"answer: {record['answer']}", 2)
    for one in record["completions"]:
        verdict = one["verdict"]
        components = ", ".join(f"{name} {value:.3g}" for name, value in verdict["components"].items())
        words = [f"#{one['sample']} reward {verdict['score']:.3g}{f' ({components})' if components else ''}"]
        if steps and one["chosen"]:
            each = isinstance(one["advantage"], list)
            words.append(f"{'mean ' if each else ''}advantage {mean_advantage(one):+.3g}")
        words += [f"{len(one['token_ids'])} tokens", one["finish_reason"]]
        words += [verdict["outcome"]] if verdict["outcome"] != "scored" else []
        words += [f"{len(one['sequence_starts'])} sequences"] if len(one["sequence_starts"]) > 1 else []
        words += [] if one["chosen"] else ["left out"]
        lines += textwrap.wrap(", ".join(words), WIDTH, initial_indent="  ", subsequent_indent="     ")
        lines += format_completion(one)
    return "\n".join(lines)


def format_completion(completion: Record) -> list[str]:
    """Returns the lines of a completion: its text, or a chat of recorded turns."""
    error = indent_text(f"error: {completion['error']}", 5) if completion["error"] else []
    turns = parse_turns(completion)
    if not turns:
        return (indent_text(completion["text"], 5) if completion["text"] or not error else []) + error
    starts = parse_sequence_starts(completion)
    return [*format_turns(turns, starts, lambda text, width: indent_text(text, width + 5)), *error]


def indent_text(text: str, width: int) -> list[str]:
    """Returns the lines of a text, indented and wrapped; a long text is cut."""
    lines = [wrapped for line in text.splitlines() or [""] for wrapped in textwrap.wrap(line, WIDTH - width) or [""]]
    cut = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    return [" " * width + line for line in lines[:LINES] + cut]
