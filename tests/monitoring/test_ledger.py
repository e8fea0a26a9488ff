"""The ledger holds every group to the bit, in whole lines, within its bounds, whatever ends the process."""

import errno
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
from tests.groups import make_completion, make_group, random_group
from torchgrpo.batches.batch import collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.ledger import Ledger
from torchgrpo.monitoring.ledger_line import Fate, group_of, prompt_id, record_of, token_values
from torchgrpo.monitoring.ledger_storage import ledger_files, parsed, read_records

GIB = 1 << 30
QUIET: Any = pytest.fail


def groups_of(count: int, first: int = 0, repeats: int = 3, chain: int = 0) -> list[Group]:
    chance = random.Random(first)
    return [random_group(chance, first + index, repeats, candidates=1, chain=chain) for index in range(count)]


def as_line(group: Group, fate: Fate) -> dict[str, Any]:
    return parsed(orjson.dumps(record_of(group, fate), option=orjson.OPT_SERIALIZE_NUMPY))


def test_a_group_comes_back_to_the_bit() -> None:
    for group in groups_of(50):
        for place, one in enumerate(group.candidates):
            one.engine = f"engine {place % 2} (CPU)"
        group.teacher_prompt = group.prompt[:2] if group.group_id % 2 else ()
        again = group_of(as_line(group, Fate("trained", 3)))
        assert [one.engine for one in again.candidates] == [one.engine for one in group.candidates]
        assert again == replace(group, in_place_of=None)
        assert collate([again]).to_dict().keys() == collate([group]).to_dict().keys()


def test_prompts_are_one_where_their_messages_are() -> None:
    user, other = {"role": "user", "content": "1+1="}, {"role": "user", "content": "1+1"}
    assert prompt_id([user]) == prompt_id([dict(user)])
    assert len({prompt_id([user]), prompt_id([other]), prompt_id([user, user]), prompt_id([])}) == 4


