"""For findings that concern what was written: one group of the ledger that shows it."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monitoring.doctor.rule import Finding
from monitoring.ledger_storage import read_records
from monitoring.repetition import holds_question

Record = dict[str, Any]
"""A line of the ledger."""
_LONGEST = 160
"""Characters of a text that are shown."""


def examples(run_dir: Path, findings: Sequence[Finding]) -> dict[str, str]:
    """By the name of a rule, the first group between its steps that shows what it found; rules about numbers alone, and
    groups that are no longer in the ledger, have none."""
    wanted = {finding.rule: finding for finding in findings if finding.rule in _SHOWS}
    shown: dict[str, str] = {}
    for record in read_records(run_dir, "train") if wanted else ():
        for name, finding in list(wanted.items()):
            steps = record["optimizer_steps"]
            if not any(finding.first_step <= step <= finding.last_step for step in steps):
                continue
            told = _SHOWS[name](record)
            if told is not None:
                shown[name] = f"group {record['group_id']}, {_short(_question(record))}: {told}"
                del wanted[name]
        if not wanted:
            break
    return shown


def _duplicates(record: Record) -> str | None:
    (text, count), *_ = Counter(one["text"] for one in record["completions"]).most_common(1)
    return None if count < 2 else f"{count} of {len(record['completions'])} completions are {_short(text)}"


def _first(shows: Callable[[Record, Record], bool]) -> Callable[[Record], str | None]:
    """The first completion of a record for which this holds, given the record and the completion."""

    def show(record: Record) -> str | None:
        found = next((one for one in record["completions"] if shows(record, one)), None)
        return None if found is None else _described(found)

    return show


def _described(one: Record) -> str:
    verdict = one["verdict"]
    parts = ", ".join(f"{name} {value:.3g}" for name, value in verdict["parts"].items())
    told = f"{one['finish_reason']}, reward {verdict['score']:.3g}{f', {parts}' if parts else ''}"
    return f"{_short(one['text'])} ({told})"


def _question(record: Record) -> str:
    content: str = record["messages"][-1]["content"]
    return content


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")


_cut = _first(lambda record, one: one["finish_reason"] == "length")
_wrong_and_paid = _first(lambda record, one: one["verdict"]["success"] < 1 and one["verdict"]["score"] > 0)
_SHOWS: dict[str, Callable[[Record], str | None]] = {
    "duplicated_completions": _duplicates,
    "repeats_question": _first(lambda record, one: holds_question(_question(record), one["text"])),
    "reward_errors": _first(lambda record, one: one["verdict"]["outcome"] == "error"),
    "truncation": _cut,
    "end_token_vanished": _cut,
    "part_hacked": _wrong_and_paid,
    "evaluation_falls": _wrong_and_paid,
}
