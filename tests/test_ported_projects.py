"""Three projects in verl's form, run from their files as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.scripts import ran, rows
from torchgrpo.monitoring.ledger_storage import read_records

pytestmark = pytest.mark.long

PORTED = Path(__file__).parent / "ported"
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}


def logic_row(number: int) -> dict[str, Any]:
    chat = f"<bos><user>Ann says: Bob is a knave. Who is what? Case {number}.<assistant><think>"
    return {
        "data_source": "kk_logic",
        "prompt": [{"role": "user", "content": chat}],
        "ability": "logic",
        "reward_model": {"style": "rule", "ground_truth": {"solution": {"Ann": "knight", "Bob": "knave"}}},
        "extra_info": {"index": number, "split": "train"},
    }


def tools_row(number: int) -> dict[str, Any]:
    called = {"id": "0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    return {
        "data_source": "calls",
        "prompt": [
            {"role": "system", "content": "Call functions."},
            {"role": "user", "content": f"{number}+1?"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "content": "2", "tool_call_id": "0"},
        ],
        "tools": json.dumps(
            [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        ),
        "reward_model": {"style": "rule", "ground_truth": json.dumps(CALL)},
        "extra_info": {"turns": 2},
    }


def sql_row(number: int) -> dict[str, Any]:
    return {
        "data_source": "spider",
        "prompt": [
            {"role": "system", "content": "Write SQLite."},
            {"role": "user", "content": f"How many rows have a above {number}?"},
        ],
        "reward_model": {"style": "rule", "ground_truth": f"SELECT count(*) FROM t WHERE a > {number}"},
        "extra_info": {"schema": "CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1), (5);"},
    }


def train(name: str, folder: Path, row: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a project from its YAML file, as a user does; the run's records."""
    path = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(number) for number in range(16)]), path)
    short = ("env.num_envs=4", "train.total_dialog_turns=96", f"env.data_files={path}")
    output = ran("grpo.py", folder / "run", *short, f"--config-dir={PORTED}", name=name).output
    assert "finished" in output, output
    assert len(rows(folder / "run")) == 3
    return list(read_records(folder / "run"))


def scores(records: list[dict[str, Any]]) -> set[float]:
    verdicts = [one["verdict"] for record in records for one in record["completions"]]
    found = {verdict["score"] for verdict in verdicts if verdict["outcome"] == "scored"}
    assert min(verdict["score"] for verdict in verdicts) >= min(found) > -4, "an invalid one is the lowest"
    return found


def test_puzzles_whose_chats_are_rendered_already(tmp_path: Path) -> None:
    records = train("logic", tmp_path, logic_row)
    for record in records:
        assert record["prompt_text"].startswith("<bos><user>Ann says")
        assert record["prompt_text"].endswith("<assistant><think>")
        assert record["prompt_tokens"][0] == 1, "the control tokens of the text are control tokens"
        assert {one["shown"]["prefill"] for one in record["completions"]} == {"<think>"}
    assert all(-3 <= score <= -2.9 for score in scores(records))


def test_function_calls_with_a_reward_that_follows_the_step(tmp_path: Path) -> None:
    records = train("tools", tmp_path, tools_row)
    for record in records:
        done = record["iteration"] - 1
        assert {one["verdict"]["parts"].get("step", done) for one in record["completions"]} == {done}
        assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "tool"]
        assert record["messages"][2]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 1}
    assert all(-3 <= score <= -1.9 for score in scores(records))


def test_queries_that_are_run_on_the_schema_of_the_row(tmp_path: Path) -> None:
    records = train("sql", tmp_path, sql_row)
    assert all([message["role"] for message in record["messages"]] == ["user"] for record in records)
    assert all("Write SQLite" not in record["prompt_text"] for record in records)
    assert all(-2 <= score <= -1.9 for score in scores(records))
