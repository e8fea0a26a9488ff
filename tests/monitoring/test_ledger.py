"""Tests of the ledger: exact groups, complete lines, size limit, killed processes."""

import errno
import json
import os
import random
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from envs.group import Group
from tests.episodes import failed_episode, hostile_episode, rewritten_episode, tool_episode
from tests.groups import make_completion, make_group, random_group
from torchgrpo.batches.batch import collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.ledger import Ledger
from torchgrpo.monitoring.ledger_record import GroupFate, group_from_record, group_to_record, prompt_id, token_values
from torchgrpo.monitoring.ledger_storage import ledger_files, parse_record, read_records

GIB = 1 << 30
FAIL_ON_WARNING: Any = pytest.fail


def random_groups(count: int, first: int = 0, repeats: int = 3, num_replaced: int = 0) -> list[Group]:
    generator = random.Random(first)
    return [
        random_group(generator, first + index, repeats, candidates=1, num_replaced=num_replaced)
        for index in range(count)
    ]


def ledger_record(group: Group, fate: GroupFate) -> dict[str, Any]:
    return parse_record(orjson.dumps(group_to_record(group, fate), option=orjson.OPT_SERIALIZE_NUMPY))


def test_group_is_restored_exactly() -> None:
    for group in random_groups(50):
        for index, one in enumerate(group.candidates):
            one.engine = f"engine {index % 2} (CPU)"
        group.teacher_prompt = group.prompt[:2] if group.group_id % 2 else ()
        restored = group_from_record(ledger_record(group, GroupFate("trained", 3)))
        assert [one.engine for one in restored.candidates] == [one.engine for one in group.candidates]
        assert restored == replace(group, replaces=None)
        assert collate([restored]).to_dict().keys() == collate([group]).to_dict().keys()


def episode_group(number: int) -> Group:
    """Returns a group of episodes, and a plain completion where the number is odd."""
    episodes = [tool_episode(), rewritten_episode(), hostile_episode()]
    return make_group(number, [*episodes, make_completion(2, 1.0) if number % 2 else failed_episode()])


def test_episodes_are_restored_exactly() -> None:
    """Restores turns, calls, sequences, errors, and the messages in the reward's input."""
    for number in range(2):
        group = episode_group(number)
        restored = group_from_record(ledger_record(group, GroupFate("trained", 3)))
        hostile = replace(group.completions[2], error=group.completions[2].error.replace("\udc80", "\\udc80"))
        expected = [*group.completions[:2], hostile, group.completions[3]]
        assert restored.completions == expected
        arguments = restored.completions[2].turns[0].message["tool_calls"][0]["function"]["arguments"]
        assert "\ud800" in arguments.values() and arguments["number"] == 10**30
        batch, other = collate([restored]), collate([group])
        assert batch.episode is not None and batch.episode[:, 0].tolist() == [0, 1, 1, 2, 3]
        assert (batch.to_tensordict() == other.to_tensordict()).all()


def test_lines_of_an_earlier_version_are_read() -> None:
    """Removes the fields of episodes, which an earlier version did not write."""
    (group,) = random_groups(1)
    record = orjson.loads(orjson.dumps(group_to_record(group, GroupFate("trained", 3))))
    for one in record["completions"]:
        for name in ("sequence_starts", "turns", "error"):
            del one[name]
        del one["reward_input"]["turns"]
    assert group_from_record(parse_record(orjson.dumps(record))) == group


def test_values_of_several_sequences_follow_each_other() -> None:
    """Joins the rows of a completion to one list of token values."""
    group = make_group(1, [make_completion(3), rewritten_episode()])
    rollout = Rollout.from_groups([group])
    rollout.batch.mask = rollout.batch.tokens.loss_mask.clone()
    rollout.batch.mask[0] = False
    numbers = torch.arange(15.0).reshape(3, 5)
    (values,) = token_values(rollout, numbers, -numbers, numbers + 0.5)
    assert values.advantage == [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]]
    assert values.log_ratio.tolist() == [-each for row in values.advantage for each in row]
    assert values.in_loss == [False, True]
    (values,) = token_values(rollout, torch.tensor([[0.25], [0.5], [0.5]]), -numbers, numbers)
    assert values.advantage == [0.25, 0.5]


def test_prompt_ids_are_equal_for_equal_messages() -> None:
    user, other = {"role": "user", "content": "1+1="}, {"role": "user", "content": "1+1"}
    assert prompt_id([user]) == prompt_id([dict(user)])
    assert len({prompt_id([user]), prompt_id([other]), prompt_id([user, user]), prompt_id([])}) == 4


