"""Tests `run=rollouts`: selection, printing and tables of recorded groups."""

import csv
import json
import math
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet
import pytest

from config.schema.errors import ConfigError
from config.schema.rollouts import RolloutsConfig
from tests.episodes import failed_episode, hostile_episode, rewritten_episode, tool_episode
from tests.groups import make_completion, make_group
from tests.script_runner import call_script
from torchgrpo.monitoring.episode_text import split_tool_calls
from torchgrpo.monitoring.ledger_record import GroupFate, group_to_record
from torchgrpo.monitoring.ledger_storage import parse_record, read_records
from torchgrpo.run.jobs.rollouts import (
    extreme_groups,
    flipped_groups,
    format_group,
    format_rollouts,
    group_mean,
    matching_groups,
)
from torchgrpo.run.rollout_table import write_completion_table


def matching_records(run: Path, **filters: Any) -> list[dict[str, Any]]:
    return list(matching_groups(read_records(run), RolloutsConfig(**filters)))


def completions(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for record in records for one in record["completions"]]


def test_groups_are_chosen_by_where_they_come_from(lockstep_run: Path) -> None:
    everything = list(read_records(lockstep_run))
    assert matching_records(lockstep_run) == everything
    assert len(matching_records(lockstep_run, set="train")) == 16
    assert len(matching_records(lockstep_run, set="held_out")) == 60
    assert {record["iteration"] for record in matching_records(lockstep_run, set="held_out", iteration=4)} == {4}
    step_records = matching_records(lockstep_run, step=3)
    assert len(step_records) == 4 and all(record["optimizer_steps"] == [3] for record in step_records)
    one = everything[7]
    assert one in matching_records(lockstep_run, row=one["row"])
    same = matching_records(lockstep_run, prompt=one["prompt_id"][:6])
    assert one in same and {record["prompt_id"] for record in same} == {one["prompt_id"]}
    assert matching_records(lockstep_run, set="train", row=one["row"], step=99) == []


def test_completions_are_chosen_by_what_they_are(lockstep_run: Path) -> None:
    right, wrong = (matching_records(lockstep_run, outcome=outcome) for outcome in ("right", "wrong"))
    assert all(one["verdict"]["success"] == 1 for one in completions(right))
    assert all(one["verdict"]["success"] == 0 for one in completions(wrong))
    assert len(completions(right)) + len(completions(wrong)) == len(
        completions(matching_records(lockstep_run, outcome="scored"))
    )
    assert matching_records(lockstep_run, outcome="error") == []
    text = right[0]["completions"][0]["text"]
    found = matching_records(lockstep_run, contains=text, outcome="right")
    assert all(
        text in one["text"] or text in record["prompt_text"] for record in found for one in record["completions"]
    )
    assert right[0] in found or right[0]["completions"][0] in completions(found)


def test_a_completion_without_a_score_is_neither_right_nor_wrong() -> None:
    one = {"verdict": {"outcome": "error", "success": 0.0, "score": 0.0}, "text": ""}
    record = {"set": "", "optimizer_steps": [], "iteration": 1, "row": 0, "prompt_id": "a", "completions": [one]}
    for outcome, count in {"right": 0, "wrong": 0, "scored": 0, "error": 1}.items():
        assert len(list(matching_groups([record], RolloutsConfig(outcome=outcome)))) == count
    assert math.isnan(group_mean(record, "success")) and extreme_groups([record], 1, 1) == []
    unjudged_and_bad = record | {"completions": [one, {"verdict": {"outcome": "scored", "score": -2.0}}]}
    bad = record | {"completions": [{"verdict": {"outcome": "scored", "score": -1.5}}]}
    assert extreme_groups([record, bad, unjudged_and_bad], 1, 1) == [bad, unjudged_and_bad]


def test_the_best_and_the_worst(lockstep_run: Path) -> None:
    records = list(read_records(lockstep_run))
    falling, rising = (sorted(records, key=lambda one: sign * group_mean(one, "score")) for sign in (-1, 1))
    assert group_mean(falling[0], "score") > group_mean(rising[0], "score")
    assert extreme_groups(records, 3, 2) == falling[:3] + rising[:2]  # of equal groups the earlier
    assert extreme_groups(records, 3, 0) == falling[:3]


