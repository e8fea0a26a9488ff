"""Runs with hostile or clumsy agents: a trick harms no other episode."""

import json
import os
import re
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import grpo
from envs.agents.fork_server import can_use_namespaces
from tests import hostile_agents, hostile_functions
from tests.script_runner import ROOT, SCHEDULE_CLASSES, compose_run_config, read_metrics
from torchgrpo.monitoring.completion_record import parse_sequence_starts, parse_turns
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.run.job import run_job

ANSWER = "47110815004711"
REPEATS = 2
ASSISTANT, END = 5, 2
"""Token ids of the model `quickstart_tools`."""
SETTINGS = (
    *("model.name=torchgrpo/models/quickstart_tools", "env.dataset=jsonl", "env.max_prompt_tokens=120"),
    *("inference_model.max_tokens=160", "env.turn_tokens=4", "env.max_error_rate=1", "optimizer.lr=0"),
    *(f"env.repeats={REPEATS}", "env.agent_columns=[trick]", "env.episode_timeout_s=3600", "env.max_steps=64"),
)
namespaces = pytest.mark.skipif(not can_use_namespaces(), reason="needs namespaces")
Completion = dict[str, Any]


def play_tricks(folder: Path, agent: str, tricks: Sequence[str], *overrides: str) -> dict[str, list[Completion]]:
    """Trains one step with a group for each trick; returns the completions.

    Checks that no process and no file is left.
    """
    mark, data, temporary = uuid.uuid4().hex, folder / "tricks.jsonl", folder / "tmp"
    rows = [{"prompt": "1+1=", "answer": ANSWER, "trick": trick} for trick in tricks]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.mkdir()
    variables = {"FOLDER": folder, "MARK": mark, "REVERSED": ANSWER[::-1]}
    config = compose_run_config(
        *SETTINGS,
        *(f"env.agent_env.{name}='{value}'" for name, value in variables.items()),
        f"env.agent={json.dumps(agent, ensure_ascii=False)}",
        f"env.data_files={data}",
        f"env.num_envs={len(tricks)}",
        f"train.total_dialog_turns={REPEATS * len(tricks)}",
        *overrides,
    )
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(temporary)
    try:
        run_job(config, folder / "run", grpo.train, SCHEDULE_CLASSES[grpo])
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    left = [one for one in psutil.process_iter() if mark in str(environ_of(one))]
    assert left == [] and [one.name for one in temporary.iterdir() if one.name.startswith("grpo_agents")] == []
    assert not list(ROOT.glob("core*"))
    records = list(read_records(folder / "run", "train"))
    found = {tricks[record["row"]]: record["completions"] for record in records}
    assert found.keys() == set(tricks)
    return found


def environ_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def read_reports(folder: Path, trick: str) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"{trick}.*.json"))
    return [json.loads(file.read_text()) for file in files]


ENDS: dict[str, tuple[str, str, str]] = {
    "kill_group": ("error", "error", "killed by SIGKILL"),
    "stop": ("deadline", "invalid", ""),
    "core": ("error", "error", "killed by SIGABRT"),
    "bomb": ("error", "error", "it started more than 256 processes"),
    "flood": ("error", "error", "it wrote more than 16 MiB of output"),
    "exit_1": ("error", "error", "exit code 1"),
    "silent": ("error", "error", "the agent ended without a request for a turn"),
    "nan": ("error", "error", "reward=nan must be a finite number"),
    "infinity": ("error", "error", "reward=inf must be a finite number"),
    "huge": ("error", "error", r"reward=1e\+308 must be a finite number"),
    "bool": ("error", "error", "reward=True must be a finite number"),
    "nested": ("error", "error", "must be a finite number"),
    "reserved": ("error", "error", "reward/mean is another metric"),
    "turns": ("turns", "scored", ""),
    "many": ("turns", "scored", ""),
    "tools": ("stop", "scored", ""),
}
"""Trick -> finish reason, outcome and error; the others end with stop and a score."""
SCORES = {"good": 1.0, "http": 0.5, "outlive": 0.25, "kill": 0.75, "posts": 0.125, "two_lines": 0.5}
"""Rewards that agents report; the task gives the others 0, since the model never knows the answer."""
REPORT_CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "secrets": lambda report: report["answer"] == [] and report["keys"] == [] and report["status"] == 200,
    "keys": lambda report: report == {"guesses": [401] * 10, "closed": [410, 410], "own": 200},
    "http": lambda report: (
        report["traversal"] == [404] * 4
        and (report["headers"], report["length"], report["status"]) == (400, 413, 200)
        and report["chunks"] in (0, 413)
    ),
    "posts": lambda report: set(report["refused"]) == {400} and report["taken"] == 200,
    "turns": lambda report: report["turns"] == 64 and report["last"] == 429 and "env.max_steps" in report["message"],
    "many": lambda report: (report["status"], report["choices"], report["more"]) == (200, 40, 429),
    "megabytes": lambda report: report == {"large": 400, "status": 200},
    "control": lambda report: report["status"] == 200,
    "forged": lambda report: report["codes"] == [200] * 3,
    "messages": lambda report: (
        report["empty"] == [400] * 3 and set(report["odd"]) <= {200, 400} and report["big"] in (200, 400)
    ),
    "tools": lambda report: (
        (report["recursive"], report["wrong"]) == (200, 400)
        and report["large"] in (400, 429)
        and report["changing"] == [200] * 3
    ),
    "stops": lambda report: report["stops"] == [400] * 5 + [200] * 6,
    "at_once": lambda report: report["same"] == report["others"] == [200] * 8,
}


