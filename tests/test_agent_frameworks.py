"""Runs with agents of public frameworks, also those that docs/agents.md shows."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import grpo
from config.schema.config import Config
from tests.script_runner import ROOT, compose_run_config, read_metrics
from torchgrpo.monitoring.completion_record import parse_sequence_starts, parse_turns
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
VERIFIERS = ROOT / ".venv-verifiers" / "bin" / "python"
PRODUCTS = (
    "model.name=models/quickstart_tools",
    "env.dataset=jsonl",
    "env.max_prompt_tokens=80",
    "env.max_steps=2",
    "inference_model.max_tokens=96",
)
SMALL = ("env.num_envs=2", "env.repeats=4", "train.total_dialog_turns=16", "train.optim_batch_size=8")
pytestmark = pytest.mark.long


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a folder of a run, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = [{"prompt": f"{a}*{b}=", "answer": a * b} for a in range(2, 100) for b in range(2, 100)]
    (tmp_path / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write_page_block(having: str, path: Path) -> None:
    (block,) = [body for body in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if having in body]
    path.write_text(block, encoding="utf-8")


def train(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Trains, and returns the completions of the ledger, each with its group."""
    run_job(config, folder / "run", grpo.train, LockstepRun)
    return [one | {"group": group} for group in read_records(folder / "run", "train") for one in group["completions"]]


def products_config(agent: str, *overrides: str) -> Config:
    return compose_run_config(*PRODUCTS, "env.data_files=products.jsonl", f"env.agent={agent}", *SMALL, *overrides)


def assert_turns_are_trained_once(completions: list[dict[str, Any]]) -> None:
    """Asserts that episodes have no error, one sequence, and their turns' tokens as sampled."""
    assert completions
    for one in completions:
        assert not one["error"] and one["finish_reason"] in ("stop", "turns")
        assert len(parse_sequence_starts(one)) <= 1
        spans = [(turn.start, turn.end) for turn in parse_turns(one)]
        assert spans and all(end <= start for (_, end), (start, _) in pairwise(spans))
        sampled = {index for start, end in spans for index in range(start, end)}
        mask = one["sampled_mask"] or [True] * len(one["token_ids"])
        assert sampled == {index for index, is_sampled in enumerate(mask) if is_sampled}
        assert all(index in sampled or value == 0 for index, value in enumerate(one["log_probs"]))


def assert_products(completions: list[dict[str, Any]]) -> None:
    """Asserts that most episodes call a tool, and that right last turns have the reward."""
    num_calls = 0
    for one in completions:
        *earlier, last = parse_turns(one)
        num_calls += sum("tool_calls" in turn.message for turn in earlier)
        prompt = one["group"]["messages"][-1]["content"]
        first, second = map(int, prompt.removesuffix("=").split("*"))
        is_right = last.message["content"].strip() == str(first * second)
        assert (one["verdict"]["components"]["accuracy"] == 1) == is_right
    assert num_calls > len(completions) / 2


def test_streams_of_the_openai_client(run_folder: Path) -> None:
    completions = train(run_folder, products_config("tests.framework_agents:stream_products"))
    assert len(completions) == 16
    assert_turns_are_trained_once(completions)
    assert_products(completions)


def test_the_openai_client_of_the_page(run_folder: Path) -> None:
    write_page_block("openai.OpenAI()", run_folder / "page_openai.py")
    completions = train(run_folder, products_config("page_openai:multiply"))
    assert len(completions) == 16
    assert_turns_are_trained_once(completions)
    assert_products(completions)


def test_training_through_openai_agents_lifts_the_reward(run_folder: Path) -> None:
    write_page_block("import agents", run_folder / "page_openai_agents.py")
    batch = ("env.num_envs=8", "env.repeats=8", "train.optim_batch_size=64", "train.total_dialog_turns=512")
    completions = train(run_folder, products_config("page_openai_agents:multiply", *batch))
    assert len(completions) == 512
    assert_turns_are_trained_once(completions)
    assert_products(completions)
    rewards = [row["reward/mean"] for row in read_metrics(run_folder / "run") if "reward/mean" in row]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.1, rewards


def test_verifiers_of_the_page(run_folder: Path) -> None:
    assert VERIFIERS.is_file(), f"{VERIFIERS} is missing: `make .venv-verifiers/done` creates it"
    write_page_block("import verifiers", run_folder / "my_verifiers.py")
    config = compose_run_config(*SMALL, "env.episodes=4", f"env.agent={VERIFIERS} my_verifiers.py")
    completions = train(run_folder, config)
    assert len(completions) == 16
    assert_turns_are_trained_once(completions)
    for one in completions:
        prompt = one["group"]["messages"][-1]["content"]
        (turn,) = parse_turns(one)
        is_right = turn.message["content"].strip() == str(sum(map(int, prompt.removesuffix("=").split("+"))))
        assert turn.reward == one["verdict"]["score"] == float(is_right)