def test_prompts_that_flipped(lockstep_run: Path) -> None:
    def held_out() -> Iterator[dict[str, Any]]:
        return matching_groups(read_records(lockstep_run), RolloutsConfig(set="held_out"))

    first, last = (
        {r["prompt_id"]: group_mean(r, "success") >= 0.5 for r in held_out() if r["iteration"] == i} for i in (0, 4)
    )
    expected = {prompt for prompt in first if first[prompt] != last[prompt]}
    found = list(flipped_groups(held_out))
    assert expected and {record["prompt_id"] for record in found} == expected
    assert [record["iteration"] for record in found] == [0, 4] * len(expected)


def test_a_group_for_a_person() -> None:
    verdict = {"score": 0.25, "components": {"accuracy": 0.0, "brief": 0.25}, "outcome": "invalid"}
    one = {"sample": 0, "verdict": verdict, "advantage": -0.5, "chosen": True}
    one |= {"token_ids": [1, 2, 3], "finish_reason": "length", "text": "so long " * 200}
    one |= {"sequence_starts": [], "turns": [], "error": ""}
    record = {"kind": "train", "set": "", "iteration": 3, "optimizer_steps": [5, 6], "fate": "trained", "row": 12}
    record |= {"group_id": 77, "prompt_id": "0123456789abcdef", "answer": "42", "completions": [one]}
    record["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7 = ?"}]
    lines = format_group(record).splitlines()
    assert lines[:5] == [
        "training, iteration 3, step 5, 6: row 12, prompt 0123456789abcdef, group 77",
        "  6 * 7 = ?",
        "  answer: 42",
        "  #0 reward 0.25 (accuracy 0, brief 0.25), advantage -0.5, 3 tokens, length,",
        "     invalid",
    ]
    assert lines[-1] == "     ... 11 more lines"
    assert max(map(len, lines)) <= 80
    evaluated = format_group(record | {"kind": "eval", "set": "aime", "optimizer_steps": []})
    assert evaluated.startswith("aime after iteration 3: row 12") and "advantage" not in evaluated
    assert ", stale: row 12" in format_group(record | {"fate": "stale", "optimizer_steps": []})


def episode_records() -> list[dict[str, Any]]:
    """Returns the records of a trained group of episodes and of a plain group."""
    episodes = [tool_episode(), rewritten_episode(), failed_episode(), hostile_episode()]
    groups = [make_group(3, episodes), make_group(4, [make_completion(2, text="plain")])]
    option = orjson.OPT_SERIALIZE_NUMPY
    return [
        parse_record(orjson.dumps(group_to_record(group, GroupFate("trained", 1)), option=option)) for group in groups
    ]


def test_an_episode_is_a_chat() -> None:
    lines = format_group(episode_records()[0]).splitlines()
    first, second, third, fourth = (index for index, line in enumerate(lines) if line.startswith("  #"))
    assert lines[first:second] == [
        "  #0 reward 1 (accuracy 1), 9 tokens, stop",
        "     turn 1: reward 0.25, 4 tokens, engine 0.50 s, environment 0.12 s, 1",
        "     malformed call",
        "       reasoning: 12 * 7",
        "       I multiply.",
        "       mul(a=12, b=7) -> 84",
        '       lookup(query="84", deep={"limit": null}) -> nothing found (error)',
        "       tool: no JSON",
        "     turn 2: reward 0.75, 2 tokens, engine 0.25 s, environment 0.00 s",
        "       84",
    ]
    assert lines[second] == "  #1 reward 0 (accuracy 0), 6 tokens, deadline, 2 sequences"
    assert lines[third - 3 : third] == [
        "     new sequence: earlier messages were rewritten",
        "     turn 3: 1 tokens, engine 1.00 s, environment 3.00 s",
        "       (empty)",
    ]
    assert lines[fourth - 1] == "     error: Game.step raised KeyError: 'board'"
    assert max(map(len, lines)) <= 80
    "\n".join(lines).encode()  # without lone surrogates
    assert format_group(episode_records()[1]).splitlines()[-1] == "     plain"


def test_results_belong_to_the_call_with_their_id() -> None:
    (first, second), others = split_tool_calls(tool_episode().turns[0])
    assert (first.result, second.result) == ("84", "nothing\nfound")
    assert [message["content"] for message in others] == ["no JSON"]


