"""Runs with a judge and a reward model."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import grpo
import grpo_async
from config.run_folder.checkpoints import checkpoint_path
from config.schema.env import EnvConfig
from config.schema.errors import RunError
from config.schema.jobs import RewardsConfig
from config.schema.model_rewards import JudgeConfig
from tests.diagnostics.short_runs import run_quickstart
from tests.rollout.judge_server import MODEL, JudgeServer, compare, completion, judge_server
from tests.rollout.test_reward_model import save_classifier
from tests.script_runner import read_metrics
from torchgrpo.run.jobs.rewards import score_completions
from torchgrpo.training.checkpoint import load_checkpoint

TWO_ITERATIONS = ("env.num_envs=4", "env.repeats=2", "train.total_dialog_turns=16", "env.reward_workers=1")


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


def judge_settings(server: JudgeServer) -> tuple[str, ...]:
    return (f"env.judge.url={server.url}", f"env.judge.model={MODEL}")


@pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])
def test_a_run_with_exact_judge_and_reward_model(script: ModuleType, server: JudgeServer, tmp_path: Path) -> None:
    classifier = save_classifier(tmp_path / "classifier", max_position_embeddings=512)
    run_dir = tmp_path / "run"
    run_quickstart(
        run_dir,
        *TWO_ITERATIONS,
        *("env.reward=[exact,judge,reward_model]", "env.reward_weights=[1,0.5,0]"),
        *(*judge_settings(server), f"env.reward_model.name={classifier}", "train.checkpoint_frequency=2"),
        "eval.sets={held:{dataset:arithmetic,limit:2}}",
        script=script,
    )
    rows = [row for row in read_metrics(run_dir) if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        scored = row["reward/exact"] + 0.5 * row["reward/judge"]
        assert row["reward/mean"] == pytest.approx(scored, abs=1e-5)
        assert row["reward/errors"] == 0 and row["reward/reward_model"] != 0
    last = rows[-1]
    assert 0 < last["judge/requests"] <= len(server.requests) and last["judge/retries"] == 0
    assert last["reward_model/rows"] >= 16 and last["reward_model/batch_size"] >= 1
    assert {"eval/held/score"} <= {name for row in read_metrics(run_dir) for name in row}
    state = load_checkpoint(checkpoint_path(run_dir, 2))
    assert state["judge_requests"] >= last["judge/requests"]


def test_a_judge_that_gives_no_grade_stops_the_run(server: JudgeServer, tmp_path: Path) -> None:
    server.respond = lambda request: completion("I cannot say.")
    with pytest.raises(Exception, match=r"env.max_error_rate=0.0: .* the last failure: .*no grade"):
        run_quickstart(
            tmp_path, *TWO_ITERATIONS, "env.reward=judge", *judge_settings(server), "env.judge.retries=0",
            "env.max_error_rate=0",
        )  # fmt: skip


def test_a_used_budget_stops_the_run(server: JudgeServer, tmp_path: Path) -> None:
    error = run_quickstart(
        tmp_path, *TWO_ITERATIONS, "env.reward=judge", *judge_settings(server), "env.judge.budget=3"
    )  # fmt: skip
    assert error is not None and "env.judge.budget=3: the run has sent 3 requests" in error
    assert len(server.requests) <= 3


@pytest.mark.parametrize("reward", ["judge", ["exact", "judge"]])
def test_saved_completions_are_judged(reward: str | list[str], server: JudgeServer, tmp_path: Path) -> None:
    rows, samples = tmp_path / "rows.jsonl", tmp_path / "samples.jsonl"
    rows.write_text(json.dumps({"prompt": "2 + 2?", "answer": "4"}) + "\n")
    texts = ("It is 4", "It is 5", "unsure")
    samples.write_text("".join(json.dumps({"row": 0, "completion": text}) + "\n" for text in texts))
    server.respond = lambda request: completion("hm") if request.data["answer"] == "unsure" else compare(request)
    env = EnvConfig(
        dataset="jsonl", data_files=str(rows), reward=reward, reward_timeout_s=60.0, max_error_rate=0.5,
        judge=JudgeConfig(server.url, MODEL, retries=0),
    )  # fmt: skip
    out, report = io.StringIO(), io.StringIO()
    assert score_completions(env, RewardsConfig(str(samples)), out, report) == 0
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["outcome"] for line in lines] == ["scored", "scored", "error"]
    assert [line["components"]["judge"] for line in lines[:2]] == [1.0, 0.0]
    assert "mean judge" in report.getvalue() and "last error: row 0: http" in report.getvalue()
    env.judge.budget = 1
    with pytest.raises(RunError, match=r"env.judge.budget=1: the run has sent 1 requests"):
        score_completions(env, RewardsConfig(str(samples)), io.StringIO(), io.StringIO())
