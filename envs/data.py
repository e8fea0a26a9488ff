"""Rows of a dataset: from local JSONL, JSON or parquet files, or from the hub. Bad rows are named by file and line."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.env import EnvConfig
from config.errors import ConfigError

PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")


@dataclass(frozen=True)
class Row:
    """One row and where it came from, for messages: `place` is file:line, or dataset[index]."""

    values: dict[str, Any]
    place: str
    index: int

    def __getitem__(self, column: str) -> Any:
        if column not in self.values:
            raise ConfigError(
                f"{self.place}: no column {column!r}; it has {', '.join(sorted(self.values)) or 'none'}. "
                f"Rename the column, or take another env.dataset for this file"
            )
        return self.values[column]

    def text(self, column: str) -> str:
        """The column as a non-empty string."""
        value = self[column]
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{self.place}: column {column!r} must be a non-empty string, it is {value!r}")
        return value


def data_files(env: EnvConfig) -> list[Path]:
    """`env.data_files` of `env.split` as paths; empty when it is unset.

    Raises:
        ConfigError: a file that does not exist, a split without one.
    """
    given = env.data_files
    if given is None:
        return []
    if isinstance(given, dict):
        if env.split not in given:
            raise ConfigError(
                f"env.data_files has {', '.join(given)} and no file for env.split={env.split}: add one"
            )
        given = given[env.split]
    paths = [Path(name).expanduser() for name in ([given] if isinstance(given, str) else given)]
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"env.data_files={path}: no such file; give the path of a JSONL, JSON or parquet file"
            )
    return paths


def load_rows(env: EnvConfig, hub_name: str | None, hub_config: str | None, split: str) -> list[Row]:
    """Rows of `env.data_files`, or of the hub dataset `hub_name`; with `env.holdout` those of one side of it."""
    paths = data_files(env)
    if paths:
        located = [row for path in paths for row in _local_rows(path)]
        rows = [Row(values, place, index) for index, (values, place) in enumerate(located)]
    elif hub_name is None:
        raise ConfigError(
            f"env.dataset={env.dataset} reads local files: set env.data_files=path/to/file.jsonl"
        )
    else:
        rows = _hub_rows(env, hub_name, hub_config, "train" if env.holdout else split)
    if not env.holdout:
        return rows
    return [row for row in rows if held_out(row, env.holdout) == (env.split == "test")]


def held_out(row: Row, share: float) -> bool:
    """Whether a row belongs to the held-out share: by a hash of its prompt, so that equal prompts stay together."""
    column = next((name for name in PROMPT_COLUMNS if name in row.values), None)
    prompt = row.values if column is None else row.values[column]
    text = " ".join(json.dumps(prompt, sort_keys=True, default=str).split())
    return zlib.crc32(text.encode()) / 2**32 < share


def _local_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for index, row in enumerate(pyarrow.parquet.read_table(path).to_pylist()):
            yield row, f"{path}[{index}]"
        return
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        yield from _json_array(path, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parsed(line, f"{path}:{number}"), f"{path}:{number}"


def _json_array(path: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); mend the file") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}[{index}]: a row must be an object, it is {row!r}")
        yield row, f"{path}[{index}]"


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON ({error.msg}); mend or remove the line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a row must be a JSON object, it is {row!r}")
    return row


def _hub_rows(env: EnvConfig, name: str, config: str | None, split: str) -> list[Row]:
    from datasets import load_dataset

    try:
        rows: Sequence[dict[str, Any]] = load_dataset(name, config, split=split)
    except Exception as error:  # the hub client raises a dozen unrelated types for "cannot be reached"
        raise ConfigError(
            f"env.dataset={env.dataset}: {name} (split {split}) could not be read from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). "
            "A local copy serves as well: env.data_files=path/to/rows.jsonl (or .parquet)"
        ) from error
    return [Row(dict(row), f"{name}[{index}]", index) for index, row in enumerate(rows)]
