"""The files of the ledger: RUN/rollouts/train_000001.jsonl.zst ..., eval_SET_000040.jsonl.zst, one group a line.

    append ─▶ NAME.jsonl, whole lines ──closed: when it is large, at the end──▶ NAME.jsonl.zst, one frame
                                                          the oldest are removed where all take too much ─┘

A file that is being written is plain, so that a process killed with SIGKILL loses no line that it had written. pandas,
datasets and DuckDB open both kinds.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from config.run_folder.files import written_whole

FOLDER = "rollouts"
OPEN, CLOSED = ".jsonl", ".jsonl.zst"
_NAME = re.compile(r"(train|eval_([\w\-]+))_(\d{6,})\.jsonl(\.zst)?")
_UNSEEN: dict[str, Any] = {"advantage": 0.0, "in_loss": False, "log_ratio": [], "entropy": []}


@dataclass(frozen=True)
class LedgerFile:
    """One file. evaluated: the name of the set; empty: groups of training. number: the iteration of its first line."""

    path: Path
    evaluated: str
    number: int


def ledger_files(run_dir: Path) -> list[LedgerFile]:
    """Those of a run's folder, the oldest first."""
    found: dict[str, LedgerFile] = {}
    for path in sorted((run_dir / FOLDER).glob("*.jsonl*")):  # plain before compressed
        match = _NAME.fullmatch(path.name)
        if match:
            found[match[1] + match[3]] = LedgerFile(path, match[2] or "", int(match[3]))
    # The evaluation after an iteration comes after its groups.
    return sorted(found.values(), key=lambda file: (file.number, bool(file.evaluated)))


def read_records(run_dir: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Every group that a run's folder holds, the oldest first, one at a time. kind: only `train` or `eval`."""
    for file in ledger_files(run_dir):
        if kind is None or (kind == "eval") == bool(file.evaluated):
            yield from records_of(file.path)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The groups of one file."""
    return map(parsed, lines_of(path))


def parsed(line: bytes) -> dict[str, Any]:
    """A line of the ledger. Each of its completions has its number in the group (`sample`), whether the group kept it
    (`chosen`), and what the learner knows of it."""
    record: dict[str, Any] = orjson.loads(line)
    token = 0
    for sample, one in enumerate(record["completions"]):
        chosen = sample < record["group_size"]
        one |= {"sample": sample, "chosen": chosen, **_UNSEEN}
        if chosen and record["in_loss"]:
            tokens = slice(token, token + len(one["token_ids"]))
            one |= {name: record[name][sample] for name in ("advantage", "in_loss")}
            one |= {name: record[name][tokens] for name in ("log_ratio", "entropy")}
            token = tokens.stop
    return record


def lines_of(path: Path) -> Iterator[bytes]:
    """The whole lines of one file, without their ends."""
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file) if path.suffix == ".zst" else file
        for line in io.BufferedReader(reader, 1 << 20):
            if line.endswith(b"\n"):
                yield line[:-1]


def close_file(path: Path) -> None:
    """Compress a plain file, which is then gone."""
    with path.open("rb") as plain, written_whole(path.with_name(path.name + ".zst")) as packed:
        zstandard.ZstdCompressor(level=3).copy_stream(plain, packed, size=path.stat().st_size)
    path.unlink()


def keep_until(run_dir: Path, iteration: int) -> None:
    """Remove every line of a later iteration: those of what a killed run had done after its checkpoint."""
    for file in ledger_files(run_dir):
        path = file.path
        if file.number > iteration:
            path.unlink()
        elif not file.evaluated and (
            path.suffix != ".zst" or any(record["iteration"] > iteration for record in records_of(path))
        ):
            plain = path.with_name(path.name.removesuffix(".zst"))
            kept = [line for line in lines_of(path) if orjson.loads(line)["iteration"] <= iteration]
            with written_whole(plain) as rewritten:  # without a last line that is not whole, too
                rewritten.writelines(line + b"\n" for line in kept)
            if path != plain:
                path.unlink()
    for path in (run_dir / FOLDER).glob("*.partial"):
        path.unlink()
