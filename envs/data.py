"""Rows of a dataset: from local JSONL, JSON or parquet files, or from the hub. Bad rows are named by file and line."""

import codecs
import json
import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.env import EnvConfig
from config.errors import ConfigError

log = logging.getLogger(__name__)

PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
PARQUET = b"PAR1"
DEEPEST = 100
"""Levels of lists and objects in a column; what reads or sends rows may go through them one call a level."""
LONGEST_SHOWN = 200
"""Characters of a value in a message."""
REMEDY = "mend or remove the line; a JSONL file has one whole object in each"
_NOT_TEXT = (
    (codecs.BOM_UTF16_LE, "UTF-16 text", "save it as UTF-8, as in iconv -f UTF-16 -t UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16 text", "save it as UTF-8, as in iconv -f UTF-16 -t UTF-8"),
    (b"\x1f\x8b", "compressed by gzip", "unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it with unzstd"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"ARROW1", "an Arrow file", "save it as parquet or JSONL"),
    (b"\xff\xff\xff\xff", "an Arrow file", "save it as parquet or JSONL, as with to_parquet of datasets"),
)


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


def is_json_object(value: Any) -> bool:
    """Whether a text is JSON of an object."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def read_json(text: str, place: str) -> Any:
    """A value that a column holds as JSON, checked as a row is.

    Raises:
        ConfigError: it is no JSON, holds half a character, or is nested too deep.
    """
    value = parse_json(text, place, "mend or remove the row")
    if trouble := _trouble(value):
        raise ConfigError(f"{place} {trouble}; mend or remove the row")
    return value


def usable_columns(values: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row but those that hold bytes."""
    return {name: value for name, value in values.items() if not _holds_bytes(value)}


def is_medium(column: str, value: Any) -> bool:
    """Whether a column holds images, sounds or films: by its name, or as bytes."""
    return bool(value) and (column in MEDIA_COLUMNS or _holds_bytes(value))


def _holds_bytes(value: Any) -> bool:
    """Whether bytes are somewhere inside; elements of a list are alike."""
    if isinstance(value, list):
        return bool(value) and _holds_bytes(value[0])
    if isinstance(value, dict):
        return any(map(_holds_bytes, value.values()))
    return isinstance(value, bytes)


def _unusable(value: Any) -> str | None:
    """What parquet can hold and no prompt or gold can be."""
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
    """Rows of `env.data_files`, or of the hub dataset `hub_name`; with `env.holdout` those of one side of it.

    Columns that no text model can use are named once."""
    paths = data_files(env)
    if paths:
        located = [(*row, _is_table(path)) for path in paths for row in _rows_of(path)]
        rows = [Row(values, place, index, table) for index, (values, place, table) in enumerate(located)]
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
        if is_medium(name, value)
    }
    for name, place in media.items():
        log.warning(
            "%s: column %r holds images, sound or bytes, which no model here reads: it is not used",
            place,
            name,
        )
    if not env.holdout:
        return rows
    return [row for row in rows if held_out(row, env.holdout) == (env.split == "test")]


def held_out(row: Row, share: float) -> bool:
    """Whether a row belongs to the held-out share: by a hash of its prompt, so that equal prompts stay together."""
    column = next((name for name in PROMPT_COLUMNS if name in row.values), None)
    prompt = row.values if column is None else row.values[column]
    text = " ".join(json.dumps(prompt, sort_keys=True, default=str).split())
    return zlib.crc32(text.encode()) / 2**32 < share


def _rows_of(path: Path) -> list[tuple[dict[str, Any], str]]:
    rows = list(local_rows(path))
    if not rows:
        raise ConfigError(f"{path}: the file has no rows")
    return rows


