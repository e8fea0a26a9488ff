"""The ledger as a flat table, one row a completion, for pandas, DuckDB or a spreadsheet."""

import csv
import json
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from config.run_folder.files import written_whole
from config.schema.errors import ConfigError

COLUMNS = (
    *("kind", "set", "iteration", "optimizer_step", "fate", "group_id", "prompt_id", "row", "source"),
    *("prompt", "answer", "sample", "completion", "finish_reason", "tokens", "score", "success", "outcome"),
    *("advantage", "in_loss", "chosen", "oldest_version", "newest_version"),
    *("log_ratio", "entropy", "judge_s"),
)
"""Of every table; a part NAME of the reward is in `part/NAME`."""


def write_table(records: Iterable[dict[str, Any]], path: Path) -> int:
    """Write the completions of these groups; how many there are. The end of the name chooses the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = [row for record in records for row in rows_of(record)]
    parts = sorted({name for row in rows for name in row} - set(COLUMNS))
    columns = [*COLUMNS, *parts]
    try:
        with written_whole(path) as file:
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
        raise ConfigError(f"rollouts.to={path}: it cannot be written ({error.strerror})") from error
    return len(rows)


def rows_of(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row a completion. optimizer_step: the first that trained on it. advantage, log_ratio (trainer less engine)
    and entropy: means over its tokens."""
    steps = record["optimizer_steps"]
    answer = record["answer"]
    of_group = {
        name: record[name]
        for name in ("kind", "set", "iteration", "fate", "group_id", "prompt_id", "row", "source")
    }
    of_group |= {
        "optimizer_step": steps[0] if steps else None,
        "prompt": record["prompt_text"],
        "answer": answer if isinstance(answer, str) else json.dumps(answer),
    }
    for one in record["completions"]:
        verdict, versions = one["verdict"], one["policy_versions"]
        yield of_group | {
            **{name: one[name] for name in ("sample", "finish_reason", "in_loss", "chosen")},
            **{name: verdict[name] for name in ("score", "success", "outcome")},
            "judge_s": verdict["seconds"],
            "completion": one["text"],
            "tokens": len(one["token_ids"]),
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            "advantage": _mean(one["advantage"]) if steps and one["chosen"] else None,
            **{name: _mean(one[name]) for name in ("log_ratio", "entropy")},
            **{f"part/{name}": value for name, value in verdict["parts"].items()},
        }


def _mean(values: float | list[float]) -> float | None:
    return None if values == [] else float(np.mean(values))
