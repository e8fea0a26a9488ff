"""Files of the ledger: names, reading, compression and removal of later records.

    append ─▶ NAME.jsonl ── large, or end of run ──▶ NAME.jsonl.zst, one frame ── over size limit ──▶ removed

Names are RUN/rollouts/train_000001.jsonl.zst ... and eval_SET_000040.jsonl.zst; a line is one group. The file
that is being written is not compressed, so a process killed with SIGKILL loses no complete line. pandas,
datasets and DuckDB read both kinds.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from config.run_folder.atomic_files import atomic_file
from config.schema.former_names import COMPLETION_FIELDS, LEDGER_FIELDS, VERDICT_FIELDS, with_new_names

FOLDER = "rollouts"
OPEN, CLOSED = ".jsonl", ".jsonl.zst"
_NAME = re.compile(r"(train|eval_([\w\-]+))_(\d{6,})\.jsonl(\.zst)?")
_NO_EPISODE: dict[str, Any] = {"sequence_starts": [], "turns": [], "error": ""}
"""Fields of a completion that files of an earlier version lack."""
_NO_TOKEN_VALUES: dict[str, Any] = {"advantage": 0.0, "in_loss": False, "log_ratio": [], "entropy": []}


@dataclass(frozen=True)
class LedgerFile:
    """One file of the ledger.

    eval_set: name of the evaluation set; empty for training. first_iteration: iteration of the first line.
    """

    path: Path
    eval_set: str
    first_iteration: int


def ledger_files(run_dir: Path) -> list[LedgerFile]:
    """Returns the ledger files of a run's folder, oldest first."""
    files: dict[str, LedgerFile] = {}
    for path in sorted((run_dir / FOLDER).glob("*.jsonl*")):
        match = _NAME.fullmatch(path.name)
        if match:  # a plain file sorts before its compressed copy, which wins
            files[match[1] + match[3]] = LedgerFile(path, match[2] or "", int(match[3]))
    # An evaluation after an iteration sorts after the groups of that iteration.
    return sorted(files.values(), key=lambda file: (file.first_iteration, bool(file.eval_set)))


def read_records(run_dir: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yields the record of each group in a run's folder, oldest first.

    kind: `train` or `eval` to read only these; None for both.
    """
    for file in ledger_files(run_dir):
        if kind is None or (kind == "eval") == bool(file.eval_set):
            yield from read_file_records(file.path)


def read_file_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of one file."""
    return map(parse_record, read_lines(path))


def parse_record(line: bytes) -> dict[str, Any]:
    """Returns a line of the ledger as a record under the present field names.

    Each completion gets its index in the group (`sample`), whether it belongs to the group or was left out by
    candidate selection (`chosen`), and the learner's values.
    """
    record: dict[str, Any] = with_new_names(LEDGER_FIELDS, orjson.loads(line))
    token = 0
    completions = [_NO_EPISODE | with_new_names(COMPLETION_FIELDS, one) for one in record["completions"]]
    record["completions"] = completions
    for sample, one in enumerate(completions):
        one["verdict"] = with_new_names(VERDICT_FIELDS, one["verdict"])
        chosen = sample < record["group_size"]
        one |= {"sample": sample, "chosen": chosen, **_NO_TOKEN_VALUES}
        if chosen and record["in_loss"]:
            tokens = slice(token, token + len(one["token_ids"]))
            one |= {name: record[name][sample] for name in ("advantage", "in_loss")}
            one |= {name: record[name][tokens] for name in ("log_ratio", "entropy")}
            token = tokens.stop
    return record


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the complete lines of one file, without line ends."""
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file) if path.suffix == ".zst" else file
        for line in io.BufferedReader(reader, 1 << 20):
            if line.endswith(b"\n"):
                yield line[:-1]


def close_file(path: Path) -> None:
    """Compresses a plain file and removes it."""
    with path.open("rb") as plain, atomic_file(path.with_name(path.name + ".zst")) as compressed:
        zstandard.ZstdCompressor(level=3).copy_stream(plain, compressed, size=path.stat().st_size)
    path.unlink()


def remove_later_records(run_dir: Path, iteration: int) -> None:
    """Removes the records of later iterations, which a killed run had written after its checkpoint."""
    for file in ledger_files(run_dir):
        path = file.path
        if file.first_iteration > iteration:
            path.unlink()
        elif not file.eval_set and (
            path.suffix != ".zst" or any(record["iteration"] > iteration for record in read_file_records(path))
        ):
            plain = path.with_name(path.name.removesuffix(".zst"))
            lines = [line for line in read_lines(path) if orjson.loads(line)["iteration"] <= iteration]
            with atomic_file(plain) as rewritten:  # drops an incomplete last line as well
                rewritten.writelines(line + b"\n" for line in lines)
            if path != plain:
                path.unlink()
    for path in (run_dir / FOLDER).glob("*.partial"):
        path.unlink()