def test_results_without_an_id_belong_to_the_calls_in_order() -> None:
    turn = tool_episode().turns[0]
    replies = ({"role": "tool", "content": "84"}, {"role": "user", "content": "go on"})
    (first, second), others = split_tool_calls(replace(turn, replies=replies))
    assert (first.result, second.result) == ("84", "") and others == [replies[1]]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_of_episodes_has_their_turns_and_errors(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"table.{ending}"
    assert write_completion_table(episode_records(), path) == 5
    if ending == "parquet":
        table = pyarrow.parquet.read_table(path).to_pylist()
    elif ending == "jsonl":
        table = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        table = list(csv.DictReader(path.open()))
    assert [int(row["turns"]) for row in table[:4]] == [2, 3, 1, 1]
    assert [int(row["sequences"]) for row in table[:4]] == [1, 2, 1, 1]
    assert [row["error"] for row in table[:3]] == ["", "", "Game.step raised KeyError: 'board'"]
    assert [row["finish_reason"] for row in table] == ["stop", "deadline", "error", "error", "stop"]
    assert table[4].get("turns") in (None, "")


def test_what_is_printed_is_limited(lockstep_run: Path) -> None:
    text = format_rollouts(lockstep_run, RolloutsConfig(set="train", limit=3))
    assert text.count("training, iteration") == 3
    assert text.endswith(
        "... and more than these 3 groups: set rollouts.limit=0 to print all, or rollouts.to=FILE.csv to write them"
    )
    assert format_rollouts(lockstep_run, RolloutsConfig(set="train", limit=0)).count("training, iteration") == 16


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_has_a_row_for_every_completion(lockstep_run: Path, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"table.{ending}"
    assert format_rollouts(lockstep_run, RolloutsConfig(to=str(path))) == f"304 completions in {path}"
    table: list[dict[str, Any]]
    if ending == "parquet":
        table = pyarrow.parquet.read_table(path).to_pylist()
    elif ending == "jsonl":
        table = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        table = list(csv.DictReader(path.open()))
    expected = [(record, one) for record in read_records(lockstep_run) for one in record["completions"]]
    assert len(table) == len(expected) == 304
    for row, (record, one) in zip(table, expected, strict=True):
        assert (row["prompt_id"], row["completion"]) == (record["prompt_id"], one["text"])
        assert float(row["score"]) == float(row["component/accuracy"]) == one["verdict"]["score"]
        assert int(row["tokens"]) == len(one["token_ids"])
        if record["kind"] == "train":
            assert float(row["advantage"]) == one["advantage"]
            assert int(row["optimizer_step"]) == record["optimizer_steps"][0]
        else:
            assert row["advantage"] in (None, "")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_that_does_not_fit_is_not_there(lockstep_run: Path, ending: str, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot be written \(File too large\)"):
            format_rollouts(lockstep_run, RolloutsConfig(to=str(tmp_path / f"table.{ending}")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_what_is_not_there_is_named(lockstep_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no group .* \(rollouts\.step=99, rollouts\.outcome=right\)"):
        format_rollouts(lockstep_run, RolloutsConfig(step=99, outcome="right"))
    with pytest.raises(ConfigError, match=r"rollouts\.to='\.xls': choose one of \.csv"):
        RolloutsConfig(to="a.xls")
    with pytest.raises(ConfigError, match=r"rollouts\.outcome='bad': choose one of right, wrong"):
        RolloutsConfig(outcome="bad")
    with pytest.raises(ConfigError, match="cannot be written"):
        format_rollouts(lockstep_run, RolloutsConfig(to=str(tmp_path / "nowhere" / "a.csv")))
    bare = shutil.copytree(lockstep_run, tmp_path / "bare", ignore=shutil.ignore_patterns("rollouts"))
    with pytest.raises(ConfigError, match=r"the folder has no rollouts/"):
        format_rollouts(bare, RolloutsConfig())


def test_on_the_command_line(lockstep_run: Path, tmp_path: Path) -> None:
    folder = f"hydra.run.dir={tmp_path / 'new'}"
    printed = call_script("grpo.py", "run=rollouts", f"run_dir={lockstep_run}", "rollouts.step=3", folder)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.rstrip("\n") == format_rollouts(lockstep_run, RolloutsConfig(step=3))
    removed = call_script("grpo.py", "run=diff", f"a={lockstep_run}", f"b={lockstep_run}", folder)
    assert removed.returncode == 2 and "run=report run_dir=A,B" in removed.stderr
    wrong = call_script("grpo.py", "run=rollouts", f"run_dir={tmp_path}", folder)
    assert wrong.returncode == 2 and "not the folder of a run" in wrong.stderr
    assert not (tmp_path / "new").exists()
