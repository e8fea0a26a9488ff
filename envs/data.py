"""Loads rows of a data set from local files or the hub, split by `env.holdout`."""

import json
import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.row_files import PARQUET, format_value, is_json_object, local_rows, read_json

log = logging.getLogger(__name__)

PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Row:
    """One row of a data set, with its place for messages.

    place: file:line or dataset[index].
    is_columnar: the row comes from a table. In a table all objects of a column have the same fields, null if missing.
    """

    values: dict[str, Any]
    place: str
    index: int
    is_columnar: bool = False

    def __getitem__(self, column: str) -> Any:
        """Returns the value of a column. Raises ConfigError if the column is missing or unusable."""
        if column not in self.values:
            raise ConfigError(
                f"{self.place}: no column {column!r} (columns: {', '.join(sorted(self.values)) or 'none'}); "
                "rename a column, or set another env.dataset for this file"
            )
        value = self.values[column]
        self._check_usable(column, value)
        return value

    def _check_usable(self, path: str, value: Any) -> None:
        problem = _value_problem(value)
        if problem:
            raise ConfigError(
                f"{self.place}: column {path!r} holds {problem}, in {format_value(value)}; correct or remove the row"
            )

    def value_at(self, path: str) -> Any:
        """Returns the value of a column, or of a nested path such as `reward_model.ground_truth`.

        Raises:
            ConfigError: the row has no value at this path.
        """
        column, *inside = [path] if path in self.values else path.split(".")
        value = self[column]
        for depth, name in enumerate(inside, start=1):
            if is_json_object(value):
                value = read_json(value, f"{self.place}: column {column!r}")
            if not isinstance(value, dict) or name not in value:
                fields = (
                    f"fields: {', '.join(map(str, value))}"
                    if isinstance(value, dict)
                    else f"value: {format_value(value)}"
                )
                outer = ".".join([column, *inside][:depth])
                raise ConfigError(f"{self.place}: no {path!r}: {outer!r} has no {name!r} ({fields})")
            value = value[name]
        self._check_usable(path, value)
        return value

    def has_value(self, path: str) -> bool:
        """Whether the row has a value at this path that is not null."""
        if path in self.values:
            return self.values[path] is not None
        value: Any = self.values
        for name in path.split("."):
            value = json.loads(value) if is_json_object(value) else value
            value = value.get(name) if isinstance(value, dict) else None
        return value is not None

    def first_column(self, columns: Sequence[str]) -> str:
        """Returns the first of these columns that the row has, or `columns[0]` without any."""
        return next((name for name in columns if name in self.values), columns[0])

    def text(self, column: str) -> str:
        """Returns a column as a string. Raises ConfigError unless the column is a non-empty string."""
        value = self[column]
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{self.place}: column {column!r} must be a non-empty string, but is {format_value(value)}"
            )
        return value


def usable_columns(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of a row without those that hold bytes."""
    return {name: value for name, value in values.items() if not _holds_bytes(value)}


def _holds_bytes(value: Any) -> bool:
    """Whether a value contains bytes; of a list only the first element is checked."""
    if isinstance(value, list):
        return bool(value) and _holds_bytes(value[0])
    if isinstance(value, dict):
        return any(map(_holds_bytes, value.values()))
    return isinstance(value, bytes)


def _value_problem(value: Any) -> str | None:
    """Describes bytes or a non-finite number in a value; None without a problem."""
    if isinstance(value, bytes):
        return "bytes, which are no text"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for each in inside if (found := _value_problem(each))), None)


def data_files(env: EnvConfig) -> list[Path]:
    """Returns the paths of `env.data_files` for `env.split`; empty if unset.

    Raises:
        ConfigError: a file does not exist, or the split has no file.
    """
    files = env.data_files
    if files is None:
        return []
    if not files:
        raise ConfigError(
            f"env.data_files={files!r}: no file; name a file, or remove env.data_files to read from the hub"
        )
    if isinstance(files, dict):
        if env.split not in files:
            raise ConfigError(
                f"env.data_files has {', '.join(map(str, files))} but no file for env.split={env.split}; add "
                "a file for this split"
            )
        files = files[env.split]
    names = files if isinstance(files, list) else [files]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"env.data_files={files!r}: give the path of a file, a list of them, or {{split: path}}")
    paths = [Path(name).expanduser() for name in names]
    for path in paths:
        if not path.is_file():
            problem = "a folder, not a file" if path.is_dir() else f"no such file (relative to {Path.cwd()})"
            raise ConfigError(f"env.data_files={path}: {problem}; give the path of a JSONL, JSON or parquet file")
    return paths


def load_rows(env: EnvConfig, hub_name: str | None, hub_config: str | None, split: str) -> list[Row]:
    """Loads the rows of `env.data_files`, or of a hub data set without local files.

    With `env.holdout` only the rows of `env.split` are returned. A warning names columns of images, sound or bytes.

    Raises:
        ConfigError: the rows cannot be read, or a file has none.
    """
    paths = data_files(env)
    if paths:
        rows: list[Row] = []
        for path in paths:
            located = list(local_rows(path))
            if not located:
                raise ConfigError(f"{path}: the file has no rows")
            with path.open("rb") as file:
                is_table = file.read(4) == PARQUET
            rows += [Row(values, place, len(rows) + offset, is_table) for offset, (values, place) in enumerate(located)]
    elif hub_name is None:
        raise ConfigError(f"env.dataset={env.dataset} reads local files; set env.data_files=path/to/file.jsonl")
    else:
        rows = _hub_rows(env, hub_name, hub_config, "train" if env.holdout else split)
    media = {
        name: row.place
        for row in reversed(rows)
        for name, value in row.values.items()
        if value and (name in MEDIA_COLUMNS or _holds_bytes(value))
    }
    for name, place in media.items():
        unread = "holds images, sound or bytes, which are not supported; the column is not used"
        log.warning("%s: column %r %s", place, name, unread)
    if not env.holdout:
        return rows
    columns = (env.options["prompt"],) if "prompt" in env.options else PROMPT_COLUMNS
    return [row for row in rows if is_held_out(row, env.holdout, columns) == (env.split == "test")]


def is_held_out(row: Row, share: float, columns: Sequence[str] = PROMPT_COLUMNS) -> bool:
    """Whether a row belongs to the held-out share, by a hash of its prompt.

    columns: candidates for the prompt column; the first column of the row counts. Equal prompts stay together.
    """
    column = next(filter(row.has_value, columns), None)
    prompt = row.values if column is None else row.value_at(column)
    text = " ".join(json.dumps(prompt, sort_keys=True, default=str).split())
    return zlib.crc32(text.encode()) / 2**32 < share


def _hub_rows(env: EnvConfig, name: str, config: str | None, split: str) -> list[Row]:
    """Loads the rows of a hub data set.

    Raises ConfigError if the hub cannot be read.
    """
    from datasets import load_dataset

    revision = "" if env.data_revision is None else f", env.data_revision={env.data_revision}"
    try:
        rows: Sequence[dict[str, Any]] = load_dataset(name, config, split=split, revision=env.data_revision)
    except Exception as error:  # the hub client raises many unrelated types if the hub cannot be reached
        raise ConfigError(
            f"env.dataset={env.dataset}: {name} (split {split}{revision}) could not be read from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). "
            "Check the connection and the name, or set env.data_files=path/to/rows.jsonl (or .parquet) to a "
            "local copy"
        ) from error
    return [Row(dict(row), f"{name}[{index}]", index, is_columnar=True) for index, row in enumerate(rows)]