def test_what_the_learner_said_stands_beside_each_token(tmp_path: Path) -> None:
    group = make_group(5, [make_completion(2, 1.0), make_completion(3, 0.0)])
    advantage = torch.tensor([[0.5], [-0.5]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    ratio = torch.tensor([[0.25, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rollout = Rollout.of([group])
    rollout.batch.mask = mask
    (values,) = token_values(rollout, advantage, ratio, ratio + mask)
    ledger = Ledger(tmp_path, GIB, QUIET)
    ledger.learned(group, 7, values, trained_at=4)
    ledger.learned(group, 8, values, trained_at=4)
    ledger.consumed(2, [group])
    ledger.close()
    (record,) = read_records(tmp_path)
    assert (record["fate"], record["iteration"], record["optimizer_steps"]) == ("trained", 2, [7, 8])
    assert record["trained_at"] == 4
    first, second = record["completions"]
    assert (first["advantage"], first["in_loss"], first["log_ratio"]) == (0.5, True, [0.25, 0.0])
    assert first["entropy"] == [1.25, 1.0]
    assert (second["in_loss"], len(second["log_ratio"])) == (False, 3)


def test_what_the_learner_said_of_a_batch_goes_to_its_groups() -> None:
    """Of unequal lengths, with an advantage a token; a candidate that was left out has none."""
    first = make_group(1, [make_completion(3), make_completion(1)], left_out=[make_completion(2)])
    second = make_group(2, [make_completion(2), make_completion(4)])
    numbers = torch.arange(16.0).reshape(4, 4)
    rollout = Rollout.of([first, second])
    rollout.batch.mask = rollout.batch.tokens.loss_mask
    values = token_values(rollout, numbers, -numbers, numbers + 0.5)
    lines = [
        as_line(group, Fate("trained", 1, tokens=each))
        for group, each in zip((first, second), values, strict=True)
    ]
    rows = [one for line in lines for one in line["completions"]]
    assert [one["chosen"] for one in rows] == [True, True, False, True, True]
    assert [one["sample"] for one in rows] == [0, 1, 2, 0, 1]
    expected = [[0.0, 1.0, 2.0], [4.0], [], [8.0, 9.0], [12.0, 13.0, 14.0, 15.0]]
    assert [one["advantage"] or [] for one in rows] == expected
    assert [one["log_ratio"] for one in rows] == [[-each for each in row] for row in expected]
    assert [one["entropy"] for one in rows] == [[each + 0.5 for each in row] for row in expected]


def test_replaced_and_stale_groups_are_there_with_their_fate(tmp_path: Path) -> None:
    trained, stale = groups_of(2, chain=2), groups_of(1, first=50)
    ledger = Ledger(tmp_path, GIB, QUIET)
    ledger.consumed(1, trained, stale)
    ledger.close()
    fates = [record["fate"] for record in read_records(tmp_path)]
    assert fates == ["trained"] * 2 + ["replaced"] * 4 + ["stale"]
    records = {record["group_id"]: record for record in read_records(tmp_path)}
    assert all(records[group.group_id]["in_place_of"] in records for group in trained)
    assert [one["chosen"] for one in records[0]["completions"]] == [True] * 3 + [False]


def test_an_evaluation_is_a_file_only_when_it_is_whole(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, GIB, QUIET)
    with ledger.evaluation("held", 4) as take:
        for group in groups_of(3):
            take(group)
    with pytest.raises(IndexError), ledger.evaluation("held", 8) as take:  # noqa: PT012
        take(groups_of(1)[0])
        take(groups_of(1)[1])
    ledger.close()
    assert [file.path.name for file in ledger_files(tmp_path)] == ["eval_held_000004.jsonl.zst"]
    assert {record["set"] for record in read_records(tmp_path, "eval")} == {"held"}
    assert not list(read_records(tmp_path, "train"))


def test_files_are_rotated_and_the_oldest_go(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 60_000, QUIET)
    with ledger.evaluation("held", 0) as take:
        take(groups_of(1)[0])
    for iteration in range(1, 41):
        ledger.consumed(iteration, groups_of(6, first=10 * iteration))
    ledger.close()
    files = ledger_files(tmp_path)
    assert sum(file.path.stat().st_size for file in files) <= 60_000
    assert len(files) > 5
    assert files[0].evaluated == "held", "evaluations go last"
    kept = [record["iteration"] for record in read_records(tmp_path, "train")]
    assert kept == sorted(kept) and kept[-1] == 40 and kept[0] > 1


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    for start, until, resumed in ((1, 6, -1), (5, 9, 4)):
        ledger = Ledger(tmp_path, GIB, QUIET)
        ledger.begin(resumed)
        for iteration in range(start, until):
            ledger.consumed(iteration, groups_of(2, first=10 * iteration))
        if start == 1:
            with ledger.evaluation("held", 5) as take:
                take(groups_of(1)[0])
        ledger.close()
    assert [record["iteration"] for record in read_records(tmp_path)] == [
        number for number in range(1, 9) for _ in range(2)
    ]


def write_for_ever(run_dir: Path, ready: Any) -> None:
    ledger = Ledger(run_dir, GIB, print)
    for iteration in range(1, 1_000_000):
        ledger.consumed(iteration, groups_of(4, first=iteration))
        if iteration == 5:
            ready.set()


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    for attempt in range(5):
        context, run_dir = get_context("fork"), tmp_path / str(attempt)
        run_dir.mkdir()
        ready = context.Event()
        process = context.Process(target=write_for_ever, args=(run_dir, ready))
        process.start()
        assert ready.wait(600)
        time.sleep(0.003 * attempt)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        written = [record["iteration"] for record in read_records(run_dir)]
        assert written == sorted(written) and len(written) >= 20
        again = Ledger(run_dir, GIB, QUIET)
        again.begin(3)
        again.consumed(4, groups_of(1))
        again.close()
        assert [record["iteration"] for record in read_records(run_dir)] == [1] * 4 + [2] * 4 + [3] * 4 + [4]


def test_a_resumed_run_goes_on_without_a_ledger_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path, GIB, QUIET)
    ledger.consumed(1, groups_of(1))

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torchgrpo.monitoring.ledger.close_file", full)
    said: list[str] = []
    again = Ledger(tmp_path, GIB, said.append)
    again.begin(1)
    again.consumed(2, groups_of(1))
    assert len(said) == 1 and "cannot be written (No space left on device); the run goes on" in said[0]


def write_until_full(run_dir: Path, said: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ledger = Ledger(run_dir, GIB, said.put)
    for iteration in range(1, 60):
        ledger.consumed(iteration, groups_of(4, first=iteration))
    ledger.close()


def test_without_room_the_run_goes_on(tmp_path: Path) -> None:
    context = get_context("fork")
    said = context.Queue()
    process = context.Process(target=write_until_full, args=(tmp_path, said))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    assert "cannot be written (File too large); the run goes on without it" in said.get(timeout=600)
    assert said.empty(), "once"
    counts: dict[int, int] = {}
    for record in read_records(tmp_path):
        counts[record["iteration"]] = counts.get(record["iteration"], 0) + 1
    assert counts and set(counts.values()) == {4}, "all of an iteration or nothing"


def test_none_is_kept_where_none_is_wanted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, QUIET)
    ledger.consumed(1, groups_of(2))
    with ledger.evaluation("held", 1) as take:
        take(groups_of(1)[0])
    ledger.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", ["\ud800", 10**100, {"a": {1, 2}}, {1: "a"}, [object()]])
def test_an_answer_may_be_anything(tmp_path: Path, answer: Any) -> None:
    (group,) = groups_of(1)
    group.example = replace(group.example, answer=answer)
    ledger = Ledger(tmp_path, GIB, QUIET)
    ledger.consumed(1, [group])
    ledger.close()
    (record,) = read_records(tmp_path)
    assert record["group_id"] == group.group_id


def test_pandas_opens_it(tmp_path: Path) -> None:
    import pandas as pd

    ledger = Ledger(tmp_path, GIB, QUIET)
    groups: Sequence[Group] = groups_of(5, chain=1)
    ledger.consumed(1, groups)
    ledger.close()
    (file,) = ledger_files(tmp_path)
    frame = pd.read_json(file.path, lines=True)
    assert list(frame["group_id"][:5]) == [group.group_id for group in groups]
    assert len(frame) == 10