def test_token_values_are_recorded(tmp_path: Path) -> None:
    group = make_group(5, [make_completion(2, 1.0), make_completion(3, 0.0)])
    advantage = torch.tensor([[0.5], [-0.5]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    ratio = torch.tensor([[0.25, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rollout = Rollout.from_groups([group])
    rollout.batch.mask = mask
    (values,) = token_values(rollout, advantage, ratio, ratio + mask)
    ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
    ledger.record_training(group, 7, values, trained_at=4)
    ledger.record_training(group, 8, values, trained_at=4)
    ledger.write_iteration(2, [group])
    ledger.close()
    (record,) = read_records(tmp_path)
    assert (record["fate"], record["iteration"], record["optimizer_steps"]) == ("trained", 2, [7, 8])
    assert record["trained_at"] == 4
    first, second = record["completions"]
    assert (first["advantage"], first["in_loss"], first["log_ratio"]) == (0.5, True, [0.25, 0.0])
    assert first["entropy"] == [1.25, 1.0]
    assert (second["in_loss"], len(second["log_ratio"])) == (False, 3)


def test_token_values_of_a_batch_are_split_by_group() -> None:
    """Splits token advantages of unequal lengths; an unselected candidate has no values."""
    first = make_group(1, [make_completion(3), make_completion(1)], unselected_candidates=[make_completion(2)])
    second = make_group(2, [make_completion(2), make_completion(4)])
    numbers = torch.arange(16.0).reshape(4, 4)
    rollout = Rollout.from_groups([first, second])
    rollout.batch.mask = rollout.batch.tokens.loss_mask
    values = token_values(rollout, numbers, -numbers, numbers + 0.5)
    lines = [
        ledger_record(group, GroupFate("trained", 1, token_values=each))
        for group, each in zip((first, second), values, strict=True)
    ]
    rows = [one for line in lines for one in line["completions"]]
    assert [one["chosen"] for one in rows] == [True, True, False, True, True]
    assert [one["sample"] for one in rows] == [0, 1, 2, 0, 1]
    expected = [[0.0, 1.0, 2.0], [4.0], [], [8.0, 9.0], [12.0, 13.0, 14.0, 15.0]]
    assert [one["advantage"] or [] for one in rows] == expected
    assert [one["log_ratio"] for one in rows] == [[-each for each in row] for row in expected]
    assert [one["entropy"] for one in rows] == [[each + 0.5 for each in row] for row in expected]


def test_replaced_and_stale_groups_are_recorded_with_their_fate(tmp_path: Path) -> None:
    trained, stale = random_groups(2, num_replaced=2), random_groups(1, first=50)
    ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
    ledger.write_iteration(1, trained, stale)
    ledger.close()
    fates = [record["fate"] for record in read_records(tmp_path)]
    assert fates == ["trained"] * 2 + ["replaced"] * 4 + ["stale"]
    records = {record["group_id"]: record for record in read_records(tmp_path)}
    assert all(records[group.group_id]["replaces"] in records for group in trained)
    assert [one["chosen"] for one in records[0]["completions"]] == [True] * 3 + [False]


def test_incomplete_evaluation_leaves_no_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
    with ledger.evaluation_writer("held", 4) as write_group:
        for group in random_groups(3):
            write_group(group)
    with pytest.raises(IndexError), ledger.evaluation_writer("held", 8) as write_group:  # noqa: PT012
        write_group(random_groups(1)[0])
        write_group(random_groups(1)[1])
    ledger.close()
    assert [file.path.name for file in ledger_files(tmp_path)] == ["eval_held_000004.jsonl.zst"]
    assert {record["set"] for record in read_records(tmp_path, "eval")} == {"held"}
    assert not list(read_records(tmp_path, "train"))


def test_files_are_rotated_and_the_oldest_are_removed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 60_000, FAIL_ON_WARNING)
    with ledger.evaluation_writer("held", 0) as write_group:
        write_group(random_groups(1)[0])
    for iteration in range(1, 41):
        ledger.write_iteration(iteration, random_groups(6, first=10 * iteration))
    ledger.close()
    files = ledger_files(tmp_path)
    assert sum(file.path.stat().st_size for file in files) <= 60_000
    assert len(files) > 5
    assert files[0].eval_set == "held", "evaluations are removed last"
    iterations = [record["iteration"] for record in read_records(tmp_path, "train")]
    assert iterations == sorted(iterations) and iterations[-1] == 40 and iterations[0] > 1


def test_resumed_run_continues_after_its_checkpoint(tmp_path: Path) -> None:
    for start, stop, resume_iteration in ((1, 6, -1), (5, 9, 4)):
        ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
        ledger.truncate_after(resume_iteration)
        for iteration in range(start, stop):
            ledger.write_iteration(iteration, random_groups(2, first=10 * iteration))
        if start == 1:
            with ledger.evaluation_writer("held", 5) as write_group:
                write_group(random_groups(1)[0])
        ledger.close()
    assert [record["iteration"] for record in read_records(tmp_path)] == [
        number for number in range(1, 9) for _ in range(2)
    ]


def write_endlessly(run_dir: Path, ready: Any) -> None:
    ledger = Ledger(run_dir, GIB, print)
    for iteration in range(1, 1_000_000):
        ledger.write_iteration(iteration, random_groups(4, first=iteration))
        if iteration == 5:
            ready.set()


def test_killed_run_leaves_complete_lines(tmp_path: Path) -> None:
    for attempt in range(5):
        context, run_dir = get_context("fork"), tmp_path / str(attempt)
        run_dir.mkdir()
        ready = context.Event()
        process = context.Process(target=write_endlessly, args=(run_dir, ready))
        process.start()
        assert ready.wait(600)
        time.sleep(0.003 * attempt)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        iterations = [record["iteration"] for record in read_records(run_dir)]
        assert iterations == sorted(iterations) and len(iterations) >= 20
        resumed_ledger = Ledger(run_dir, GIB, FAIL_ON_WARNING)
        resumed_ledger.truncate_after(3)
        resumed_ledger.write_iteration(4, random_groups(1))
        resumed_ledger.close()
        assert [record["iteration"] for record in read_records(run_dir)] == [1] * 4 + [2] * 4 + [3] * 4 + [4]


def test_resumed_run_continues_without_a_writable_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
    ledger.write_iteration(1, random_groups(1))

    def raise_disk_full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torchgrpo.monitoring.ledger.close_file", raise_disk_full)
    warnings: list[str] = []
    resumed_ledger = Ledger(tmp_path, GIB, warnings.append)
    resumed_ledger.truncate_after(1)
    resumed_ledger.write_iteration(2, random_groups(1))
    assert len(warnings) == 1 and "cannot be written (No space left on device); the run continues" in warnings[0]


def write_until_full(run_dir: Path, warnings: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ledger = Ledger(run_dir, GIB, warnings.put)
    for iteration in range(1, 60):
        ledger.write_iteration(iteration, random_groups(4, first=iteration))
    ledger.close()


def test_run_continues_without_disk_space(tmp_path: Path) -> None:
    context = get_context("fork")
    warnings = context.Queue()
    process = context.Process(target=write_until_full, args=(tmp_path, warnings))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    assert "cannot be written (File too large); the run continues without the ledger" in warnings.get(timeout=600)
    assert warnings.empty(), "one warning only"
    counts: dict[int, int] = {}
    for record in read_records(tmp_path):
        counts[record["iteration"]] = counts.get(record["iteration"], 0) + 1
    assert counts and set(counts.values()) == {4}, "an iteration is written completely or not at all"


def test_ledger_without_room_writes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, FAIL_ON_WARNING)
    ledger.write_iteration(1, random_groups(2))
    with ledger.evaluation_writer("held", 1) as write_group:
        write_group(random_groups(1)[0])
    ledger.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", ["\ud800", 10**100, {"a": {1, 2}}, {1: "a"}, [object()]])
def test_answer_may_have_any_type(tmp_path: Path, answer: Any) -> None:
    (group,) = random_groups(1)
    group.example = replace(group.example, answer=answer)
    ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
    ledger.write_iteration(1, [group])
    ledger.close()
    (record,) = read_records(tmp_path)
    assert record["group_id"] == group.group_id


def test_arrow_reads_a_file_with_and_without_episodes(tmp_path: Path) -> None:
    """Reads in small blocks, in which plain groups come before episodes.

    Arrow infers the types of each block alone.
    """
    import pyarrow.json

    groups = [*random_groups(30), *(episode_group(number) for number in range(100, 104)), *random_groups(5, first=200)]
    ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
    ledger.write_iteration(1, groups)
    (file,) = ledger_files(tmp_path)
    lines = file.path.read_bytes()
    longest = max(map(len, lines.splitlines())) + 1
    ledger.close()
    assert len(lines) > 5 * longest
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=longest)
    table = pyarrow.json.read_json(pyarrow.BufferReader(lines), options).to_pylist()
    assert [row["group_id"] for row in table] == [group.group_id for group in groups]
    for row, group in zip(table, groups, strict=True):
        turns = [[json.loads(turn)["message"] for turn in one["turns"]] for one in row["completions"]]
        assert turns == [[turn.message for turn in one.turns] for one in group.candidates]


def test_pandas_reads_a_file(tmp_path: Path) -> None:
    import pandas as pd

    ledger = Ledger(tmp_path, GIB, FAIL_ON_WARNING)
    groups: Sequence[Group] = random_groups(5, num_replaced=1)
    ledger.write_iteration(1, groups)
    ledger.close()
    (file,) = ledger_files(tmp_path)
    frame = pd.read_json(file.path, lines=True)
    assert list(frame["group_id"][:5]) == [group.group_id for group in groups]
    assert len(frame) == 10
