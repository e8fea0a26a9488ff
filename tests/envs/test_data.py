"""Tests of broken data files, which are refused with file, line and remedy."""

import codecs
import io
import json
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.jobs import RewardsConfig
from envs.row_files import MAX_DEPTH, local_rows
from envs.task import make_task
from torchgrpo.run.jobs.rewards import score_completions

GOOD = b'{"prompt": "1+1=", "answer": 2}\n'


def assert_refused(path: Path, expected: str, dataset: str = "jsonl") -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        make_task(EnvConfig(dataset=dataset, data_files=str(path))).examples("train")
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(("content", "expected"), [
    (GOOD.decode().encode("utf-16"), r"UTF-16 text; save it as UTF-8"),
    (GOOD + '{"prompt": "caf\u00e9", "answer": 2}'.encode("latin-1"), r":2: byte 16 \(0xe9\) is not UTF-8"),
    (GOOD + bytes(range(256)), r"rows:2: not valid JSON"),
    (b"\x89PNG\r\n\x1a\n" + bytes(200), r"rows:1: byte 1 \(0x89\) is not UTF-8"),
    (b"\x1f\x8b\x08\x00" + bytes(20), r"compressed by gzip; unpack it"),
    (b"PK\x03\x04" + bytes(20), r"a zip archive; unpack it"),
    (b"\xff\xff\xff\xffx\x00\x00\x00", r"an Arrow file; save it as parquet"),
    (b"PAR1 and nothing else", r"cannot be read as parquet"),
    (b"", r"rows: the file has no rows"),
    (b"\n \n", r"rows: the file has no rows"),
    (b"[]", r"rows: the file has no rows"),
    (GOOD + GOOD[:20], r"rows:2: not valid JSON"),
    (b'{"question": "a", "answer": "b"}', r"rows:1: no column 'prompt' \(columns: answer, question\)"),
    (b'{"prompt": "a"}', r"rows:1: no column 'answer' \(columns: prompt\)"),
    (b"[" + GOOD, r"rows:2: not valid JSON .*correct the file"),
    (b'[{"prompt": "a", "answer": "\xe9"}]', r"byte 29 \(0xe9\) is not UTF-8"),
    (GOOD + b"3\n", r"rows:2: a row must be a JSON object, but is 3"),
    (b'{\n  "prompt": "a"\n}\n', r"rows:1: not valid JSON .*must be one whole object"),
    (GOOD + b"[" * 100_000, r"rows:2: nested too deep"),
    (GOOD + b'{"a": ' * 100_000, r"rows:2: nested too deep"),
    (b"[" * 100_000, r"rows: nested too deep"),
    (
        b'{"prompt": "a", "answer": 1, "x": ' + b"[" * 300 + b"]" * 300 + b"}",
        rf"rows:1: column 'x' is nested deeper than {MAX_DEPTH}",
    ),
    (b'{"prompt": "a", "answer": ' + b"7" * 10_000 + b"}", r"rows:1: Exceeds the limit .*correct or remove"),
    (b'{"prompt": "a", "answer": NaN}', r"rows:1: NaN is not valid JSON and not a number"),
    (b'{"prompt": "a", "answer": -Infinity}', r"rows:1: -Infinity is not valid JSON"),
    (b'{"prompt": "a", "answer": 1e999}', r"rows:1: column 'answer' holds a number that is not finite"),
    (GOOD + rb'{"prompt": "7+\ud8007=", "answer": 14}', r"rows:2: column 'prompt' has half a character"),
    (rb'{"prompt": "a", "answer": "\udc00"}', r"rows:1: column 'answer' has half a character"),
    (rb'{"prompt": "a", "answer": 1, "x": {"y": ["\ud83d"]}}', r"rows:1: column 'x' has half a character"),
    (rb'{"prompt": "a", "answer": 1, "\ud83d": 0}', r"rows:1: column '\\ud83d' has half a character"),
])  # fmt: skip
def test_a_broken_file_is_named_with_its_line(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    assert_refused(path, expected)


@pytest.mark.parametrize(("row", "expected"), [
    ({"answer": ""}, r"column 'answer' is empty"),
    ({"answer": " \n"}, r"column 'answer' is empty"),
    ({"answer": True}, r"column 'answer' must be text or a number, but is True"),
    ({"answer": None}, r"column 'answer' must be text or a number, but is None"),
    ({"answer": {"x": 1}}, r"column 'answer' must be text or a number"),
    ({"prompt": ""}, r"column 'prompt' must be a non-empty string"),
    ({"prompt": 3}, r"column 'prompt' must be a non-empty string, but is 3"),
    ({"prompt": ["a" * 100_000]}, r'"prompt" must be \{"role".* or a list of such objects, but has .aaa'),
    ({"messages": "hello"}, r'"messages" must be'),
    ({"messages": []}, r'"messages" must be'),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r'"messages" must be'),
    ({"messages": [{"role": "human", "content": "a"}]}, r"the role 'human'; choose one of system, developer, user"),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        r"the last message of \"messages\" has the role assistant, .*end with a user message",
    ),
    ({"messages": {"role": "system", "content": "a"}}, r"the last message of \"messages\" has the role system"),
    ({"messages": {"role": "user", "content": " "}}, r"the last message of \"messages\" is empty"),
])  # fmt: skip
def test_an_empty_or_odd_row_is_refused(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + json.dumps({"prompt": "a", "answer": "b"} | row).encode())
    assert_refused(path, rf"rows\.jsonl:2: .*{expected}")


