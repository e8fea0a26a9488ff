"""Writes ledger groups as a CSV, JSONL or Parquet table, one row per completion."""

import csv
import json
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from config.run_folder.atomic_files import atomic_file
from config.schema.errors import ConfigError

COLUMNS = (
    *("kind", "set", "iteration", "optimizer_step", "fate", "group_id", "prompt_id", "row", "source"),
    *("prompt", "answer", "sample", "completion", "finish_reason", "tokens", "score", "success", "outcome"),
    *("advantage", "in_loss", "chosen", "oldest_version", "newest_version"),
    *("log_ratio", "entropy", "reward_s"),
)
"""Columns of every table; a reward component NAME has the column `component/NAME`."""
EPISODE_COLUMNS = ("turns", "sequences", "error")
"""Further columns of a table with turns in an environment."""


def write_completion_table(records: Iterable[dict[str, Any]], path: Path) -> int:
    """Writes the completions of these groups as a table, and returns their number.

    The suffix of `path` chooses the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = [row for record in records for row in completion_rows(record)]
    more_columns = {name for row in rows for name in row} - set(COLUMNS)
    columns = [*COLUMNS, *(name for name in EPISODE_COLUMNS if name in more_columns)]
    columns += sorted(more_columns - set(EPISODE_COLUMNS))
    try:
        with atomic_file(path) as file:
            if path.suffix == ".parquet":
                import pyarrow.parquet

                table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
                pyarrow.parquet.write_table(table, file)
            elif path.suffix == ".jsonl":
                file.writelines((json.dumps(row) + "\n").encode() for row in rows)
            else:
                text = TextIOWrapper(file, encoding="utf-8", newline="")
                writer = csv.DictWriter(text, columns)
                writer.writeheader()
                writer.writerows(rows)
                text.detach()
    except OSError as error:
        raise ConfigError(
            f"rollouts.to={path}: the file cannot be written ({error.strerror}); name another file"
        ) from error
    return len(rows)


def completion_rows(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one table row for each completion of a ledger line.

    optimizer_step: the first step that trained on the completion. advantage, log_ratio (trainer less engine) and
    entropy: means over the completion's tokens. turns, sequences: their numbers, of an episode in an environment.
    """
    steps = record["optimizer_steps"]
    answer = record["answer"]
    group_row = {
        name: record[name] for name in ("kind", "set", "iteration", "fate", "group_id", "prompt_id", "row", "source")
    }
    group_row |= {
        "optimizer_step": steps[0] if steps else None,
        "prompt": record["prompt_text"],
        "answer": answer if isinstance(answer, str) else json.dumps(answer),
    }
    for one in record["completions"]:
        verdict, versions = one["verdict"], one["policy_versions"]
        sequences = max(1, len(one["sequence_starts"]))
        episode = {"turns": len(one["turns"]), "sequences": sequences, "error": one["error"]}
        yield group_row | {
            **{name: one[name] for name in ("sample", "finish_reason", "in_loss", "chosen")},
            **{name: verdict[name] for name in ("score", "success", "outcome")},
            "reward_s": verdict["seconds"],
            "completion": one["text"],
            "tokens": len(one["token_ids"]),
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            "advantage": _mean(one["advantage"]) if steps and one["chosen"] else None,
            **{name: _mean(one[name]) for name in ("log_ratio", "entropy")},
            **(episode if one["turns"] or one["error"] else {}),
            **{f"component/{name}": value for name, value in verdict["components"].items()},
        }


def _mean(values: float | list[float]) -> float | None:
    return None if values == [] else float(np.mean(values))
