"""Checks of whole runs, with the quickstart's model, which answers well enough to be taught."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

import grpo
import grpo_async
from config.run_folder.checkpoints import checkpoint_path
from torchgrpo.monitoring.metrics import without_clocks
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped
from torchgrpo.selftest.check import Bench
from torchgrpo.selftest.tiny import TOKENIZER, configured
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import saved_tensors

QUICKSTART = (f"model.name={TOKENIZER}", "env.num_envs=8", "env.repeats=8")


def train(
    bench: Bench, *overrides: str, overlapped: bool = False, iterations: int = 2, name: str = "run"
) -> list[dict[str, Any]]:
    """The rows of a run of grpo.py or grpo_async.py, one for each optimizer step."""
    config = configured(bench, *QUICKSTART, *overrides)
    config.train.total_dialog_turns = iterations * config.completions_per_iteration
    folder = bench.folder / name
    folder.mkdir(exist_ok=True)
    if overlapped:
        run_job(config, folder, grpo_async.train, Overlapped)
    else:
        run_job(config, folder, grpo.train, Lockstep)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = config.total_optimizer_steps
    assert len(rows) == steps, f"{len(rows)} optimizer steps of {steps}"
    return rows


def schedule(
    bench: Bench, overrides: Sequence[str] = (), overlapped: bool = False, iterations: int = 2
) -> str:
    """Runs a script: weights move and arrive, and every number is finite."""
    rows = train(bench, *overrides, overlapped=overlapped, iterations=iterations)
    for row in rows:
        strange = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not strange, f"not finite: {', '.join(strange)}"
        assert row["grad_norm"] > 0, "the gradient is zero"
    assert rows[-1]["policy_version"] > rows[0]["policy_version"], "no new version was pushed"
    check = max(row["weight_check/largest"] for row in rows if "weight_check/largest" in row)
    mismatch = rows[-1]["mismatch/p99"]
    return f"{len(rows)} steps, weight check {check:.1g}, mismatch p99 {mismatch:.1g}"


def resume(bench: Bench, overrides: Sequence[str] = ()) -> str:
    """Resumes a run from a checkpoint: to the bit on a CPU, it is the run that never stopped."""
    usual = ("train.checkpoint_frequency=1", "train.keep_checkpoints=0", *overrides)
    whole = train(bench, *usual, iterations=4, name="whole")
    path = checkpoint_path(bench.folder / "whole", 2)
    again = train(bench, *usual, f"train.resume={path}", iterations=4, name="again")
    if bench.device == "cuda":
        assert [row["policy_version"] for row in again] == [row["policy_version"] for row in whole]
        return "goes on; kernels on GPUs promise no equal bits"
    same = [without_clocks(row) for row in again] == [without_clocks(row) for row in whole]
    assert same, "metrics differ after the checkpoint"
    ours, theirs = (
        saved_tensors(checkpoint_path(bench.folder / name, 4) / LEARNER) for name in ("whole", "again")
    )
    same = all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert same, "the learner differs after the checkpoint"
    return "equal bits"
