"""Runs with agents: the same episodes as in an environment, rewards, faults and reports."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

import grpo
import grpo_async
from envs.group import SequenceStart
from tests.script_runner import SCHEDULE_CLASSES, compose_run_config, read_metrics
from torchgrpo.monitoring.completion_record import parse_sequence_starts, parse_turns
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.run.job import run_job

SMALL = ("env.num_envs=2", "env.repeats=4", "train.total_dialog_turns=24", "optimizer.lr=0")
SUMS = ("env.max_steps=3", "env.turn_tokens=8", "inference_model.max_tokens=24")
PRODUCTS = ("env.max_steps=2", "env.max_prompt_tokens=80", "inference_model.max_tokens=96")
ENVIRONMENT = "env.environment=tests.run_environments:WaitingSums"
WINDOW = "env.environment_options.window=true"


def play(folder: Path, script: ModuleType, *overrides: str) -> list[dict[str, Any]]:
    """Trains, and returns the ledger's groups in the order of their ids."""
    config = compose_run_config(*SMALL, *overrides)
    run_job(config, folder, script.train, SCHEDULE_CLASSES[script])
    return sorted(read_records(folder, "train"), key=lambda record: record["group_id"])


def assert_same_episodes(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Asserts that groups have equal tokens, masks, sequences, ends and scores, and close log-probs."""
    compared = min(len(ours), len(theirs))
    assert compared >= 4
    for first, second in zip(ours[:compared], theirs[:compared], strict=True):
        assert first["group_id"] == second["group_id"] and first["row"] == second["row"]
        for one, other in zip(first["completions"], second["completions"], strict=True):
            for name in ("token_ids", "sampled_mask", "finish_reason", "text"):
                assert one[name] == other[name], name
            assert sequence_starts(one, first) == sequence_starts(other, second)
            assert one["verdict"]["score"] == other["verdict"]["score"]
            assert one["log_probs"] == pytest.approx(other["log_probs"], abs=tolerance, rel=0)
            turns, other_turns = parse_turns(one), parse_turns(other)
            assert [(each.start, each.end) for each in turns] == [(each.start, each.end) for each in other_turns]


def sequence_starts(completion: dict[str, Any], group: dict[str, Any]) -> list[SequenceStart]:
    return parse_sequence_starts(completion) or [SequenceStart(0, tuple(group["prompt_tokens"]))]


@pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])
@pytest.mark.parametrize(
    ("environment", "agent"),
    [((ENVIRONMENT,), "play_sums"), ((ENVIRONMENT, WINDOW), "play_sums_in_a_window")],
    ids=["one sequence", "several sequences"],
)
def test_an_agent_plays_the_episodes_of_an_environment(
    tmp_path: Path, script: ModuleType, environment: tuple[str, ...], agent: str
) -> None:
    ours = play(tmp_path / "agent", script, *SUMS, f"env.agent=tests.run_agents:{agent}")
    theirs = play(tmp_path / "environment", script, *SUMS, *environment)
    assert_same_episodes(ours, theirs, tolerance=1e-5)


def test_episodes_that_run_alone_have_the_same_bits(tmp_path: Path) -> None:
    ours = play(tmp_path / "agent", grpo, *SUMS, "env.agent=tests.run_agents:play_sums", "env.episodes=1")
    theirs = play(tmp_path / "environment", grpo, *SUMS, ENVIRONMENT, "env.episodes=1")
    assert_same_episodes(ours, theirs, tolerance=0.0)


def test_native_tool_calls_of_an_agent_are_those_of_an_environment(tmp_path: Path) -> None:
    """An environment has the tools in the group's prompt, an agent in each request."""
    rows = [{"prompt": f"{12 + number}*{3 + number}=", "answer": (12 + number) * (3 + number)} for number in range(6)]
    data = tmp_path / "products.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = (f"env.data_files={data}", "env.dataset=jsonl", "model.name=torchgrpo/models/quickstart_tools")
    ours = play(tmp_path / "agent", grpo, *PRODUCTS, *tools, "env.agent=tests.run_agents:play_products")
    theirs = play(tmp_path / "environment", grpo, *PRODUCTS, *tools, "env.environment=products_by_tool")
    assert_same_episodes(ours, theirs, tolerance=1e-5)
    turns = [turn for group in ours for one in group["completions"] for turn in parse_turns(one)]
    assert sum("tool_calls" in turn.message for turn in turns) > len(ours)


def test_an_error_has_the_reason_of_the_refused_request(tmp_path: Path) -> None:
    agent = "env.agent=tests.run_agents:play_sums_or_send_nothing"
    groups = play(tmp_path, grpo, *SUMS, "env.max_error_rate=1", agent)
    errors = [one["error"] for group in groups if group["row"] % 2 == 0 for one in group["completions"]]
    assert errors and all("HTTP Error 400" in error and "the last refused request: " in error for error in errors)
    assert all("messages" in error.rpartition("request: ")[2] for error in errors)


@pytest.mark.long
def test_broken_requests_and_killed_agents_lose_nothing(tmp_path: Path) -> None:
    """About 1,000 requests: finished episodes have three turns, killed ones are errors."""
    many = ("env.num_envs=28", "env.repeats=4", "train.total_dialog_turns=336", "env.agent_env.MARK=one_bad_line")
    agent = "env.agent=tests.run_agents:play_sums_on_a_bad_line"
    groups = play(tmp_path, grpo, *SUMS, *many, agent, f"env.agent_env.FOLDER={tmp_path}", "env.max_error_rate=0.5")
    completions = [(group["row"], one) for group in groups for one in group["completions"]]
    assert len(completions) == 336 and len({group["group_id"] for group in groups}) == len(groups)
    killed = [one for row, one in completions if row % 50 == 1]
    assert killed and all(one["verdict"]["outcome"] == "error" and "SIGKILL" in one["error"] for one in killed)
    finished = [(row, one) for row, one in completions if row % 50 != 1]
    assert any(row % 20 == 0 for row, _ in finished)
    for _, one in finished:
        assert one["verdict"]["outcome"] == "scored" and len(parse_turns(one)) == 3
    rows = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert sum(row["agent/end/error"] * 112 for row in rows) == pytest.approx(len(killed))
    left = [process for process in psutil.process_iter() if "one_bad_line" in str(environ_of(process))]
    assert left == []


def environ_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