def _is_table(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == PARQUET


def local_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows with their places (file:line or file[index]). A format is told by how the file begins, not by its name."""
    try:
        with path.open("rb") as file:
            begins = file.read(8)
            if begins[:4] == PARQUET:
                return iter(_parquet(path))
            data = begins + file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); see to its permissions") from error
    if path.suffix == ".parquet":
        raise ConfigError(f"{path}: not a parquet file, whatever its name says; write it anew")
    for magic, kind, remedy in _NOT_TEXT:
        if begins.startswith(magic):
            raise ConfigError(f"{path}: {kind}; {remedy}")
    data = data.removeprefix(codecs.BOM_UTF8)
    if path.suffix in (".csv", ".tsv") and not data.lstrip().startswith((b"{", b"[")):
        raise ConfigError(f"{path}: a {path.suffix[1:].upper()} file; save it as parquet or JSONL")
    if data.lstrip().startswith(b"["):
        return _json_array(path, data)
    return _json_lines(path, data)


def _parquet(path: Path) -> list[tuple[dict[str, Any], str]]:
    import pyarrow
    import pyarrow.parquet

    row = None
    try:
        table = pyarrow.parquet.read_table(path)
        try:
            rows = table.to_pylist()
        except (pyarrow.ArrowException, ValueError, OverflowError):
            for row in range(table.num_rows):  # which one it is
                table.slice(row, 1).to_pylist()
            raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        place = path if row is None else f"{path}[{row}]"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{place}: cannot be read as parquet ({reason}); write the file anew") from error
    return [(values, f"{path}[{index}]") for index, values in enumerate(rows)]


def _json_lines(path: Path, data: bytes) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield checked_row(parse_json(decode(line, place), place, REMEDY), place), place


def _json_array(path: Path, data: bytes) -> Iterator[tuple[dict[str, Any], str]]:
    text = decode(data, str(path))
    for index, row in enumerate(parse_json(text, str(path), "mend the file")):
        place = f"{path}[{index}]"
        yield checked_row(row, place), place


def decode(data: bytes, place: str) -> str:
    """UTF-8 text. Raises ConfigError, which names the line where `data` has several."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start]
        where = f"{place}:{before.count(10) + 1}" if b"\n" in data else place
        column = error.start - before.rfind(b"\n")
        raise ConfigError(
            f"{where}: byte {column} (0x{data[error.start]:02x}) is not UTF-8; save the file as UTF-8, as in "
            "iconv -f LATIN1 -t UTF-8"
        ) from error


def parse_json(text: str, place: str, remedy: str) -> Any:
    """A value of JSON, strictly.

    Raises:
        ConfigError: what is none, such as NaN; integers of thousands of digits; what is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        where = f"{place}:{error.lineno}" if "\n" in text else place
        raise ConfigError(f"{where}: not valid JSON ({error.msg}); {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{place}: {str(error).split(';')[0]}; {remedy}") from error
    except RecursionError as error:
        raise ConfigError(f"{place}: nested too deep; {remedy}") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON and no number; write null, or leave the column out")


def checked_row(row: Any, place: str) -> dict[str, Any]:
    """A row of a JSON file: an object whose texts are text.

    Raises:
        ConfigError: it is something else, is nested deeper than `DEEPEST`, or half a character is in a text.
    """
    if not isinstance(row, dict):
        what = f"a list of {len(row)}" if isinstance(row, list) else shown(row)
        raise ConfigError(f"{place}: a row must be a JSON object, it is {what}")
    for column, value in row.items():
        trouble = _trouble(column) or _trouble(value)
        if trouble:
            raise ConfigError(f"{place}: column {shown(column)} {trouble}; mend or remove the row")
    return row


def _trouble(value: Any, depth: int = 0) -> str | None:
    """What is wrong with a value of JSON."""
    if isinstance(value, str):
        return None if is_text(value) else f"has half a character (a lone surrogate) in {shown(value)}"
    if not isinstance(value, dict | list):
        return None
    if depth == DEEPEST:
        return f"is nested deeper than {DEEPEST} levels"
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return next((found for each in inside if (found := _trouble(each, depth + 1))), None)


def is_message(entry: object) -> bool:
    """Whether it is {"role": text, "content": text}."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("role"), str)
        and isinstance(entry.get("content"), str)
    )


def is_text(value: str) -> bool:
    """False for a text that no file can hold: one with a lone surrogate, which half an emoji is."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A value for a message: what it is, on one short line."""
    text = ascii(value) if isinstance(value, str) and not is_text(value) else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


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
