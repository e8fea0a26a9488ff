"""Checks that grpo.py and grpo_async.py train the quickstart's model, and that runs resume exactly.

This model is good enough to learn, unlike the random one of `tiny_model.py`.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

import grpo
import grpo_async
from config.run_folder.checkpoints import checkpoint_path
from torchgrpo.monitoring.metrics import without_timings
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun
from torchgrpo.selftest.check import CheckWorkspace
from torchgrpo.selftest.tiny_model import TOKENIZER, make_config
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import saved_tensors

QUICKSTART = (f"model.name={TOKENIZER}", "env.num_envs=8", "env.repeats=8")


def train(
    workspace: CheckWorkspace, *overrides: str, is_overlapped: bool = False, iterations: int = 2, name: str = "run"
) -> list[dict[str, Any]]:
    """Runs grpo.py or grpo_async.py; returns the metrics of each optimizer step."""
    config = make_config(workspace, *QUICKSTART, *overrides)
    config.train.total_dialog_turns = iterations * config.completions_per_iteration
    folder = workspace.folder / name
    folder.mkdir(exist_ok=True)
    if is_overlapped:
        run_job(config, folder, grpo_async.train, OverlappedRun)
    else:
        run_job(config, folder, grpo.train, LockstepRun)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = config.total_optimizer_steps
    assert len(rows) == steps, f"{len(rows)} optimizer steps of {steps}"
    return rows


def check_schedule(
    workspace: CheckWorkspace, overrides: Sequence[str] = (), is_overlapped: bool = False, iterations: int = 2
) -> str:
    """Runs a script, and checks that weights change, pushes arrive and metrics are finite."""
    rows = train(workspace, *overrides, is_overlapped=is_overlapped, iterations=iterations)
    for row in rows:
        infinite = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not infinite, f"not finite: {', '.join(infinite)}"
        assert row["grad_norm"] > 0, "the gradient is zero"
    assert rows[-1]["policy_version"] > rows[0]["policy_version"], "no new version was pushed"
    check = max(row["weight_check/max"] for row in rows if "weight_check/max" in row)
    mismatch = rows[-1]["logprob_diff/p99"]
    return f"{len(rows)} steps, weight check {check:.1g}, log-prob difference p99 {mismatch:.1g}"


def check_run_resume(workspace: CheckWorkspace, overrides: Sequence[str] = ()) -> str:
    """Checks that a resumed run equals an uninterrupted one, bit by bit on a CPU."""
    usual = ("train.checkpoint_frequency=1", "train.keep_checkpoints=0", *overrides)
    whole = train(workspace, *usual, iterations=4, name="whole")
    path = checkpoint_path(workspace.folder / "whole", 2)
    again = train(workspace, *usual, f"train.resume={path}", iterations=4, name="again")
    if workspace.device == "cuda":
        assert [row["policy_version"] for row in again] == [row["policy_version"] for row in whole]
        return "resumes; kernels on GPUs promise no equal bits"
    same = [without_timings(row) for row in again] == [without_timings(row) for row in whole]
    assert same, "metrics differ after the checkpoint"
    ours, theirs = (saved_tensors(checkpoint_path(workspace.folder / name, 4) / LEARNER) for name in ("whole", "again"))
    same = all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert same, "the learner differs after the checkpoint"
    return "equal bits"
