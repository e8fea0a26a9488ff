"""The parts of `benchmarks/peer_trl.py` that need no TRL: what is compared, in which words, and our own side of it."""

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from subprocess import Popen

import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks.peer_trl import (
    OWN_SIDE,
    Side,
    _made,
    make_rows,
    never_ending,
    per_token_line,
    ratio_line,
    side_line,
)
from benchmarks.peer_work import W1, W3, WORKLOADS, Job, right_number, share_of_even
from envs.control_tokens import turn_end
from training.model_loading import saved_eos_token_ids

QUICKSTART = Path(__file__).resolve().parent.parent / "models" / "quickstart"


def side(name: str, seconds: list[float], tokens: int = 1, cpu: float = 1.0, **said: float) -> Side:
    process = Popen([sys.executable, "-c", ""])
    process.wait()
    reports = [{"tokens": tokens, "prompt_tokens": 2, "reward": 0.5, "cpu": cpu, **said} for _ in seconds]
    return Side(name, process, StringIO(), Path(), seconds, reports)


def test_each_workload_is_whole_microbatches_and_whole_groups() -> None:
    for name, work in WORKLOADS.items():
        assert name == work.name
        assert work.completions == work.prompts * work.repeats
        assert work.completions % work.microbatch == 0
    assert replace(WORKLOADS["w3-dense"], name=W3.name, reward=W3.reward) == W3


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(W1, "model", "rows.jsonl", 3, 2, options=("beta=0.1",))
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("it is 1,200.", "1200", 1.0),
        ("12 and then 7", "7", 1.0),
        ("-3.0", "-3", 1.0),
        ("7 and then 12", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_the_last_number_is_right_or_wrong(text: str, answer: str, reward: float) -> None:
    assert right_number(text, answer) == reward


def test_the_dense_reward_tells_texts_apart() -> None:
    assert share_of_even("", "7") == 0.0
    assert share_of_even("abcd", "7") == 0.5  # b and d: 98 and 100


def test_a_model_that_never_ends_reads_the_same_prompts(tmp_path: Path) -> None:
    folder = never_ending(QUICKSTART, tmp_path / "model")
    chat = [{"role": "user", "content": "1+2="}]
    before, after = (AutoTokenizer.from_pretrained(place) for place in (QUICKSTART, folder))
    ids = [one.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for one in (before, after)]
    assert ids[0] == ids[1]
    end = AutoConfig.from_pretrained(folder).eos_token_id
    assert end >= AutoConfig.from_pretrained(folder).vocab_size
    assert saved_eos_token_ids(str(folder), after) == [end] == [turn_end(after)]


def test_ratios_are_of_medians_and_pair_by_pair() -> None:
    own, other = side("ours, x", [1.0, 2.0, 9.0], 10), side("TRL", [2.0, 8.0, 3.0], 40, cpu=4.0)
    assert ratio_line(own, other) == (
        "  ratio ours, x / TRL: 0.667 of medians, pairwise 0.500 [0.250, 3.000]; of CPU 0.250 [0.250, 0.250]"
    )
    assert per_token_line(own, other) == "  ratio of ms a token: 400.00 / 108.33 = 3.692"


def test_a_side_tells_its_stages() -> None:
    said = side_line(side("TRL", [1.0, 3.0], generate=0.25, score=0.5, step=0.75), 1.5)
    assert "2.000 [1.000, 3.000] s   1 tokens after 2 of prompts, reward 0.500, peak 1.50 GiB" in said
    assert "generate 0.250, score 0.500, step 0.750; 1.000 s of CPU" in said


def test_an_installation_that_fails_names_folder_command_and_remedy(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "raise SystemExit('no such package')"]
    with pytest.raises(SystemExit) as raised:
        _made(tmp_path, failing, failing)
    for said in (str(tmp_path), "no such package", "--environment"):
        assert said in str(raised.value)
    _made(tmp_path, failing, [sys.executable, "-c", ""])


def test_a_side_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "side.py"
    script.write_text("raise RuntimeError('out of memory')")
    job = Job(W1, str(QUICKSTART), "rows.jsonl", 1, 1)
    with pytest.raises(SystemExit, match=r"(?s)ours has ended early.*out of memory"):
        Side.start("ours", Path(sys.executable), script, job, tmp_path)


def test_our_side_does_an_iteration_of_the_prompts_that_trl_gets(tmp_path: Path) -> None:
    model = never_ending(QUICKSTART, tmp_path / "model")
    work = replace(W1, prompts=3, repeats=2, microbatch=3, max_tokens=5)
    rows, drawn = make_rows(work, 2 * work.prompts, None, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [
        len(
            tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True)[
                "input_ids"
            ]
        )
        for line in drawn.read_text().splitlines()
    ]
    assert sorted(drawn.read_text().splitlines()) == sorted(rows.read_text().splitlines())
    job = Job(work, str(model), str(rows), rounds=2, threads=1)
    ours = Side.start("ours", Path(sys.executable), OWN_SIDE, job, tmp_path)
    for _ in range(2):
        ours.iterate()
    assert [said["tokens"] for said in ours.said] == [30, 30]
    assert [said["prompt_tokens"] for said in ours.said] == [2 * sum(lengths[:3]), 2 * sum(lengths[3:])]
    for said, seconds in zip(ours.said, ours.seconds, strict=True):
        assert 0 < said["reward"] < 1
        assert said["cpu"] > 0
        assert said["collect"] + said["optimize"] + said["push"] < seconds
    assert 0.1 < ours.peak_gib() < 10
    ours.end()
    assert ours.process.returncode == 0
