"""Converts an example to the record that an agent reads, without the answer."""

from collections.abc import Sequence
from typing import Any

from envs.example import Example


def example_record(example: Example, columns: Sequence[str]) -> dict[str, Any]:
    """Returns what an agent may read of an example: messages, row, source, row_data and tools.

    The answer never belongs to it, nor does `Example.problem_id`, a digest. Tasks take the answer from columns of many
    names and forms, so `row_data` holds no column of the row but those of `env.agent_columns`. That setting refuses the
    known columns of answers; a column whose value equals the answer is left out too.

    Raises:
        KeyError: the row lacks a column.
    """
    answer = None if example.answer is None else str(example.answer).strip()
    chosen = {name: example.row_data[name] for name in columns}
    return {
        "messages": list(example.messages),
        "row": example.row,
        "source": example.source,
        "row_data": {name: value for name, value in chosen.items() if str(value).strip() != answer},
        "tools": list(example.tools),
    }


def example_of_record(record: dict[str, Any]) -> Example:
    """Returns the example for the function of an agent; its answer is None."""
    return Example(
        tuple(record["messages"]),
        None,
        record["row"],
        record["source"],
        row_data=record["row_data"],
        tools=tuple(record["tools"]),
    )
