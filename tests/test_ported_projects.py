"""Runs of three projects whose data and rewards have verl's format, without changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.script_runner import read_metrics, run_script
from torchgrpo.monitoring.ledger_storage import read_records

pytestmark = pytest.mark.long

PROJECTS_DIR = Path(__file__).parent / "ported"
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
    tool_call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    return {
        "data_source": "calls",
        "prompt": [
            {"role": "system", "content": "Call functions."},
            {"role": "user", "content": f"{number}+1?"},
            {"role": "assistant", "content": None, "tool_calls": [tool_call]},
            {"role": "tool", "content": "2", "tool_call_id": "0"},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]),
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
    """Trains a project from its YAML file and returns the ledger's records."""
    path = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(number) for number in range(16)]), path)
    short = ("env.num_envs=4", "train.total_dialog_turns=96", f"env.data_files={path}")
    output = run_script("grpo.py", folder / "run", *short, f"--config-dir={PROJECTS_DIR}", name=name).output
    assert "finished" in output, output
    assert len(read_metrics(folder / "run")) == 3
    return list(read_records(folder / "run"))


def valid_scores(records: list[dict[str, Any]]) -> set[float]:
    verdicts = [one["verdict"] for record in records for one in record["completions"]]
    scores = {verdict["score"] for verdict in verdicts if verdict["outcome"] == "scored"}
    assert min(verdict["score"] for verdict in verdicts) >= min(scores) > -4, "no score is below the lowest valid one"
    return scores


def test_puzzles_with_rendered_chats(tmp_path: Path) -> None:
    records = train("logic", tmp_path, logic_row)
    for record in records:
        assert record["prompt_text"].startswith("<bos><user>Ann says")
        assert record["prompt_text"].endswith("<assistant><think>")
        assert record["prompt_tokens"][0] == 1, "<bos> in the text becomes the control token"
        assert {one["reward_input"]["prefill"] for one in record["completions"]} == {"<think>"}
    assert all(-3 <= score <= -2.9 for score in valid_scores(records))


def test_function_calls_with_a_reward_that_follows_the_step(tmp_path: Path) -> None:
    records = train("tools", tmp_path, tools_row)
    for record in records:
        num_steps = record["iteration"] - 1
        assert {one["verdict"]["components"].get("step", num_steps) for one in record["completions"]} == {num_steps}
        assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "tool"]
        assert record["messages"][2]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 1}
    assert all(-3 <= score <= -1.9 for score in valid_scores(records))


def test_queries_that_are_run_on_the_schema_of_the_row(tmp_path: Path) -> None:
    records = train("sql", tmp_path, sql_row)
    assert all([message["role"] for message in record["messages"]] == ["user"] for record in records)
    assert all("Write SQLite" not in record["prompt_text"] for record in records)
    assert all(-2 <= score <= -1.9 for score in valid_scores(records))