def test_a_byte_order_mark_and_dos_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + GOOD.replace(b"\n", b"\r\n") * 2)
    examples = make_task(EnvConfig(dataset="jsonl", data_files=str(path))).examples("train")
    assert [example.answer for example in examples] == ["2", "2"]


def parquet(path: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize(("column", "expected"), [
    ([b"1", b"\xff\xfe"], r"\[0\]: column 'answer' holds bytes, which are no text"),
    (numpy.array([1.0, numpy.nan]), r"\[1\]: column 'answer' holds a number that is not finite"),
    ([True, False], r"\[0\]: column 'answer' must be text or a number"),
    ([["1", "2"], ["2", "3"]], r"\[0\]: column 'answer' must be text or a number"),
])  # fmt: skip
def test_parquet_values_that_cannot_be_answers_are_refused(column: Any, expected: str, tmp_path: Path) -> None:
    assert_refused(parquet(tmp_path / "rows.parquet", prompt=["a", "b"], answer=column), expected)


def test_parquet_is_recognized_by_its_content(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.jsonl", prompt=["a"], answer=["b"], picture=[b"\xff"])
    assert len(make_task(EnvConfig(dataset="jsonl", data_files=str(path))).examples("train")) == 1
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(path.read_bytes()[:-40])
    assert_refused(broken, "cannot be read as parquet")
    broken.write_bytes(GOOD)
    assert_refused(broken, "not a parquet file despite its name")
    broken.write_bytes(b"")
    assert_refused(broken, "not a parquet file despite its name")
    assert_refused(parquet(tmp_path / "empty.parquet", prompt=[], answer=[]), "the file has no rows")


def test_a_csv_file_is_refused_by_its_content(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("prompt,answer\na,1\n")
    assert_refused(table, r"rows\.csv: a CSV file; save it as parquet or JSONL")
    table.write_bytes(GOOD)
    assert len(list(local_rows(table))) == 1, "despite its name"


def test_text_in_parquet_that_is_none_is_named_by_its_row(tmp_path: Path) -> None:
    binary = pyarrow.array([b"fine", b"caf\xe9"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, binary.buffers())
    assert_refused(parquet(tmp_path / "rows.parquet", prompt=text, answer=["a", "b"]), r"rows\.parquet\[1\]: cannot be")


@pytest.mark.parametrize(("data_files", "expected"), [
    ("nowhere.jsonl", r"env\.data_files=nowhere\.jsonl: no such file \(relative to "),
    ("/", r"env\.data_files=/: a folder, not a file"),
    ([], r"env\.data_files=\[\]: no file"),
    ("", r"env\.data_files='': no file"),
    ({1: "rows.jsonl"}, r"env\.data_files has 1 but no file for env\.split=train"),
    ({"train": 3}, r"env\.data_files=3: give the path of a file"),
    ({"train": None}, r"env\.data_files=None: give the path of a file"),
    ([None], r"env\.data_files=\[None\]: give the path"),
    (7, r"env\.data_files=7: give the path"),
])  # fmt: skip
def test_files_that_are_none_are_named(data_files: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_task(EnvConfig(dataset="jsonl", data_files=data_files)).examples("train")


WRONG: list[Any] = [None, True, 3, 0.5, "", "\x00", "text", [], [None], [1], {}, {"a": 1}, [{"role": "user"}]]
COLUMNS = {
    "jsonl": ("prompt", "messages", "answer", "test_cases"), "gsm8k": ("question", "answer"),
    "math": ("problem", "answer", "solution"), "aime": ("problem", "answer"),
    "dapo_math": ("prompt", "answer", "reward_model"), "ifeval": ("prompt", "instruction_id_list", "kwargs"),
    "code": ("problem", "inputs", "outputs", "fn_name", "test_cases", "public_tests"),
}  # fmt: skip
RIGHT = {
    "messages": {"role": "user", "content": "1+1="}, "answer": "#### 2", "solution": r"\boxed{2}",
    "reward_model": {"ground_truth": "2"}, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}],
    "inputs": ["1"], "outputs": ["1"], "fn_name": None, "test_cases": {"inputs": ["1"], "outputs": ["1"]},
    "public_tests": {"input": ["1"], "output": ["1"]},
}  # fmt: skip


def error_message(dataset: str, path: Path) -> str:
    """Returns the error message of a file, or the place of its valid row."""
    try:
        make_task(EnvConfig(dataset=dataset, data_files=str(path))).examples("train")
    except ConfigError as error:
        return str(error)
    return f"{path}:1"


@pytest.mark.parametrize("dataset", COLUMNS)
def test_no_column_of_a_wrong_type_gives_a_traceback(dataset: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for column in COLUMNS[dataset]:
        for value in WRONG:
            row = {name: RIGHT.get(name, "1+1=") for name in COLUMNS[dataset]} | {column: value}
            if column in ("prompt", "answer"):  # the other columns would replace these
                row = {name: row[name] for name in row if name not in ("messages", "test_cases", "reward_model")}
            path.write_text(json.dumps(row))
            assert f"{path}:1" in error_message(dataset, path), (column, value)


@pytest.mark.parametrize(("content", "expected"), [
    (b"\xff\xfe{\x00", "UTF-16 text"),
    (b"\xe9", r"samples:1: byte 1 \(0xe9\) is not UTF-8"),
    (rb'{"row": 0, "completion": "\ud800"}', r"samples:1: column 'completion' has half a character"),
    (b'{"row": 0, "completion": "a", "num_tokens": "many"}', r"samples:1: num_tokens='many'"),
    (b'{"row": 0, "completion": "a", "num_tokens": NaN}', r"samples:1: NaN is not valid JSON"),
    (b'{"row": true, "completion": "a"}', r"samples:1: row True is not among the 1 prompts"),
    (b"[" * 100_000, r"samples: nested too deep"),
])  # fmt: skip
def test_broken_samples_are_named_with_their_line(content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(GOOD)
    (tmp_path / "samples").write_bytes(content)
    env = EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows"))
    saved = RewardsConfig(str(tmp_path / "samples"))
    with pytest.raises(ConfigError, match=expected):
        score_completions(env, saved, io.StringIO(), io.StringIO())
