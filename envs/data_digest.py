"""Digests of a run's data rows, and their comparison with the digests of a checkpoint."""

import json
from base64 import b85encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from config.schema.errors import ConfigError
from envs.example import SYSTEM_ROLES, Example

CHARACTERS_PER_ROW = 5
"""Characters of a row's digest, the base-85 text of 4 bytes."""
_MAX_LISTED_ROWS = 10
"""Largest number of rows in a message."""


@dataclass(frozen=True)
class DataDigest:
    """Digests of the rows of a data set, `CHARACTERS_PER_ROW` characters a row.

    rows: digests of row number, prompt, answer and tools.
    columns, column_names: digests and names of the columns that user rewards read; empty without such columns.
    """

    rows: str
    columns: str = ""
    column_names: tuple[str, ...] = ()

    @classmethod
    def from_examples(cls, examples: Sequence[Example]) -> "DataDigest":
        """Computes the digest of the rows in their order.

        The most common system prompt and prefill come from the config, not from the rows. A resumed run may change
        them, so the digest excludes them.
        """
        system = _most_common(map(_system_prompt, examples))
        prefill = _most_common(one.prefill for one in examples)
        rows = ""
        for one in examples:
            is_shared = system is not None and _system_prompt(one) == system
            messages = one.messages[1:] if is_shared else one.messages
            own_prefill = "" if one.prefill == prefill else one.prefill
            answer = str(one.answer) if isinstance(one.answer, int | float) else one.answer
            rows += value_digest([one.row, messages, answer, own_prefill, one.tools])
        column_names = tuple(sorted(map(str, examples[0].row_data))) if examples else ()
        return cls(
            rows, "".join(value_digest(example.row_data) for example in examples) if column_names else "", column_names
        )

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "DataDigest":
        """Restores a digest from the result of `state`."""
        return cls(state["rows"], state["columns"], tuple(state["names"]))

    def state(self) -> dict[str, Any]:
        """Returns the digest for a checkpoint."""
        return {"rows": self.rows, "columns": self.columns, "names": list(self.column_names)}

    @property
    def num_rows(self) -> int:
        """Number of rows in the data set."""
        return len(self.rows) // CHARACTERS_PER_ROW

    def changed_positions(self, before: "DataDigest") -> list[int]:
        """Returns the positions of rows that differ.

        The columns of user rewards count only if both digests have the same columns.
        """
        pairs = [(before.rows, self.rows)]
        pairs += [(before.columns, self.columns)] if before.column_names == self.column_names else []
        positions = range(min(before.num_rows, self.num_rows))
        spans = [
            (position, slice(position * CHARACTERS_PER_ROW, (position + 1) * CHARACTERS_PER_ROW))
            for position in positions
        ]
        return [position for position, span in spans if any(old[span] != new[span] for old, new in pairs)]


def _system_prompt(example: Example) -> str | None:
    first = example.messages[0]
    return first["content"] if first["role"] in SYSTEM_ROLES else None


def _most_common(texts: Iterable[str | None]) -> str | None:
    found = Counter(texts).most_common(1)
    return found[0][0] if found else None


def value_digest(value: Any, num_bytes: int = 4) -> str:
    """Returns the digest of any value, which is the same in every process."""
    return b85encode(blake2b(_canonical(value).encode(), digest_size=num_bytes).digest()).decode()


def _canonical(value: Any) -> str:
    """Returns a text for a value that is equal in every process."""
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys without an order, or a circular object
        return type(value).__name__


def _plain(value: Any) -> Any:
    """Converts a value that JSON cannot hold to lists, dicts or texts."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(_canonical, value))
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text  # addresses differ between processes


@dataclass(frozen=True)
class DataChange:
    """Changes of a data set since a checkpoint.

    changed_positions: positions of rows that changed. lines: lines for the run's log; empty without changes.
    """

    changed_positions: frozenset[int]
    lines: tuple[str, ...]


def compare_digests(setting: str, before: DataDigest, current: DataDigest, rows: Sequence[int]) -> DataChange:
    """Compares the rows of a checkpoint with the current rows, position by position.

    Args:
        setting: name of the data's config key, for messages.
        rows: current row number at each position.
    Raises:
        ConfigError: rows are missing, or most rows changed.
    """
    num_rows, num_appended, positions = (
        before.num_rows,
        current.num_rows - before.num_rows,
        current.changed_positions(before),
    )
    if num_appended < 0 or 2 * len(positions) > num_rows:
        first = f"row {rows[positions[0]]}" if positions else f"row {rows[-1] + 1} (removed)"
        changed_text = f", {len(positions)} of them changed" if positions else ""
        raise ConfigError(
            f"{setting}: not the data of the checkpoint: {num_rows} rows then, {len(rows)} rows "
            f"now{changed_text}; the first difference is {first}. Restore the data, or begin another run "
            "from the checkpoint's weights: model.name=CHECKPOINT without train.resume"
        )
    found = []
    if positions:
        row_numbers = ", ".join(str(rows[position]) for position in positions[:_MAX_LISTED_ROWS])
        more = ", …" if len(positions) > _MAX_LISTED_ROWS else ""
        found.append(
            f"{len(positions)} of {num_rows} rows changed since the checkpoint (rows {row_numbers}{more}) "
            "and their success statistics are reset"
        )
    if before.column_names and current.column_names and before.column_names != current.column_names:
        column_names = ", ".join(sorted(set(before.column_names) ^ set(current.column_names)))
        found.append(
            f"columns in only one of the two data sets ({column_names}), so the columns of rewards were not compared"
        )
    if num_appended:
        found.append(f"{num_appended} rows appended to {num_rows}, sampled from the next epoch on")
    return DataChange(frozenset(positions), (f"{setting}: {'; '.join(found)}",) if found else ())
