"""Whether the data of a run are those that its checkpoint was written with: a digest of every row, compared."""

import json
from base64 import b85encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from config.errors import ConfigError
from envs.example import Example

SIZE = 5
"""Characters of a row's digest, which stand for 4 bytes."""
_LISTED = 10
"""Rows that a message names."""


def row_digests(examples: Sequence[Example]) -> str:
    """A digest of each row in order: of its number, prompt, answer and tools.

    The commonest system prompt is that of the task or of its reward, not of a row: it may be another when a run goes
    on, and is no part of a digest.
    """
    shared = Counter(map(_system_prompt, examples)).most_common(1)
    common = shared[0][0] if shared else None
    return "".join(_digest(example, common) for example in examples)


def _system_prompt(example: Example) -> str | None:
    first = example.messages[0]
    return first["content"] if first["role"] == "system" else None


def _digest(example: Example, common: str | None) -> str:
    is_shared = common is not None and _system_prompt(example) == common
    messages = example.messages[1:] if is_shared else example.messages
    parts = (example.row, messages, example.answer, example.prefill, example.tools)
    text = "\n".join(map(_canonical, parts))
    return b85encode(blake2b(text.encode(), digest_size=4).digest()).decode()


def _canonical(value: Any) -> str:
    """A text that is the same in every process; of a kind that JSON lacks, its name alone where nothing better is."""
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that have no order, an object that holds itself
        return type(value).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(_canonical, value))
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text  # an address is another in every process


@dataclass(frozen=True)
class DataChange:
    """What became of a data set since a checkpoint.

    changed: places of rows that are others now. lines: for the run's log; none where nothing changed.
    """

    changed: frozenset[int]
    lines: tuple[str, ...]


def compare(setting: str, before: str, now: str, rows: Sequence[int]) -> DataChange:
    """The rows of a checkpoint beside those of now, place by place.

    Args:
        setting: what names the data, for messages.
        before, now: as `row_digests` gives them.
        rows: number of the row at each place now.
    Raises:
        ConfigError: fewer rows, or most of them are others.
    """
    count, appended = len(before) // SIZE, (len(now) - len(before)) // SIZE
    ends = range(0, min(len(before), len(now)), SIZE)
    changed = [at // SIZE for at in ends if before[at : at + SIZE] != now[at : at + SIZE]]
    if appended < 0 or 2 * len(changed) > count:
        raise ConfigError(_other_data(setting, count, rows, changed))
    found = []
    if changed:
        listed = ", ".join(str(rows[place]) for place in changed[:_LISTED])
        more = ", …" if len(changed) > _LISTED else ""
        found.append(
            f"{len(changed)} of {count} rows changed since the checkpoint (rows {listed}{more}), what was known of "
            "their success is forgotten"
        )
    if appended:
        found.append(f"{appended} rows appended to {count}, asked once the epoch that was begun is over")
    return DataChange(frozenset(changed), (f"{setting}: {'; '.join(found)}",) if found else ())


def _other_data(setting: str, count: int, rows: Sequence[int], changed: Sequence[int]) -> str:
    first = f"row {rows[changed[0]]}" if changed else f"row {rows[-1] + 1}, which is gone"
    others = f", {len(changed)} of them others" if changed else ""
    return (
        f"{setting}: not the data of the checkpoint: it had {count} rows, there are {len(rows)} now{others}; the first "
        f"that differs is {first}. Give the data as they were, or begin another run from the checkpoint's weights: "
        "model.name=CHECKPOINT without train.resume"
    )
