"""Reads rows of local JSONL, JSON and parquet files, and rejects invalid text and values."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.schema.errors import ConfigError

PARQUET = b"PAR1"
MAX_DEPTH = 100
"""Largest depth of lists and objects in a column; functions that recurse over values must not exhaust the stack."""
MAX_VALUE_CHARACTERS = 200
"""Largest number of characters of a value in a message."""
LINE_REMEDY = "correct or remove the line; each line of a JSONL file must be one whole object"
_NOT_TEXT = (
    (codecs.BOM_UTF16_LE, "UTF-16 text", "save it as UTF-8, as in iconv -f UTF-16 -t UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16 text", "save it as UTF-8, as in iconv -f UTF-16 -t UTF-8"),
    (b"\x1f\x8b", "compressed by gzip", "unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it with unzstd"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"ARROW1", "an Arrow file", "save it as parquet or JSONL"),
    (b"\xff\xff\xff\xff", "an Arrow file", "save it as parquet or JSONL, as with to_parquet of datasets"),
)


def local_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Reads the rows of a local file, each with its place.

    A place is path:line or path[index]. The first bytes of the file determine its format.

    Raises:
        ConfigError: the file cannot be read, or has another format.
    """
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if head[:4] == PARQUET:
                return iter(_parquet_rows(path))
            data = head + file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the permissions of the file") from error
    if path.suffix == ".parquet":
        raise ConfigError(f"{path}: not a parquet file despite its name; write the file again")
    for magic, kind, remedy in _NOT_TEXT:
        if head.startswith(magic):
            raise ConfigError(f"{path}: {kind}; {remedy}")
    data = data.removeprefix(codecs.BOM_UTF8)
    if path.suffix in (".csv", ".tsv") and not data.lstrip().startswith((b"{", b"[")):
        raise ConfigError(f"{path}: a {path.suffix[1:].upper()} file; save it as parquet or JSONL")
    if data.lstrip().startswith(b"["):
        rows = enumerate(parse_json(decode(data, str(path)), str(path), "correct the file"))
        return ((check_row(row, f"{path}[{index}]"), f"{path}[{index}]") for index, row in rows)
    lines = [(f"{path}:{number}", line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    return ((check_row(parse_json(decode(line, at), at, LINE_REMEDY), at), at) for at, line in lines)


def _parquet_rows(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Reads the rows of a parquet file, each with its place."""
    import pyarrow
    import pyarrow.parquet

    row = None
    try:
        table = pyarrow.parquet.read_table(path)
        try:
            rows = table.to_pylist()
        except (pyarrow.ArrowException, ValueError, OverflowError):
            for row in range(table.num_rows):  # find the row for the message
                table.slice(row, 1).to_pylist()
            raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        place = path if row is None else f"{path}[{row}]"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{place}: cannot be read as parquet ({reason}); write the file again") from error
    return [(values, f"{path}[{index}]") for index, values in enumerate(rows)]


def decode(data: bytes, place: str) -> str:
    """Decodes UTF-8 text. Raises ConfigError with the place of the first wrong byte."""
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
    """Parses JSON strictly.

    Raises:
        ConfigError: the text is not JSON, has NaN or an infinity, an integer of thousands of digits, or is nested too
            deep.
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
    raise ValueError(f"{name} is not valid JSON and not a number; write null, or remove the column")


def check_row(row: Any, place: str) -> dict[str, Any]:
    """Returns a row of a JSON file after checking that it is a valid object.

    Raises:
        ConfigError: the row is no object, is nested deeper than `MAX_DEPTH`, or has a lone surrogate.
    """
    if not isinstance(row, dict):
        what = f"a list of {len(row)}" if isinstance(row, list) else format_value(row)
        raise ConfigError(f"{place}: a row must be a JSON object, but is {what}")
    for column, value in row.items():
        problem = _value_problem(column) or _value_problem(value)
        if problem:
            raise ConfigError(f"{place}: column {format_value(column)} {problem}; correct or remove the row")
    return row


def _value_problem(value: Any, depth: int = 0) -> str | None:
    """Describes a lone surrogate or too deep nesting in a JSON value, or returns None."""
    if isinstance(value, str):
        return None if is_text(value) else f"has half a character (a lone surrogate) in {format_value(value)}"
    if not isinstance(value, dict | list):
        return None
    if depth == MAX_DEPTH:
        return f"is nested deeper than {MAX_DEPTH} levels"
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return next((found for each in inside if (found := _value_problem(each, depth + 1))), None)


def is_message(entry: object) -> bool:
    """Whether an entry is a chat message with text: {"role": text, "content": text}."""
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("role", "content"))


def is_text(value: str) -> bool:
    """Whether a string can be encoded; a string with a lone surrogate cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def format_value(value: Any) -> str:
    """Formats a value for a message, on one short line."""
    text = ascii(value) if isinstance(value, str) and not is_text(value) else repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"


def is_json_object(value: Any) -> bool:
    """Whether a value is a string with a JSON object."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def read_json(text: str, place: str) -> Any:
    """Parses a column that holds JSON, with the checks of a row.

    Raises:
        ConfigError: the text is not JSON, has a lone surrogate, or is nested too deep.
    """
    value = parse_json(text, place, "correct or remove the row")
    if problem := _value_problem(value):
        raise ConfigError(f"{place} {problem}; correct or remove the row")
    return value
