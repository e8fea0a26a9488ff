"""Digests of the rows of a run's data, compared with those of its checkpoint."""

import json
from base64 import b85encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from config.schema.errors import ConfigError
from envs.example import SYSTEM_ROLES, Example

SIZE = 5
"""Characters of a row's digest, which stand for 4 bytes."""
_LISTED = 10
"""Rows that a message names."""


@dataclass(frozen=True)
class DataDigest:
    """Digests of the rows of a data set, `SIZE` characters a row.

    rows: of number, prompt, answer and tools. columns: of the columns that a reward of the user's reads, and their
    names; empty where no row has any.
    """

    rows: str
    columns: str = ""
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "DataDigest":
        """The digest of the rows in their order.

        The commonest system prompt and prefill are those of the config, not of a row: they may be others when a run
        goes on, and are no part of a digest.
        """
        system = _commonest(map(_system_prompt, examples))
        prefill = _commonest(one.prefill for one in examples)
        rows = ""
        for one in examples:
            is_shared = system is not None and _system_prompt(one) == system
            messages = one.messages[1:] if is_shared else one.messages
            own_prefill = "" if one.prefill == prefill else one.prefill
            answer = str(one.answer) if isinstance(one.answer, int | float) else one.answer
            rows += _digest([one.row, messages, answer, own_prefill, one.tools])
        names = tuple(sorted(map(str, examples[0].row_data))) if examples else ()
        return cls(rows, "".join(_digest(example.row_data) for example in examples) if names else "", names)

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "DataDigest":
        """The digest that `state` gave."""
        return cls(state["rows"], state["columns"], tuple(state["names"]))

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows, "columns": self.columns, "names": list(self.names)}

    @property
    def count(self) -> int:
        return len(self.rows) // SIZE

    def changed(self, before: "DataDigest") -> list[int]:
        """Places of rows that differ. Columns count where both runs read the same ones."""
        pairs = [(before.rows, self.rows)]
        pairs += [(before.columns, self.columns)] if before.names == self.names else []
        places = range(min(before.count, self.count))
        spans = [(place, slice(place * SIZE, (place + 1) * SIZE)) for place in places]
        return [place for place, span in spans if any(old[span] != new[span] for old, new in pairs)]


def _system_prompt(example: Example) -> str | None:
    first = example.messages[0]
    return first["content"] if first["role"] in SYSTEM_ROLES else None


def _commonest(texts: Iterable[str | None]) -> str | None:
    found = Counter(texts).most_common(1)
    return found[0][0] if found else None


def _digest(value: Any) -> str:
    return b85encode(blake2b(_canonical(value).encode(), digest_size=4).digest()).decode()


def _canonical(value: Any) -> str:
    """A text for a value that is the same in every process."""
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
    """Changes of a data set since a checkpoint.

    changed: places of rows that are others now. lines: for the run's log; none where nothing changed.
    """

    changed: frozenset[int]
    lines: tuple[str, ...]


def compare(setting: str, before: DataDigest, now: DataDigest, rows: Sequence[int]) -> DataChange:
    """The rows of a checkpoint beside those of now, place by place.

    Args:
        setting: what names the data, for messages.
        rows: number of the row at each place now.
    Raises:
        ConfigError: fewer rows, or most of them are others.
    """
    count, appended, changed = before.count, now.count - before.count, now.changed(before)
    if appended < 0 or 2 * len(changed) > count:
        first = f"row {rows[changed[0]]}" if changed else f"row {rows[-1] + 1}, which is gone"
        others = f", {len(changed)} of them others" if changed else ""
        raise ConfigError(
            f"{setting}: not the data of the checkpoint: it had {count} rows, there are {len(rows)} now{others}; the "
            f"first that differs is {first}. Give the data as they were, or begin another run from the checkpoint's "
            "weights: model.name=CHECKPOINT without train.resume"
        )
    found = []
    if changed:
        listed = ", ".join(str(rows[place]) for place in changed[:_LISTED])
        more = ", …" if len(changed) > _LISTED else ""
        found.append(
            f"{len(changed)} of {count} rows changed since the checkpoint (rows {listed}{more}), what was known of "
            "their success is forgotten"
        )
    if before.names and now.names and before.names != now.names:
        names = ", ".join(sorted(set(before.names) ^ set(now.names)))
        found.append(f"columns that one of both lacks ({names}): what rewards read was not compared")
    if appended:
        found.append(f"{appended} rows appended to {count}, asked once the epoch that was begun is over")
    return DataChange(frozenset(changed), (f"{setting}: {'; '.join(found)}",) if found else ())