@namespaces
@pytest.mark.long
def test_hostile_programs(tmp_path: Path) -> None:
    program, stopped = tmp_path / "ein Ägent mit Leerzeichen.py", tmp_path / "stopped"
    shutil.copy(hostile_agents.__file__, program)
    agent = shlex.join([sys.executable, str(program)])
    found = play_tricks(tmp_path, agent, [trick for trick in hostile_agents.TRICKS if trick != "stop"])
    stopped.mkdir()  # a run of its own, since only this trick is to reach the deadline; "differs" gives it a gradient
    found["stop"] = play_tricks(stopped, agent, ["stop", "differs"], "env.episode_timeout_s=60")["stop"]
    assert found.keys() == set(hostile_agents.TRICKS)
    problems = []
    for trick, completions in found.items():
        expected = ENDS.get(trick, ("stop", "scored", ""))
        for one in completions:
            end = one["finish_reason"], one["verdict"]["outcome"], one["error"]
            if end[:2] != expected[:2] or not re.search(expected[2], end[2]) or bool(end[2]) != bool(expected[2]):
                problems.append(f"{trick}: {end}")
            elif trick != "differs" and one["verdict"]["score"] != SCORES.get(trick, 0.0):
                problems.append(f"{trick}: score {one['verdict']['score']}")
            check_tokens(one)
        reports = read_reports(stopped if trick == "stop" else tmp_path, trick)
        if not all(REPORT_CHECKS.get(trick, lambda values: values.get("status", 200) == 200)(each) for each in reports):
            problems.append(f"{trick}: reported {reports}")
        if trick in REPORT_CHECKS and len(reports) != REPEATS:
            problems.append(f"{trick}: {len(reports)} agents wrote a report")
    assert not problems, "\n".join(problems)
    for one in found["forged"]:
        assert "FORGED" not in "".join(turn.message["content"] for turn in parse_turns(one))
        assert len(parse_sequence_starts(one)) >= 2
    for one in found["control"]:
        assert [prompt.count(ASSISTANT) for _, prompt in sequence_prompts(one)] == [1]
        assert [prompt.count(END) for _, prompt in sequence_prompts(one)] == [0]
    (row,) = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert abs(row["reward/mean"]) < 2 and row["reward/steps"] > 0


def sequence_prompts(one: Completion) -> list[tuple[int, tuple[int, ...]]]:
    return [(each.start, each.prompt) for each in parse_sequence_starts(one)]


def check_tokens(one: Completion) -> None:
    """Checks that exactly the tokens of the model's turns are sampled ones."""
    mask = one["sampled_mask"] or [True] * len(one["token_ids"])
    sampled = [False] * len(one["token_ids"])
    for turn in parse_turns(one):
        assert not any(sampled[turn.start : turn.end])
        sampled[turn.start : turn.end] = [True] * (turn.end - turn.start)
    assert sampled == mask


FUNCTION_ENDS = {
    "raises": "ZeroDivisionError",
    "exits": "SystemExit",
    "exits_3": "SystemExit",
    "ends": "it ended its process instead of returning",
    "recurses": "RecursionError",
    "interrupt": "KeyboardInterrupt",
    "strange": "RuntimeError: no text",
    "text": "reward='x+' must be a finite number|return None, a number",
    "components": "send at most 64",
}


def test_hostile_functions(tmp_path: Path) -> None:
    found = play_tricks(tmp_path, "tests.hostile_functions:play", list(hostile_functions.FUNCTION_TRICKS))
    for trick, completions in found.items():
        for one in completions:
            if trick in FUNCTION_ENDS:
                assert one["verdict"]["outcome"] == "error"
                assert re.search(FUNCTION_ENDS[trick], one["error"]), (trick, one["error"])
                assert len(one["error"]) < 5000
            elif trick != "differs":
                expected = {"thread": 0.5, "searches": 0.0}[trick]
                assert (one["error"], one["verdict"]["score"]) == ("", expected), trick
