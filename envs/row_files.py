"""Local files of rows: JSONL, JSON or parquet, read strictly."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.schema.errors import ConfigError

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


def local_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Read rows with their places, file:line or file[index]; the first bytes tell the format."""
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
        rows = enumerate(parse_json(decode(data, str(path)), str(path), "mend the file"))
        return ((checked_row(row, f"{path}[{index}]"), f"{path}[{index}]") for index, row in rows)
    lines = [
        (f"{path}:{number}", line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()
    ]
    return ((checked_row(parse_json(decode(line, at), at, REMEDY), at), at) for at, line in lines)


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
    """Describe the fault of a value of JSON; None without one."""
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
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("role", "content"))


def is_text(value: str) -> bool:
    """Whether a text can be encoded: one with a lone surrogate cannot."""
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
