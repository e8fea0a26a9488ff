"""Rows of a data set, local or from the hub, with places for messages."""

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
from envs.row_files import PARQUET, is_json_object, local_rows, read_json, shown

log = logging.getLogger(__name__)

PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Row:
    """One row and where it came from, for messages: `place` is file:line, or dataset[index].

    columnar: from a table, in which every object of a column has the fields of all of them, null where it had none.
    """

    values: dict[str, Any]
    place: str
    index: int
    columnar: bool = False

    def __getitem__(self, column: str) -> Any:
        if column not in self.values:
            raise ConfigError(
                f"{self.place}: no column {column!r}; it has {', '.join(sorted(self.values)) or 'none'}. "
                f"Rename the column, or take another env.dataset for this file"
            )
        value = self.values[column]
        self._check_usable(column, value)
        return value

    def _check_usable(self, path: str, value: Any) -> None:
        trouble = _unusable(value)
        if trouble:
            raise ConfigError(
                f"{self.place}: column {path!r} holds {trouble}, it is {shown(value)}; mend or remove the row"
            )

    def at(self, path: str) -> Any:
        """The value of a column, or inside one: `reward_model.ground_truth`.

        Raises:
            ConfigError: it is not there.
        """
        column, *inside = [path] if path in self.values else path.split(".")
        value = self[column]
        for depth, name in enumerate(inside, start=1):
            if is_json_object(value):
                value = read_json(value, f"{self.place}: column {column!r}")
            if not isinstance(value, dict) or name not in value:
                there = (
                    f"has {', '.join(map(str, value))}" if isinstance(value, dict) else f"is {shown(value)}"
                )
                outer = ".".join([column, *inside][:depth])
                raise ConfigError(f"{self.place}: no {path!r}: {outer!r} has no {name!r}, it {there}")
            value = value[name]
        self._check_usable(path, value)
        return value

    def has(self, path: str) -> bool:
        """Whether the row has a value there that is not null."""
        if path in self.values:
            return self.values[path] is not None
        value: Any = self.values
        for name in path.split("."):
            value = json.loads(value) if is_json_object(value) else value
            value = value.get(name) if isinstance(value, dict) else None
        return value is not None

    def first_of(self, columns: Sequence[str]) -> str:
        """The first of these columns that the row has; the first of them all where it has none."""
        return next((name for name in columns if name in self.values), columns[0])

    def text(self, column: str) -> str:
        """The column as a non-empty string."""
        value = self[column]
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{self.place}: column {column!r} must be a non-empty string, it is {shown(value)}"
            )
        return value


def usable_columns(values: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row but those that hold bytes."""
    return {name: value for name, value in values.items() if not _holds_bytes(value)}


def _holds_bytes(value: Any) -> bool:
    """Whether bytes are somewhere inside; elements of a list are alike."""
    if isinstance(value, list):
        return bool(value) and _holds_bytes(value[0])
    if isinstance(value, dict):
        return any(map(_holds_bytes, value.values()))
    return isinstance(value, bytes)


def _unusable(value: Any) -> str | None:
    """Describe bytes or a number that is not finite in a value; None without."""
    if isinstance(value, bytes):
        return "bytes, which are no text"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for each in inside if (found := _unusable(each))), None)


def data_files(env: EnvConfig) -> list[Path]:
    """`env.data_files` of `env.split` as paths; empty when it is unset.

    Raises:
        ConfigError: a file that does not exist, a split without one.
    """
    given = env.data_files
    if given is None:
        return []
    if not given:
        raise ConfigError(
            f"env.data_files={given!r}: no file; name one, or leave it out to read from the hub"
        )
    if isinstance(given, dict):
        if env.split not in given:
            raise ConfigError(
                f"env.data_files has {', '.join(map(str, given))} and no file for env.split={env.split}: add one"
            )
        given = given[env.split]
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"env.data_files={given!r}: give the path of a file, a list of them, or {{split: path}}"
        )
    paths = [Path(name).expanduser() for name in names]
    for path in paths:
        if not path.is_file():
            what = "a folder, not a file" if path.is_dir() else f"no such file (looked from {Path.cwd()})"
            raise ConfigError(
                f"env.data_files={path}: {what}; give the path of a JSONL, JSON or parquet file"
            )
    return paths


def load_rows(env: EnvConfig, hub_name: str | None, hub_config: str | None, split: str) -> list[Row]:
    """Read the rows of `env.data_files`, else of a hub dataset; with `env.holdout` one side.

    Columns that no text model can use are named once."""
    paths = data_files(env)
    if paths:
        rows: list[Row] = []
        for path in paths:
            located = list(local_rows(path))
            if not located:
                raise ConfigError(f"{path}: the file has no rows")
            with path.open("rb") as file:
                table = file.read(4) == PARQUET
            rows += [Row(values, place, len(rows) + at, table) for at, (values, place) in enumerate(located)]
    elif hub_name is None:
        raise ConfigError(
            f"env.dataset={env.dataset} reads local files: set env.data_files=path/to/file.jsonl"
        )
    else:
        rows = _hub_rows(env, hub_name, hub_config, "train" if env.holdout else split)
    media = {
        name: row.place
        for row in reversed(rows)
        for name, value in row.values.items()
        if value and (name in MEDIA_COLUMNS or _holds_bytes(value))
    }
    for name, place in media.items():
        unread = "holds images, sound or bytes, which no model here reads: it is not used"
        log.warning("%s: column %r %s", place, name, unread)
    if not env.holdout:
        return rows
    columns = (env.options["prompt"],) if "prompt" in env.options else PROMPT_COLUMNS
    return [row for row in rows if held_out(row, env.holdout, columns) == (env.split == "test")]


def held_out(row: Row, share: float, columns: Sequence[str] = PROMPT_COLUMNS) -> bool:
    """Whether a row is of the held-out share, by a hash of its prompt.

    columns: the first that the row has is its prompt; equal prompts stay together.
    """
    column = next(filter(row.has, columns), None)
    prompt = row.values if column is None else row.at(column)
    text = " ".join(json.dumps(prompt, sort_keys=True, default=str).split())
    return zlib.crc32(text.encode()) / 2**32 < share


def _hub_rows(env: EnvConfig, name: str, config: str | None, split: str) -> list[Row]:
    from datasets import load_dataset

    revision = "" if env.data_revision is None else f", env.data_revision={env.data_revision}"
    try:
        rows: Sequence[dict[str, Any]] = load_dataset(name, config, split=split, revision=env.data_revision)
    except Exception as error:  # the hub client raises a dozen unrelated types for "cannot be reached"
        raise ConfigError(
            f"env.dataset={env.dataset}: {name} (split {split}{revision}) could not be read from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). "
            "A local copy serves as well: env.data_files=path/to/rows.jsonl (or .parquet)"
        ) from error
    return [Row(dict(row), f"{name}[{index}]", index, columnar=True) for index, row in enumerate(rows)]
